"""Plans have CUDA graphs where Python launches too slowly, and where graphs can repeat steps."""

from __future__ import annotations

import pytest

from bigplan.errors import InfeasibleError, InputError
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan, programs_of
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

pytestmark = pytest.mark.usefixtures("first_plans")

MODEL = find_model("tiny-llama-demo")
TRAINING = Training(sequence_length=256, global_batch=8)


def _plan(settings: dict[str, str | int | float], cluster: str = "h200-1x") -> Plan:
    return make_plan(Request(MODEL, TRAINING, find_cluster(cluster), settings))


def test_a_narrow_model_is_captured_and_faster_for_it() -> None:
    free, launched = _plan({"micro_batch": 1}), _plan({"micro_batch": 1, "captured": 0})
    assert free.placement.captured
    assert not launched.placement.captured
    assert free.predicted.step_seconds < launched.predicted.step_seconds


def test_what_captured_passes_drop_has_memory_of_its_own() -> None:
    _, (program,) = programs_of(_plan({"micro_batch": 1}))
    assert program.captured
    passes = 2 * 8 * MODEL.layers
    assert program.buffers["graphs"].nbytes > passes * 100_000
    _, (other,) = programs_of(_plan({"micro_batch": 1, "captured": 0}))
    assert "graphs" not in other.buffers


@pytest.mark.parametrize(
    "settings", [{"activations": "host"}, {"block.activations.host": 1}, {"captured": 0}]
)
def test_what_leaves_the_gpu_is_not_captured(settings: dict[str, str | int | float]) -> None:
    assert not _plan({"micro_batch": 1, **settings}).placement.captured


@pytest.mark.parametrize("split", ["tp", "pp"])
def test_passes_that_other_ranks_take_part_in_are_not_captured(split: str) -> None:
    assert not _plan({split: 2, "micro_batch": 1}, "dgx-h100").placement.captured


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_data_parallel_ranks_capture_their_passes(zero: int) -> None:
    assert _plan({"dp": 8, "zero": zero, "micro_batch": 1}, "dgx-h100").placement.captured


def test_graphs_that_cannot_be_are_refused() -> None:
    settings: dict[str, str | int | float] = {"activations": "host", "captured": 1}
    with pytest.raises(InfeasibleError):
        _plan(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 2}, "--set captured=1 with tp=2: CUDA graphs repeat passes in which no other rank"),
        ({}, "--set captured=1: CUDA graphs repeat kernels of a GPU, and"),
    ],
)
def test_what_no_plan_can_capture_is_refused_with_the_reason(
    settings: dict[str, str | int | float], message: str
) -> None:
    cluster = find_cluster("hgx-h200")
    if not settings:
        gpu = cluster.group.gpu.model_copy(update={"device": "cpu"})
        group = cluster.group.model_copy(update={"gpu": gpu})
        cluster = cluster.model_copy(update={"node_groups": (group,)})
    request = Request(MODEL, TRAINING, cluster, {**settings, "captured": 1})
    with pytest.raises(InputError) as caught:
        make_plan(request)
    assert message in str(caught.value)
