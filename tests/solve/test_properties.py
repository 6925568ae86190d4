"""What every search keeps, on random small workloads: pins, more of anything, and idle GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.errors import InfeasibleError
from bigplan.solve.candidate import Workload
from bigplan.solve.pins import parse_pins
from bigplan.solve.search import Found, Scope, search
from bigplan.solve.simplicity import DRIVE, mechanisms
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.examples import examples

PREFERRED, NOISE = 1.01, 1.005  # what simplicity may cost, and what is no difference
CLUSTERS = {"rtx-4090-workstation": (6, 24), "h200-1x": (12, 40), "t4-cloud": (6, 14)}


def _training(length: int, batch: int, precision: Literal["fp16", "bf16"] = "bf16") -> Training:
    return Training(sequence_length=length, global_batch=batch, precision=precision)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """A few layers of a model on a machine whose GPUs, hosts and drives are small beside it."""
    name = draw(st.sampled_from(sorted(CLUSTERS)))
    low, high = CLUSTERS[name]
    cluster = find_cluster(name).with_caps(
        gpu=draw(st.integers(low, high)) << 30, host=draw(st.integers(16, 48)) << 30
    )
    model = find_model(draw(st.sampled_from(("llama-3-8b", "llama-2-13b"))))
    model = model.model_copy(update={"layers": draw(st.integers(3, 5))})
    length, batch = draw(st.sampled_from((1024, 4096))), draw(st.sampled_from((2, 4)))
    training = _training(length, batch, "fp16" if name == "t4-cloud" else "bf16")
    return Workload(model, training, cluster.group)


def _found(workload: Workload, pinned: Mapping[str, str | int | float]) -> Found | None:
    fixed, pins = parse_pins({"micro_batch": 1, **pinned})  # one family of strategies is fast
    try:
        return search(workload, Scope(fixed, pins))
    except InfeasibleError:
        return None


Pinned = dict[str, str | int | float]
BEST: Pinned = {"dp": 4, "zero": 2, "accumulation_group": 4}
PINS: tuple[Pinned, ...] = (
    {"gradients": "host"},
    {"optimizer": "host"},
    {"recompute": "full"},
    {"block.activations": "host"},
    {"streamed": 0.5},
    {"accumulation_group": 1},
    {"slots": 2},
)


@settings(max_examples=examples(4))
@given(workloads(), st.sampled_from(PINS))
def test_no_pin_beats_the_free_plan(
    workload: Workload, pinned: Mapping[str, str | int | float]
) -> None:
    free, held = _found(workload, {}), _found(workload, pinned)
    if held is not None:
        assert free is not None
        assert free.best.expected <= PREFERRED * NOISE * held.best.expected
        assert free.bound <= held.best.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("machine", "training", "both", "pinned"),
    [
        # A loss by larger chunks in other rings than the first program's: 4.7% faster. Of the best
        # strategy: to find it takes 30 s of a core.
        (("t4-cloud", 14, 43), _training(4096, 16, "fp16"), BEST, {"slots": 2}),
        # A strategy that is 9% slower until both are improved: 8.5% faster.
        (("h200-1x", 18, 36), _training(1024, 8), {}, {"accumulation_group": 1}),
    ],
    ids=["chunk", "strategy"],
)
def test_pins_that_beat_the_free_plan_once(
    machine: tuple[str, int, int], training: Training, both: Pinned, pinned: Pinned
) -> None:
    cluster, gpu, host = machine
    capped = find_cluster(cluster).with_caps(gpu=gpu << 30, host=host << 30)
    model = find_model("llama-3-8b").model_copy(update={"layers": 4})
    workload = Workload(model, training, capped.group)
    free, held = _found(workload, both), _found(workload, both | pinned)
    assert free is not None
    assert held is not None
    assert free.best.expected <= PREFERRED * NOISE * held.best.expected


def test_all_gradients_in_host_memory_are_tried_where_some_are() -> None:
    """The plan with some was 7% slower: 36 layers move one by one, and each move is slower."""
    workload = Workload(
        find_model("qwen3-4b"),
        _training(8192, 512),
        find_cluster("rtx-4090-workstation").group,
    )
    one = {"accumulation_group": 1}
    free, held = _found(workload, one), _found(workload, one | {"gradients": "host"})
    assert free is not None
    assert held is not None
    assert free.best.expected <= 1.03 * held.best.expected


@settings(max_examples=examples(4))
@given(workloads())
def test_a_drive_is_written_for_more_than_a_hundredth_of_a_step_alone(workload: Workload) -> None:
    spared = _found(replace(workload, nodes=workload.nodes.model_copy(update={"nvme": None})), {})
    free = _found(workload, {})
    if spared is not None:
        assert free is not None
        assert free.best.expected <= PREFERRED * NOISE * spared.best.expected
        if DRIVE in mechanisms(free.best.placement):
            assert free.best.expected * PREFERRED <= NOISE * spared.best.expected


@settings(max_examples=examples(4))
@given(workloads(), st.sampled_from(("cpu", "drive", "host", "gpu")))
def test_more_of_anything_is_never_slower(workload: Workload, what: str) -> None:
    nodes = workload.nodes
    host, nvme, gpu = nodes.host, nodes.nvme, nodes.gpu
    if what == "cpu" and host.adam_rate_beside_copies is not None:
        changed = {"adam_rate_beside_copies": 1.3 * host.adam_rate_beside_copies}
        more = nodes.model_copy(update={"host": host.model_copy(update=changed)})
    elif what == "drive" and nvme is not None:
        rates = {"read": 1.3 * nvme.read, "write": 1.3 * nvme.write}
        more = nodes.model_copy(update={"nvme": nvme.model_copy(update=rates)})
    elif what == "gpu":
        larger = gpu.model_copy(update={"memory": gpu.memory + (4 << 30)})
        more = nodes.model_copy(update={"gpu": larger})
    else:
        larger_host = host.model_copy(update={"memory": host.memory + (16 << 30)})
        more = nodes.model_copy(update={"host": larger_host})
    before, after = (
        _found(workload, {}),
        _found(Workload(workload.model, workload.training, more), {}),
    )
    if before is not None:
        assert after is not None
        assert after.best.expected <= PREFERRED * NOISE * before.best.expected
        assert before.bound <= before.best.seconds * (1 + 1e-9)


def test_the_bound_is_below_the_plan_on_a_slow_drive() -> None:
    """A drive of 1 GB/s, behind which all rows but those of drives are next to nothing."""
    nodes = find_cluster("rtx-4090-workstation").with_caps(gpu=8 << 30, host=16 << 30).group
    assert nodes.nvme is not None
    slow = nodes.nvme.model_copy(update={"read": 1e9, "write": 1e9})
    model = find_model("llama-3-8b").model_copy(update={"layers": 8})
    workload = Workload(
        model,
        Training(sequence_length=4096, global_batch=16),
        nodes.model_copy(update={"nvme": slow}),
    )
    found = search(workload, Scope())
    assert found.bound <= found.best.seconds * (1 + 1e-9)
