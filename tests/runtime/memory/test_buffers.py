"""The memory promise: sizes from the plan, allocated at once, or refused before."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings

pytest.importorskip("torch")

import torch

from bigplan.errors import InputError, PreflightError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower_stage
from bigplan.mechanics import ALIGNMENT, PAGE
from bigplan.placement import Tier
from bigplan.plan import Plan, graph_of
from bigplan.program import Op, Program, expand
from bigplan.runtime.memory import buffers as memory
from bigplan.runtime.memory.buffers import AllocationSizes, Memory, check_machine, static_sizes
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.training import ValidationSpec
from tests.examples import examples
from tests.runtime.harness import check, context_of, execute, started
from tests.runtime.plans import placed, plan_of, plans, tiny_model, tiny_training
from tests.toys import kind_placement

CPU = torch.device("cpu")
SIZES = AllocationSizes(device=3000, host=5000, disk=8192)
ROOMY = 10**15


def _program(plan: Plan) -> Program:
    graph = graph_of(plan)
    return lower_stage(graph, plan.placement, 0)


def _promised(program: Program) -> dict[Tier, int]:
    """Bytes by tier, without what torch allocates as it goes."""
    promised = program.bytes_by_tier()
    for buffer in program.buffers.values():
        if buffer.dynamic:
            assert buffer.tier is Tier.GPU
            promised[Tier.GPU] -= buffer.total
    return promised


@given(plans())
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_memory_takes_exactly_the_static_sizes(plan: Plan) -> None:
    program = _program(plan)
    sizes = static_sizes(program)
    promised = _promised(program)
    count = sum(buffer.count for buffer in program.buffers.values())
    for size, tier, unit in (
        (sizes.device, Tier.GPU, ALIGNMENT),
        (sizes.host, Tier.HOST, PAGE),
        (sizes.disk, Tier.NVME, PAGE),
    ):
        # What the plan counted, each entry padded to where the next may start.
        assert promised[tier] <= size <= promised[tier] + count * unit


@given(plans())
@settings(max_examples=examples(8), derandomize=True, deadline=None)
def test_a_step_takes_nothing_more(plan: Plan) -> None:
    with started(plan) as worker:
        store = context_of(worker).memory
        sizes = static_sizes(context_of(worker).program)
        before = (store.arena.used, store.slab.used, store.disk.size if store.disk else 0)
        assert before == (sizes.device, sizes.host, sizes.disk)
        assert (store.arena.size, store.slab.size) == (sizes.device, sizes.host)
        worker.step()
        # What is reported is what the plan promised: what pages round up to is no tensor's.
        assert worker.finish().memory == _promised(context_of(worker).program)


@given(plans())
@settings(max_examples=examples(8), derandomize=True, deadline=None)
def test_entries_do_not_overlap(plan: Plan) -> None:
    with started(plan) as worker:
        store = context_of(worker).memory
        for key, place in store._places.items():
            buffer = store.buffers[key[0]]
            assert place.numel() >= buffer.nbytes
            assert place.data_ptr() % (ALIGNMENT if buffer.tier is Tier.GPU else PAGE) == 0
        _take_apart(store)
        spans = [(p.data_ptr(), p.data_ptr() + p.numel()) for p in store._places.values()]
        spans = sorted(span for span in spans if span[0] < span[1])
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        extents = sorted((s, s + store.buffers[key[0]].nbytes) for key, s in store._extents.items())
        assert all(a[1] <= b[0] for a, b in pairwise(extents))


def _take_apart(store: Memory) -> None:
    """Of buffers in one and the same memory leave the larger, which holds the other's first bytes.

    Entries of the other follow each other from its start.
    """
    for buffer in store.buffers.values():
        if buffer.within:
            lent, *others = (
                store._places[buffer.within, 0],
                *(store._places[buffer.name, i] for i in range(buffer.count)),
            )
            assert [p.data_ptr() for p in others] == [
                lent.data_ptr() + i * others[0].numel() for i in range(buffer.count)
            ]
            if buffer.count * others[0].numel() > lent.numel():
                del store._places[buffer.within, 0]
            else:
                for i in range(buffer.count):
                    del store._places[buffer.name, i]


def test_activations_lie_where_their_gradients_do() -> None:
    with started(_offloaded(slots=1)) as worker:
        store = context_of(worker).memory
        assert store.buffers["a1"].within == "g1"
        assert store.place(("a1", 0)).data_ptr() == store.place(("g1", 0)).data_ptr()


def _offloaded(slots: int) -> Plan:
    """Two blocks that are at home in host memory, two micro-batches a step, which pass together."""
    away = kind_placement(2, Tier.HOST, Tier.HOST, (Recompute.NONE, Tier.HOST), Tier.HOST)
    placement = placed(slots, embedding=kind_placement(1), block=away, head=kind_placement(1))
    strategy = Strategy(dp=1, accumulation_group=2)
    return plan_of(tiny_model(), tiny_training(2, clip_norm=0.5), strategy, placement)


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_offloaded_activations_train_as_a_plain_loop_does(recompute: Recompute, slots: int) -> None:
    """With 2 slots the ring holds the last layer, with 3 an entry more, with 1 nothing."""
    plan = _offloaded(slots)
    stage = plan.placement.stages[0]
    block = stage.kinds["block"].model_copy(update={"activations": {recompute: {Tier.HOST: 2}}})
    stage = stage.model_copy(update={"kinds": {**stage.kinds, "block": block}})
    placement = plan.placement.model_copy(update={"stages": (stage,)})
    plan = plan.model_copy(update={"placement": placement})
    moved = [a.layer for a in expand(_program(plan).step) if a.op is Op.SAVE]
    assert moved == ([1, 1, 2, 2] if slots == 1 else [1, 1])
    check(plan, execute(plan))


def _available(monkeypatch: pytest.MonkeyPatch, host: int = ROOMY, disk: int = ROOMY) -> None:
    monkeypatch.setattr(memory, "available_host_memory", lambda: host)
    monkeypatch.setattr(memory, "available_disk", lambda _: disk)


def test_a_machine_with_just_enough_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Without a GPU the device's memory is host memory; two ranks need all of it twice.
    _available(monkeypatch, host=2 * (3000 + 5000), disk=2 * 8192)
    check_machine(SIZES, CPU, tmp_path, ranks=2)


@pytest.mark.parametrize(
    ("short", "words"),
    [
        ({"host": 2 * 8000 - 1}, "of host memory for 2 rank"),
        ({"disk": 2 * 8192 - 1}, "of disk space at .* for 2 rank"),
    ],
)
def test_what_is_short_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short: dict[str, int], words: str
) -> None:
    _available(monkeypatch, **short)
    with pytest.raises(PreflightError, match=words):
        check_machine(SIZES, CPU, tmp_path, ranks=2)


def test_a_device_too_small_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _available(monkeypatch, host=5000, disk=8192)  # on a GPU the host holds the host's part alone
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3000, 10**9))
    check_machine(SIZES, device, tmp_path, ranks=1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2999, 10**9))
    with pytest.raises(PreflightError, match="of memory on cuda:0"):
        check_machine(SIZES, device, tmp_path, ranks=1)


def test_preflight_refuses_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everywhere = kind_placement(1, gradients=Tier.HOST, optimizer=Tier.NVME)
    placement = placed(embedding=everywhere, block=everywhere, head=everywhere)
    plan = plan_of(tiny_model(layers=1), tiny_training(1), Strategy(dp=1), placement)
    _available(monkeypatch, host=0)
    worker = NativeWorker(plan, 0, tmp_path)
    with pytest.raises(PreflightError, match="host memory"):
        worker.preflight()
    worker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_text_too_short_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    everywhere = kind_placement(1, gradients=Tier.HOST, optimizer=Tier.NVME)
    placement = placed(embedding=everywhere, block=everywhere, head=everywhere)
    text = tmp_path / "text"
    text.write_text("short")
    training = tiny_training(1, data=str(text))
    worker = NativeWorker(
        plan_of(tiny_model(layers=1), training, Strategy(dp=1), placement), 0, tmp_path
    )
    with pytest.raises(InputError, match="more text"):
        worker.preflight()
    with pytest.raises(InputError, match="more text"):
        worker.start(Path())
    worker.close()
    assert list(tmp_path.iterdir()) == [text]


def test_data_of_another_vocabulary_is_refused_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    everywhere = kind_placement(1)
    placement = placed(embedding=everywhere, block=everywhere, head=everywhere)
    small = tiny_model(layers=1, vocab=128)
    plan = plan_of(small, tiny_training(1), Strategy(dp=1), placement)
    with pytest.raises(InputError, match=r"token 255, and tiny has a vocabulary of 128 \(0 to 127"):
        NativeWorker(plan, 0, tmp_path).preflight()
    training = tiny_training(1, validation=ValidationSpec(data=str(tmp_path / "none")))
    plan = plan_of(tiny_model(layers=1), training, Strategy(dp=1), placement)
    with pytest.raises(InputError, match="none cannot be read"):
        NativeWorker(plan, 0, tmp_path).preflight()


def test_poison_is_nan_in_every_dtype() -> None:
    poisoned = torch.full((8,), memory.POISON, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert bool(poisoned.view(dtype).isnan().all())


def test_preflight_counts_what_torch_allocates_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = placed(embedding=kind_placement(1), block=kind_placement(2), head=kind_placement(1))
    plan = plan_of(tiny_model(), tiny_training(1), Strategy(dp=1), layers, "cpu")
    program = _program(plan)
    sizes, promised = static_sizes(program), program.bytes_by_tier()[Tier.GPU]
    assert promised > sizes.device  # hidden states, saved activations, workspace
    worker = NativeWorker(plan, 0, tmp_path)
    _available(monkeypatch, host=sizes.host + promised)
    worker.preflight()
    _available(monkeypatch, host=sizes.host + promised - 1)
    with pytest.raises(PreflightError, match="of host memory"):
        worker.preflight()
