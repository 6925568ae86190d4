"""Moments in fewer bits, planned: bytes of buffers and moves, rates, refusals, advice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.cost.rates import CORE_UPDATES, MULTIPROCESSOR_UPDATES, TORCH_UPDATES, rates_of
from bigplan.engines.deepspeed.refusals import refusal
from bigplan.errors import RefusedError
from bigplan.export import TOOLS, configuration
from bigplan.graph.build import build_graph, element_sizes
from bigplan.graph.graph import ElementSizes, LayerKind
from bigplan.graph.strategy import Strategy
from bigplan.lower.program import lower
from bigplan.mechanics import CORES_BESIDE_COPIES, PAGE
from bigplan.placement import Share, Tier
from bigplan.plan import Plan, graph_of
from bigplan.planner import Request, make_plan
from bigplan.program import Op, expand
from bigplan.report.advice import advice_of
from bigplan.report.moments import moments_advice, with_moments
from bigplan.report.operators import operator_rows
from bigplan.report.text import seconds_text
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.moments import BLOCK, ELEMENT, Moments, blocks, places
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.sharing import NodeSharing
from bigplan.spec.training import Training
from bigplan.units import PerRank
from bigplan.verify import verify
from tests.examples import examples
from tests.tiny import tiny_plan
from tests.toys import kind_placement, placed, toy_graph

pytestmark = pytest.mark.usefixtures("first_plans")

runs = settings(max_examples=examples(30), derandomize=True, deadline=None)
FEWER: tuple[Moments, ...] = ("bf16", "int8")
BYTES = {"fp32": 12, "bf16": 8, "int8": 6 + 8 / BLOCK}  # of a parameter's state
SIZES = {m: ElementSizes(2, 4, 4 + 2 * ELEMENT[m], True, m) for m in ELEMENT}
DRIVES = Training(sequence_length=4096, global_batch=16)


@cache
def on_drives(moments: Moments = "fp32") -> Plan:
    """A model of 3.3 B with all of its state on the drives of an H200's machine."""
    training = DRIVES.model_copy(update={"optimizer": Optimizer(moments=moments)})
    settings: dict[str, str | int | float] = {"optimizer": "nvme", "micro_batch": 16}
    model, cluster = find_model("llama-like-3.3b"), find_cluster("h200-1x")
    return make_plan(Request(model, training, cluster, settings))


@pytest.mark.parametrize("moments", BYTES)
def test_state_has_so_many_bytes(moments: Moments) -> None:
    training = DRIVES.model_copy(update={"optimizer": Optimizer(moments=moments)})
    sizes = element_sizes(training)
    assert sizes.stored == BYTES[moments]
    assert sizes.state_bytes(1000 * BLOCK) == 1000 * BLOCK * BYTES[moments]


def test_a_gpu_updates_slower_by_torch_than_by_the_generated_kernel() -> None:
    group, sizes = find_cluster("h200-1x").group, element_sizes(DRIVES)
    ours = rates_of(group, NodeSharing(1), sizes)
    torchs = rates_of(group, NodeSharing(1), sizes, generated=False)
    assert torchs == replace(ours, gpu_update=PerRank(TORCH_UPDATES * ours.gpu_update))


@given(elements=st.integers(1, 5000), moments=st.sampled_from([*BYTES]), master=st.booleans())
@runs
def test_parts_of_state_lie_one_after_the_other(
    elements: int, moments: Moments, *, master: bool
) -> None:
    """Nothing overlaps or is left out, and fp32 values begin at whole ones."""
    at = places(elements, moments, 2, master=master)
    size = ELEMENT[moments] * elements
    parts = [(start, start + size) for start in at.moments]
    parts += [(start, start + 4 * blocks(elements)) for start in at.scales]
    parts += [(at.master, at.master + 4 * elements)] if master else []
    ends = [0, *(stop for _, stop in sorted(parts))]
    assert [start for start, _ in sorted(parts)] == ends[:-1]
    assert ends[-1] == at.end
    state = 2 * ELEMENT[moments] + 4 * master
    assert at.end == ElementSizes(2, 4, state, master, moments).state_bytes(elements)
    assert not any(start % 4 for start in (*at.scales, at.master))


@given(
    st.sampled_from(FEWER),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from((300, 1000, 4000)),
)
@runs
def test_every_chunk_has_room_for_its_scales(
    moments: Moments, shares: tuple[float, float, float], chunk: int
) -> None:
    """Whatever the shares of tiers and the size of chunks; the program keeps every rule."""
    graph = replace(toy_graph(blocks=2, units=1), sizes=SIZES[moments])
    total = sum(shares) or 1.0
    gpu, host, streamed = (2 * share / total if sum(shares) else 0.0 for share in shares)
    rows = {Tier.GPU: gpu, Tier.HOST: host + streamed, Tier.NVME: 2 - gpu - host - streamed}
    rows = {tier: max(0.0, share) for tier, share in rows.items()}
    block = kind_placement(2).model_copy(
        update={"optimizer": rows, "streamed": min(streamed, rows[Tier.HOST])}
    )
    (program,) = lower(graph, placed(graph, block=block, chunk=chunk))
    verify((program,), graph, dict.fromkeys(Tier, 10**9), NodeSharing(1))
    kind = graph.kinds["block"]
    for name, buffer in program.buffers.items():
        if name.startswith("o1.") or name.startswith("o2."):
            assert buffer.nbytes <= graph.sizes.state_bytes(kind.parameters) + PAGE
    for action in expand(program.flush):
        if action.op is Op.READ and action.share is Share.NVME:
            assert action.amount <= program.buffers["stage.o"].nbytes


def test_a_drive_moves_as_many_bytes_as_state_has() -> None:
    moved = {m: on_drives(m).predicted.moved_bytes for m in ELEMENT}
    for moments in FEWER:
        for lane in ("nvme read", "nvme write"):
            part = moved[moments][lane] / moved["fp32"][lane]
            assert part == pytest.approx(BYTES[moments] / 12, rel=1e-3)
    seconds = [on_drives(m).predicted.step_seconds for m in ELEMENT]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.6 * seconds[0]


def test_memory_of_a_plan_is_its_program_s() -> None:
    """With 8 bits what the plan promises of the drives is what the program allocates there."""
    plan = on_drives("int8")
    (program,) = lower(graph_of(plan), plan.placement)
    used = {use.tier: use.used_bytes for use in plan.predicted.memory}
    on_disk = [b for b in program.buffers.values() if b.tier is Tier.NVME]
    allocated = sum(b.count * -(-b.nbytes // PAGE) * PAGE for b in on_disk)
    assert used[Tier.NVME] == pytest.approx(allocated, rel=1e-6)
    parameters = sum(kind.parameters for kind in _layers(plan))
    assert allocated == pytest.approx(parameters * BYTES["int8"], rel=0.01)


def _layers(plan: Plan) -> list[LayerKind]:
    graph = build_graph(plan.model, plan.training, Strategy(dp=1))
    return [graph.kinds[name] for name in graph.layers]


def test_a_gpu_s_update_follows_from_its_bytes_and_a_cpu_s_from_its_cores_too() -> None:
    nodes = find_cluster("h200-1x").group
    rates = {m: rates_of(nodes, NodeSharing(1), sizes) for m, sizes in SIZES.items()}
    for moments in FEWER:
        sizes = SIZES[moments]
        by_memory = rates["fp32"].gpu_update * 30 / sizes.update_bytes
        each = MULTIPROCESSOR_UPDATES.get(moments, inf)
        limit = nodes.gpu.multiprocessors * each
        assert rates[moments].gpu_update == pytest.approx(min(by_memory, limit))
        assert (limit < by_memory) == (moments == "int8")
        for cores in (2, nodes.host.cores):
            host = nodes.host.model_copy(update={"cores": cores})
            few = rates_of(nodes.model_copy(update={"host": host}), NodeSharing(1), sizes)
            computed = 1 / (cores * float(CORES_BESIDE_COPIES) * CORE_UPDATES[moments])
            waited = sizes.update_bytes / 30 / rates["fp32"].cpu_update
            assert 1 / few.cpu_update == pytest.approx(computed + waited)


@pytest.mark.parametrize("moments", FEWER)
def test_other_engines_and_tools_refuse_with_the_remedy(moments: Moments) -> None:
    plan = tiny_plan(1)
    optimizer = plan.training.optimizer.model_copy(update={"moments": moments})
    training = plan.training.model_copy(update={"optimizer": optimizer})
    said = refusal(plan.model, training, plan.strategy)
    assert said is not None
    assert f"moments in {moments}" in said
    assert "--engine native" in said
    assert other_tools_refusal(plan.model, plan.training, "DeepSpeed") is None
    for tool in TOOLS:
        with pytest.raises(RefusedError, match="--engine native, or with moments fp32"):
            configuration(plan.model_copy(update={"training": training}), tool)


def test_what_has_no_such_moments_is_refused() -> None:
    with pytest.raises(ValueError, match="sgd has no moments"):
        Optimizer.model_validate({"name": "sgd", "moments": "bf16"})
    with pytest.raises(ValueError, match=r"beta1 0.999.*moments: fp32"):
        Optimizer.model_validate({"beta1": 0.999, "moments": "int8"})
    with pytest.raises(ValueError, match="fp32"):
        Optimizer.model_validate({"moments": "fp8"})


def test_fp32_is_not_written_down_so_that_older_plans_and_checkpoints_are_the_same() -> None:
    assert "moments" not in Optimizer().model_dump()
    assert Optimizer(moments="int8").model_dump()["moments"] == "int8"


def test_fewer_bits_are_advised_where_state_binds_with_what_they_save() -> None:
    plan = on_drives()
    advice = {one.about: one for one in advice_of(plan, operator_rows(plan))}["moments"]
    assert "--moments int8" in advice.text
    again = with_moments(plan, "int8").predicted.step_seconds
    assert advice.gain == pytest.approx(1 - again / plan.predicted.step_seconds)
    # A new search finds nothing slower.
    assert on_drives("int8").predicted.step_seconds <= 1.001 * again


def test_nothing_is_advised_where_state_stays_on_the_gpu_or_has_few_bits() -> None:
    small = make_plan(Request(find_model("gpt2-xl"), DRIVES.model_copy(
        update={"sequence_length": 1024}), find_cluster("h200-1x"), {}))  # fmt: skip
    for plan in (small, on_drives("int8")):
        assert "moments" not in {one.about for one in advice_of(plan, operator_rows(plan))}


def test_moments_that_save_nothing_are_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = on_drives()
    step = plan.predicted.step_seconds

    def slower_in_8_bits(plan: Plan, moments: Moments) -> Plan:
        seconds = step * (1.5 if moments == "int8" else 0.5)
        predicted = plan.predicted.model_copy(update={"step_seconds": seconds})
        return plan.model_copy(update={"predicted": predicted})

    monkeypatch.setattr("bigplan.report.moments.with_moments", slower_in_8_bits)
    ((gain, told),) = moments_advice(plan, 0.01)
    assert gain == pytest.approx(0.5)
    assert "--moments bf16" in told
    assert f"as it is: bf16 {seconds_text(0.5 * step)} (50%)" in told
