"""What a training takes: days, dollars and kWh, from the price and power in the cluster file."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.plan import Plan

DAY = 86400.0
HOUR = 3600.0
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Bill:
    """Costs per million tokens, and of the whole training where its number of tokens is stated.

    Dollars are None where the cluster states no price, kWh where it states no power. All nodes of
    the plan are paid for, and draw their stated power, as long as the training takes.
    """

    nodes: int
    node_hours_per_million_tokens: float
    dollars_per_million_tokens: float | None
    kwh_per_million_tokens: float | None
    tokens: int | None = None
    days: float | None = None
    dollars: float | None = None
    kwh: float | None = None

    def meets(self, within: float | None) -> bool:
        """Whether the training ends within so many seconds."""
        return within is None or (self.days is not None and self.days * DAY <= within)

    @property
    def rank(self) -> float:
        """What to minimise, per million tokens: dollars, or node-hours where there is no price."""
        if self.dollars_per_million_tokens is None:
            return self.node_hours_per_million_tokens
        return self.dollars_per_million_tokens


def bill_of(plan: Plan) -> Bill:
    """The bill of a plan, from its predicted tokens a second."""
    group, tokens = plan.cluster.group, plan.training.tokens
    seconds = MILLION / plan.predicted.tokens_per_second
    node_hours = group.nodes * seconds / HOUR
    price = group.running.price if group.running else None
    power = group.running.power if group.running else None
    dollars = None if price is None else node_hours * price
    kwh = None if power is None else node_hours * power / 1e3
    millions = None if tokens is None else tokens / MILLION
    return Bill(
        nodes=group.nodes,
        node_hours_per_million_tokens=node_hours,
        dollars_per_million_tokens=dollars,
        kwh_per_million_tokens=kwh,
        tokens=tokens,
        days=None if millions is None else millions * seconds / DAY,
        dollars=_times(dollars, millions),
        kwh=_times(kwh, millions),
    )


def _times(each: float | None, millions: float | None) -> float | None:
    return None if each is None or millions is None else each * millions
