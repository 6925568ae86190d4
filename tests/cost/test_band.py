from __future__ import annotations

import csv
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.band import BANDS, ErrorClass, error_band, error_class
from bigplan.spec.gpu import find_gpu, list_gpus

RECENT = ErrorClass.RECENT_GPU
BEFORE = ("2026-11-21", "2026-11-22-h200-lanes")  # profiles did not time updates beside copies yet


def test_classes() -> None:
    assert error_class("NVIDIA H200", offloads=False) is ErrorClass.KNOWN_GPU
    assert error_class("NVIDIA B200", offloads=False) is ErrorClass.RECENT_GPU
    assert error_class("NVIDIA L4", offloads=False) is ErrorClass.OTHER_GPU
    assert error_class("NVIDIA H200", offloads=True) is ErrorClass.OFFLOAD
    assert error_class("NVIDIA L4", offloads=True) is ErrorClass.OFFLOAD
    profiled = error_class("NVIDIA H200", offloads=True, profiled=True)
    assert profiled is ErrorClass.PROFILED_OFFLOAD
    assert error_class("NVIDIA L4", offloads=False, profiled=True) is ErrorClass.OTHER_GPU


def test_only_gpus_with_many_published_runs_are_known() -> None:
    names = {name: find_gpu(name).name for name in list_gpus()}
    known = {n for n, g in names.items() if error_class(g, offloads=False) is ErrorClass.KNOWN_GPU}
    assert known >= {"a100-sxm4-80gb", "h100-sxm-80gb", "h200-sxm"}
    assert not known & {"l4", "t4", "rtx-4090", "rtx-3090", "v100-sxm2-32gb", "b200"}
    recent = {n for n, g in names.items() if error_class(g, offloads=False) is RECENT}
    assert recent == {"b200", "b300", "gb200", "gb300"}


def test_a_prediction_divided_by_its_error_is_what_is_measured() -> None:
    low, high = BANDS[ErrorClass.KNOWN_GPU]
    fastest, slowest = error_band(10.0, "NVIDIA H200", offloads=False)
    # Where predictions are too high by up to `high`, runs are faster than predicted by as much.
    assert fastest == pytest.approx(10.0 / high)
    assert slowest == pytest.approx(10.0 / low)


@given(st.floats(1e-3, 1e6), st.sampled_from(list_gpus()), st.booleans())
def test_a_band_holds_its_prediction(seconds: float, gpu: str, offloads: bool) -> None:
    low, high = error_band(seconds, find_gpu(gpu).name, offloads=offloads)
    assert 0 < low <= seconds <= high
    assert low < high


def test_what_was_seen_less_is_less_certain() -> None:
    def width(gpu: str, offloads: bool) -> float:
        low, high = error_band(1.0, gpu, offloads=offloads)
        return high / low

    assert width("NVIDIA A100", False) < width("NVIDIA B200", False) < width("NVIDIA L4", False)
    for gpu in ("NVIDIA A100", "NVIDIA B200", "NVIDIA L4"):
        assert width(gpu, False) < width(gpu, True)


def test_a_profile_narrows_what_is_not_known_of_offloading_alone() -> None:
    unknown, profiled = (
        error_band(1.0, "NVIDIA H200", offloads=True, profiled=p) for p in (False, True)
    )
    assert profiled[1] < unknown[1]
    assert error_band(1.0, "NVIDIA L4", offloads=True, profiled=True)[1] > profiled[1]


def test_the_profiled_band_is_that_of_the_committed_runs() -> None:
    """The shortest interval with 1 and 80% of predicted over measured, of cases off the GPU."""
    runs = Path(__file__).parents[2] / "benchmarks/results/limit.csv"
    ratios = []
    with runs.open() as lines:
        for run in csv.DictReader(lines):
            if not run["folder"].startswith(BEFORE) and not run["case"].startswith("b"):
                ratios.append(float(run["predicted_seconds"]) / float(run["seconds"]))
    ratios.sort()
    held = ceil(0.8 * len(ratios))
    starts = range(len(ratios) - held + 1)
    ends = [(min(1.0, ratios[i]), max(1.0, ratios[i + held - 1])) for i in starts]
    shortest = min(ends, key=lambda pair: pair[1] / pair[0])
    assert len(ratios) == 98
    assert BANDS[ErrorClass.PROFILED_OFFLOAD] == pytest.approx(shortest, abs=1e-3)


def test_the_band_of_experts_is_the_shortest_that_holds_four_of_five_published_runs() -> None:
    runs = Path(__file__).parents[2] / "benchmarks/results/2026-11-27-expert-parallel/errors.csv"
    with runs.open() as file:
        ratios = sorted(1 + float(row["error_pct_ports"]) / 100 for row in csv.DictReader(file))
    number = ceil(0.8 * len(ratios))
    bands = zip(ratios, ratios[number - 1 :], strict=False)
    low, high = min((b for b in bands if b[0] <= 1 <= b[1]), key=lambda band: band[1] - band[0])
    assert BANDS[ErrorClass.EXPERTS] == pytest.approx((low, high))
    dense, routed = (
        error_band(1.0, "NVIDIA H100", offloads=False, experts=e) for e in (False, True)
    )
    assert routed[0] < dense[0] < dense[1] < routed[1]
