"""Missing bytes in words, and as an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bigplan.errors import InfeasibleError
from bigplan.placement import Tier
from bigplan.units import counted, format_bytes


def short_text(short: Mapping[Tier, int]) -> str:
    """'3.2 GiB of gpu memory per GPU and 40 GiB of host memory a node'."""
    return " and ".join(
        f"{format_bytes(nbytes)} of {tier} memory {'per GPU' if tier is Tier.GPU else 'a node'}"
        for tier, nbytes in short.items()
    )


def too_large(model: str, engine: str, shorts: Sequence[Mapping[Tier, int]]) -> InfeasibleError:
    """An error that none of an engine's ways fits; it names the nearest by bytes short."""
    closest = min(shorts, key=lambda short: (len(short), sum(short.values())))
    tier, nbytes = max(closest.items(), key=lambda item: item[1])
    missing = short_text(closest)
    return InfeasibleError(
        f"{model} does not fit with {engine}: {missing} short at least, of "
        f"{counted(len(shorts), 'way', 'ways')} to run it. Other engines may fit: --engine native",
        tier=str(tier),
        bytes_short=nbytes,
        remedy=missing,
    )
