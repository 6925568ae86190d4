"""Figures that no machine has, which are units left out.

A number without a unit is in SI units. Less of these than a million, or such times from a second
on, is no machine but a unit left out, as in `memory: 80`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from bigplan.spec.problems import KeyPath
from bigplan.units import BANDWIDTH, BYTES, FLOPS, RATE, SECONDS, Quantity, exact_text

SMALLEST = 2**20
_LARGE: Mapping[str, Quantity] = {
    **dict.fromkeys(("memory", "capacity", "endurance"), BYTES),
    **dict.fromkeys(("memory_bandwidth", "bandwidth", "read", "write"), BANDWIDTH),
    **dict.fromkeys(("host_to_device", "device_to_host"), BANDWIDTH),
    **dict.fromkeys(("node_host_to_device", "node_device_to_host"), BANDWIDTH),
    "peak_flops": FLOPS,
    "adam_rate": RATE,
}
_SHORT = ("latency", "launch_overhead")


def left_out_units(block: BaseModel) -> Iterator[tuple[KeyPath, str]]:
    """Where in a part of a machine such a figure stands, and what is wrong with it."""
    for path, value in _numbers(block):
        name = path[0]
        quantity = _LARGE.get(name, SECONDS)
        if value < SMALLEST if name in _LARGE else name in _SHORT and value >= 1:
            yield (
                path,
                f"is {exact_text(quantity, value)}, which no machine has; a number without a unit "
                f"is in SI units: write the unit, such as '{quantity.example}'",
            )


def _numbers(block: BaseModel) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number by FIELD, or by FIELD and PRECISION."""
    for name, value in block:
        if isinstance(value, int | float):
            yield (name,), value
        elif isinstance(value, Mapping):
            for part, number in value.items():
                if isinstance(number, int | float):
                    yield (name, part), number
