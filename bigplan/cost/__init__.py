"""What the graph would take on a cluster: seconds and capacities for one rank."""

from bigplan.cost.price import Costs, KindCost, Rates, Waits, price

__all__ = ["Costs", "KindCost", "Rates", "Waits", "price"]
