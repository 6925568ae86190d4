"""The parts of a step add up to it, and each is where it belongs."""

import pytest

from bigplan.graph.graph import Recompute
from bigplan.parts import PlayedStep, step_parts
from bigplan.placement import Placement
from bigplan.plan import StepParts
from bigplan.planner import Request, make_plan, programs_of, simulate_plan
from bigplan.program import Lane
from bigplan.simulate import COLLECTIVES, LAUNCHING
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.tiny import tiny_plan

IN_PASSES = (Lane.COMPUTE, COLLECTIVES, LAUNCHING)


def total(parts: StepParts) -> float:
    return (
        parts.compute
        + parts.recompute
        + parts.collectives
        + parts.update
        + parts.bubble
        + parts.waiting
    )


@pytest.mark.parametrize("fixed", [{"tp": 2, "pp": 1}, {"pp": 2, "tp": 1}, {"recompute": "full"}])
def test_parts_add_up_to_the_step(fixed: dict[str, str | int]) -> None:
    training = Training(sequence_length=256, global_batch=32)
    cluster = find_cluster("dgx-h100")
    plan = make_plan(Request(find_model("tiny-llama-demo"), training, cluster, fixed))
    parts = plan.predicted.parts
    assert total(parts) == pytest.approx(plan.predicted.step_seconds)
    assert min(parts.model_dump(exclude={"waits_for"}).values()) >= 0
    assert (parts.collectives > 0) == (plan.strategy.tp > 1)
    assert (parts.bubble > 0) == (plan.strategy.pp > 1)
    assert (parts.recompute > 0) == (fixed.get("recompute") == "full")
    on_gpu = parts.compute + parts.recompute + parts.collectives + parts.update
    within = sum(plan.predicted.busy_seconds.get(name, 0.0) for name in IN_PASSES)
    if plan.strategy.pp == 1:  # else each is of the stage that has most of it
        assert on_gpu == pytest.approx(within)
    assert parts.collectives == pytest.approx(plan.predicted.busy_seconds.get(COLLECTIVES, 0.0))
    assert (COLLECTIVES in plan.predicted.critical_path) == (plan.strategy.tp > 1)
    for other in plan.alternatives:
        assert total(other.parts) == pytest.approx(other.step_seconds)


def test_waiting_is_what_no_other_part_explains() -> None:
    plan = tiny_plan(1)
    candidate, _ = programs_of(plan)
    busy = simulate_plan(plan).busy()
    seconds = busy[Lane.COMPUTE] + 5.0
    step = PlayedStep(seconds, {**busy, Lane.NVME_READ: seconds})
    parts = step_parts(candidate.graph, candidate.costs, plan.placement, step)
    assert parts.waiting == pytest.approx(5.0)
    assert parts.waits_for == Lane.NVME_READ
    assert parts.bubble == parts.collectives == 0


def test_recomputation_is_a_part_of_its_own() -> None:
    plan = tiny_plan(1)
    candidate, _ = programs_of(plan)
    graph, costs = candidate.graph, candidate.costs
    stage = plan.placement.stages[0]
    block = stage.kinds["block"]
    again = block.model_copy(update={"activations": {Recompute.FULL: {"gpu": block.layers}}})
    kinds = {**stage.kinds, "block": again}
    placement = Placement(stages=(stage.model_copy(update={"kinds": kinds}),))
    step = PlayedStep(1e9, {Lane.COMPUTE: 0.0})
    before = step_parts(graph, costs, plan.placement, step)
    after = step_parts(graph, costs, placement, step)
    times = block.layers * graph.micro_batches
    again_seconds = costs.kinds["block"].again(Recompute.FULL)
    assert after.recompute - before.recompute == pytest.approx(times * again_seconds)
    assert after.compute == pytest.approx(before.compute)


def test_only_tensor_parallel_layers_wait_for_collectives() -> None:
    plan = tiny_plan(2)
    costs = programs_of(plan)[0].costs
    assert {kind.forward_waits.collectives for kind in costs.kinds.values()} == {0.0}
    assert COLLECTIVES not in plan.predicted.critical_path
