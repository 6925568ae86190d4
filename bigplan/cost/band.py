"""The error band of a plan: how far predictions were from runs that the constants had not seen.

Every source of published runs was left out in turn: the constants were fitted to the others, and
then predicted its runs (benchmarks/fit_constants.py --leave-out; output in benchmarks/results/).
The band is the shortest interval that holds 1 and 80% of those runs' predicted over measured.
Errors are larger for runs that move state off the GPU, and for GPUs with few or no other runs to
fit to. All rows count but those of trust C. So the V100 table counts, though its source warns of
40% between allocations: a GPU that nobody measured may be used no better.

Published runs that move state are DeepSpeed's. Where the machine was profiled and one GPU runs the
plan, the native runtime's own runs count instead.
"""

from __future__ import annotations

import re
from enum import StrEnum

KNOWN_GPUS = re.compile(r"A100|H100|H200")
RECENT_GPUS = re.compile(r"B200|B300")


class ErrorClass(StrEnum):
    """Runs whose errors are alike."""

    KNOWN_GPU = "known GPU"
    RECENT_GPU = "recent GPU"  # a few runs, all of its vendor
    OTHER_GPU = "other GPU"  # few runs or none; those that there are differ among themselves
    OFFLOAD = "offload"
    EXPERTS = "experts"  # as Megatron Core runs them
    PROFILED_OFFLOAD = "offload, profiled"  # the native runtime's on one GPU


# Predicted over measured of 385, 24, 54 and 13 rows left out, 2026-11-24. "Other GPU" is the V100
# tables, from which nothing is fitted. "Offload" is DeepSpeed alone, and wide because of V100s
# that are predicted too fast, with offload or without. "Offload, profiled" is 98 runs on fifteen
# or more H200 machines: benchmarks/results/2026-11-22-h200-one-at-a-time, -each-way, -drive,
# -looked-up, -rows-apart, -in-turns, -less-again and -in-place, and 2026-11-23-h200-turns, -threads
# and -sums. Large errors come from drives and CPU updates whose rates change from minute to minute.
# Most other runs are predicted 3 to 8% too fast: in steps the GPU's power limit holds its clock
# lower than in the profile. "Experts" is the 34 rows of Qwen3, which took no part in any fit
# (2026-11-27-expert-parallel).
BANDS = {
    ErrorClass.KNOWN_GPU: (0.919, 1.093),
    ErrorClass.RECENT_GPU: (0.825, 1.175),
    ErrorClass.OTHER_GPU: (0.491, 1.027),
    ErrorClass.OFFLOAD: (0.464, 1.116),
    ErrorClass.EXPERTS: (0.677, 1.335),
    ErrorClass.PROFILED_OFFLOAD: (0.861, 1.000),
}


def error_class(gpu_name: str, *, offloads: bool, profiled: bool = False) -> ErrorClass:
    """The class of a plan or a run on GPUs of that name."""
    if offloads:
        return ErrorClass.PROFILED_OFFLOAD if profiled else ErrorClass.OFFLOAD
    if KNOWN_GPUS.search(gpu_name):
        return ErrorClass.KNOWN_GPU
    return ErrorClass.RECENT_GPU if RECENT_GPUS.search(gpu_name) else ErrorClass.OTHER_GPU


def error_band(
    seconds: float,
    gpu_name: str,
    *,
    offloads: bool,
    profiled: bool = False,
    experts: bool = False,
) -> tuple[float, float]:
    """Seconds between which four of five such predictions are when measured, or more of them.

    A plan that moves state errs as such runs do, and as runs on its GPU do: the wider of each side.
    So does one of another tool with `experts`.
    `profiled`: it is for one GPU, and copies and updates were measured beside each other.
    """
    moves = (False, offloads)
    classes = {error_class(gpu_name, offloads=some, profiled=profiled) for some in moves}
    classes |= {ErrorClass.EXPERTS} if experts else set()
    low = min(BANDS[one][0] for one in classes)
    high = max(BANDS[one][1] for one in classes)
    return seconds / max(high, 1.0), seconds / min(low, 1.0)
