"""Bytes that are missing, in words."""

from __future__ import annotations

from collections.abc import Mapping

from bigplan.placement import Tier
from bigplan.units import format_bytes


def short_text(short: Mapping[Tier, int]) -> str:
    """'3.2 GiB of gpu memory per GPU and 40 GiB of host memory a node'."""
    return " and ".join(
        f"{format_bytes(nbytes)} of {tier} memory {'per GPU' if tier is Tier.GPU else 'a node'}"
        for tier, nbytes in short.items()
    )
