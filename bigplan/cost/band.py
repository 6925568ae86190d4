"""How far predictions were from runs the constants had not seen: the error band of a plan.

Every source of published runs was left out in turn, the constants fitted to the others, and its
runs predicted (benchmarks/fit_constants.py --leave-out; output in benchmarks/results/). The band is
what lies between the 10% and the 90% quantile of predicted over measured of those runs, so that it
covers 80% of them. Runs that move state off the GPU err more than others, and so do GPUs of which
few or no runs were left to fit to. Runs whose source warns of 40% between allocations (V100 tables)
are not counted.
"""

from __future__ import annotations

import re
from enum import StrEnum

KNOWN_GPUS = re.compile(r"A100|H100|H200")


class ErrorClass(StrEnum):
    """Runs whose errors are alike."""

    KNOWN_GPU = "known GPU"
    OTHER_GPU = "other GPU"
    OFFLOAD = "offload"


# Predicted over measured, 10% and 90% quantiles of the rows left out, 2026-11-21.
QUANTILES = {
    ErrorClass.KNOWN_GPU: (0.837, 1.064),
    ErrorClass.OTHER_GPU: (0.749, 1.108),
    ErrorClass.OFFLOAD: (0.817, 1.037),
}


def error_class(gpu_name: str, *, offloads: bool) -> ErrorClass:
    """The class of a plan or a run on GPUs of that name."""
    if offloads:
        return ErrorClass.OFFLOAD
    return ErrorClass.KNOWN_GPU if KNOWN_GPUS.search(gpu_name) else ErrorClass.OTHER_GPU


def error_band(seconds: float, gpu_name: str, *, offloads: bool) -> tuple[float, float]:
    """Seconds between which four of five such predictions are when measured, or more of them.

    A plan that moves state errs as such runs do, and as runs on its GPU do: the wider of each side.
    """
    classes = {error_class(gpu_name, offloads=moves) for moves in (False, offloads)}
    low = min(QUANTILES[one][0] for one in classes)
    high = max(QUANTILES[one][1] for one in classes)
    return seconds / max(high, 1.0), seconds / min(low, 1.0)
