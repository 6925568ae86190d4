"""Plans of ranks that spread experts, for the processes of sharded_ranks to run."""

from __future__ import annotations

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.plan import Plan
from tests.runtime.masked import masked_training
from tests.runtime.parallel.sharded_ranks import (
    EXPERTS,
    GPT_OSS,
    MASKED,
    NEMOTRON_3,
    all_resident,
    name_of,
    placed_everywhere,
)
from tests.runtime.plans import plan_of, tiny_model

WITH_EXPERTS = EXPERTS | {"router_loss": 0.0}  # the plain loop balances over all ranks' tokens


def layouts(ranks: int) -> list[Strategy]:
    """The ways to spread experts over so many ranks; others: courses.py.

    Where every rank has experts of its own, ZeRO's stages differ in the rest of a layer alone.
    """
    if ranks == 2:
        return [Strategy(dp=2, ep=2, zero=zero) for zero in (0, 3)]
    some = [Strategy(dp=4, ep=2, zero=zero) for zero in range(4)]
    split = Strategy(dp=2, ep=2, tp=2, zero=3)
    return [*some, Strategy(dp=2, ep=2, pp=2, zero=1), split, Strategy(dp=2, ep=4, cp=2, zero=3)]


def spread(zero: int) -> Placement:
    """Whatever may leave the GPU on every tier, state on all three and streamed.

    Activations leave where their bytes do not depend on the routing.
    """
    everywhere = placed_everywhere(zero, 30_000)  # larger layers
    kinds = dict(everywhere.stages[0].kinds)
    kinds["block"] = kinds["block"].model_copy(
        update={
            "activations": {
                Recompute.NONE: {Tier.GPU: 1},
                Recompute.MLP: {Tier.HOST: 1},
                Recompute.FULL: {Tier.NVME: 1},
            },
            "streamed": 0.5,
        }
    )
    return everywhere.model_copy(update={"stages": (StagePlacement(kinds=kinds),)})


def expert_cases(ranks: int, data: str = "bundled") -> dict[str, Plan]:
    """By name."""
    found = {}
    for layout in layouts(ranks):
        model = tiny_model(layers=3 if layout.pp == 1 else 4, **WITH_EXPERTS)
        strategy = layout.model_copy(update={"accumulation_group": 2})
        # Two groups of micro-batches on two ranks, one on more and of families.
        once = masked_training(2 * layout.dp, data, clip_norm=0.5)
        training = masked_training((8 // ranks) * layout.dp, data, clip_norm=0.5)
        where = all_resident(build_graph(model, training, strategy))
        if layout.pp == 1 and layout.zero:
            where = spread(layout.zero)
        name = name_of(layout) if layout.zero else f"{MASKED}-{name_of(layout)}"
        found[name] = plan_of(model, training, strategy, where)
        if layout.zero == 3 and (ranks == 2 or layout.tp > 1):
            biased = tiny_model(layers=3, **GPT_OSS)
            found[f"{name}-gpt-oss"] = plan_of(biased, once, strategy, where)
        if ranks == 2 and layout.zero == 3:
            alone = tiny_model(layers=3, **NEMOTRON_3)
            resident = all_resident(build_graph(alone, once, strategy))
            found[f"{name}-nemotron-3"] = plan_of(alone, once, strategy, resident)
    return found
