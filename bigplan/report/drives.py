"""How long drives last, in words."""

from __future__ import annotations

from bigplan.report.text import bytes_text, percent
from bigplan.wear import Wear


def wear_text(wear: Wear) -> str:
    """The wear in one sentence."""
    last = "lasts" if wear.drives == 1 else "last"
    if wear.life_days is None:
        life = f"how long its {wear.named} {last} is unknown: endurance not stated"
    else:
        life = f"its {wear.named} {last} {days_text(wear.life_days)}"
    if wear.job_share is not None:
        life += f"; the whole training takes {percent(wear.job_share)} of the writes rated for"
    return (
        f"Each node writes {bytes_text(wear.bytes_per_step)} to NVMe a step, "
        f"{bytes_text(wear.bytes_per_day)} a day of training; {life}."
    )


def days_text(days: float) -> str:
    """Days, or from two years on years."""
    if days >= 730:
        return f"{days / 365:.3g} years"
    return "1 day" if f"{days:.3g}" == "1" else f"{days:.3g} days"
