"""What the graph would take on a cluster: seconds and capacities for one rank."""

from bigplan.cost.costs import Costs, GpuWaits, KindCost
from bigplan.cost.price import price
from bigplan.cost.rates import Rates

__all__ = ["Costs", "GpuWaits", "KindCost", "Rates", "price"]
