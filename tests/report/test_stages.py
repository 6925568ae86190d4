import pytest

from bigplan.graph.graph import Recompute
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.report.stages import stages_of
from bigplan.spec.optimizer import Optimizer
from tests.tiny import tiny_plan


def kind(layers: int, **tiers: object) -> KindPlacement:
    everything = {Tier.GPU: layers}
    where = dict.fromkeys(("parameters", "gradients", "optimizer"), everything)
    return KindPlacement.model_validate(
        {"layers": layers, "activations": {Recompute.NONE: everything}, **where, **tiers}
    )


def placed(plan: Plan, block: KindPlacement) -> Plan:
    """The plan with these blocks between an embedding and a head that are all on the GPU."""
    kinds = {"embedding": kind(1), "block": block, "head": kind(1)}
    return plan.model_copy(update={"placement": Placement(stages=(StagePlacement(kinds=kinds),))})


def test_streamed_is_the_share_of_all_state_that_passes_through_the_gpu() -> None:
    plan = tiny_plan()
    block = kind(2, optimizer={Tier.HOST: 2.0}, streamed=0.5)
    blocks = 2 * plan.model.kind_parameter_count("block")
    (stage,) = stages_of(placed(plan, block))
    assert stage.streamed_fraction == pytest.approx(0.25 * blocks / plan.model.parameter_count)
    (stage,) = stages_of(placed(plan, kind(2)))
    assert stage.streamed_fraction == 0.0
    # Plain SGD has no state, so there is nothing to stream.
    training = plan.training.model_copy(update={"optimizer": Optimizer(name="sgd", momentum=0.0)})
    (stage,) = stages_of(placed(plan.model_copy(update={"training": training}), block))
    assert stage.streamed_fraction == 0.0


def test_counts_are_blocks_and_shares_are_bytes() -> None:
    plan = tiny_plan()
    block = kind(
        2,
        parameters={Tier.GPU: 1, Tier.HOST: 1},
        optimizer={Tier.HOST: 0.5, Tier.NVME: 1.5},
        activations={Recompute.NONE: {Tier.GPU: 1}, Recompute.FULL: {Tier.HOST: 1}},
    )
    (stage,) = stages_of(placed(plan, block))
    assert (stage.layers, stage.recompute) == (2, {"none": 1, "full": 1})

    model = plan.model
    blocks = 2 * model.kind_parameter_count("block")
    total = model.parameter_count
    assert stage.placement["gradients"] == {"gpu": 1.0}
    assert stage.placement["parameters"]["host"] == pytest.approx(0.5 * blocks / total)
    assert stage.placement["optimizer"]["nvme"] == pytest.approx(0.75 * blocks / total)
    # The recomputed layer keeps only its input, far less than what the other one keeps.
    assert 0 < stage.placement["activations"]["host"] < 0.1
