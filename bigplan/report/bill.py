"""Texts and tables about what a training costs: dollars, energy, and the wear of drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from bigplan.bill import Bill, bill_of
from bigplan.cheapest import Tried
from bigplan.plan import Plan
from bigplan.report.text import bytes_text, percent, table
from bigplan.units import counted, format_count
from bigplan.wear import Wear

WORTH_A_WORD = 0.01  # of a drive's rated writes: less is not mentioned


def bill_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Costs of a million tokens and of the whole training, where prices and tokens are stated."""
    bill, running = bill_of(plan), plan.cluster.group.running
    parts = _parts(bill.dollars_per_million_tokens, bill.kwh_per_million_tokens)
    if parts and running is not None:
        price = "" if running.price is None else f"{running.price:g} USD an hour"
        power = "" if running.power is None else f"{running.power / 1e3:g} kW"
        each = " and ".join(filter(None, (price, power)))
        nodes = counted(bill.nodes, "node")
        yield (
            "per 1 M tokens",
            f"{', '.join(parts)}  ({nodes} at {each}{' each' * (bill.nodes > 1)})",
        )
    if bill.tokens is not None and bill.days is not None:
        whole = [days_text(bill.days), *_parts(bill.dollars, bill.kwh)]
        yield "training", f"{', '.join(whole)} for {format_count(bill.tokens)} tokens"


def _parts(dollars: float | None, kwh: float | None) -> list[str]:
    money = [] if dollars is None else [dollars_text(dollars)]
    return money if kwh is None else [*money, kwh_text(kwh)]


def dollars_text(dollars: float) -> str:
    """Dollars with three digits: '$0.416', '$12,300', '$1.85 M'."""
    if dollars >= 1e6:
        return f"${dollars / 1e6:.3g} M" if dollars < 1e9 else f"${dollars / 1e9:.3g} B"
    return f"${float(f'{dollars:.3g}'):,.10g}"


def kwh_text(kwh: float) -> str:
    """Energy with three digits: '0.077 kWh', '12,300 kWh', '1.85 GWh'."""
    if kwh >= 1e6:
        return f"{kwh / 1e6:.3g} GWh"
    return f"{float(f'{kwh:.3g}'):,.10g} kWh"


def nodes_table(tried: Sequence[Tried], taken: int) -> Table:
    """A row per number of nodes that was planned, with its costs or why it has none."""
    figures = ("nodes", "days", "dollars", "kWh", "per 1 M tokens")
    rows = table("By number of nodes (the others idle)", *figures, "", right=figures)
    for one in tried:
        told = "taken" if one.nodes == taken else one.reason.partition(";")[0].partition(". ")[0]
        rows.add_row(str(one.nodes), *_figures(one.bill), told)
    return rows


def _figures(bill: Bill | None) -> tuple[str, str, str, str]:
    if bill is None:
        return "-", "-", "-", "-"
    if bill.dollars_per_million_tokens is None:
        each = f"{bill.node_hours_per_million_tokens:.3g} node-hours"
    else:
        each = dollars_text(bill.dollars_per_million_tokens)
    return (
        "-" if bill.days is None else f"{bill.days:.3g}",
        "-" if bill.dollars is None else dollars_text(bill.dollars),
        "-" if bill.kwh is None else kwh_text(bill.kwh).removesuffix(" kWh"),
        each,
    )


def wear_text(wear: Wear) -> str:
    """The wear in one sentence."""
    last = "lasts" if wear.drives == 1 else "last"
    if wear.life_days is None:
        life = f"how long its {wear.named} {last} is unknown: endurance not stated"
    else:
        life = f"its {wear.named} {last} {days_text(wear.life_days)}"
    if wear.job_share is not None and (wear.steps is None or wear.job_share >= WORTH_A_WORD):
        life += f"; {job_text(wear)} {percent(wear.job_share)} of the writes rated for"
    return (
        f"Each node writes {bytes_text(wear.bytes_per_step)} to NVMe a step, "
        f"{bytes_text(wear.bytes_per_day)} a day of training; {life}."
    )


def job_text(wear: Wear) -> str:
    """The subject and verb of a sentence about writes: 'the whole training takes'."""
    if wear.steps is None:
        return "the whole training takes"
    return f"{counted(wear.steps, 'step')} {'takes' if wear.steps == 1 else 'take'}"


def days_text(days: float) -> str:
    """The time in days, or in years from two years on."""
    if days >= 730:
        return f"{days / 365:.3g} years"
    return "1 day" if f"{days:.3g}" == "1" else f"{days:.3g} days"
