"""Plans of zero groups, for the processes of sharded_ranks to run."""

from __future__ import annotations

from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from bigplan.spec.training import LossScale
from tests.runtime.experts.ranks import WITH_EXPERTS, spread
from tests.runtime.masked import masked_training
from tests.runtime.parallel.sharded_ranks import (
    EXPERTS,
    MASKED,
    all_resident,
    name_of,
    placed_everywhere,
)
from tests.runtime.plans import SHORT, placed, plan_of, tiny_model, tiny_training
from tests.toys import kind_placement

# Groups of neighbours: data-parallel ones, parts of a sequence, or both.
FOUR = [
    *(Strategy(dp=4, zero=zero, zero_group=2) for zero in (2, 3)),
    *(Strategy(dp=2, cp=2, zero=zero, zero_group=2) for zero in (1, 3)),
]
EIGHT = [
    Strategy(dp=4, tp=2, zero=3, zero_group=2),
    Strategy(dp=4, pp=2, zero=3, zero_group=2),
    Strategy(dp=4, cp=2, zero=2, zero_group=4),
]
# Experts, spread within a group: each has a copy of them once, or ranks that share them out.
SPREAD = {
    4: [Strategy(dp=4, ep=2, zero=zero, zero_group=2) for zero in (1, 2, 3)],
    8: [
        Strategy(dp=8, ep=2, zero=3, zero_group=4),
        Strategy(dp=2, cp=2, tp=2, ep=2, zero=1, zero_group=2),
        Strategy(dp=4, pp=2, ep=2, zero=3, zero_group=2),
    ],
}


def zero_group_cases(ranks: int, data: str = "bundled") -> dict[str, Plan]:
    """By name: gradients of two accumulation groups on every tier, of one all on the GPU (beside
    parts of a sequence, or stages) or of one on every tier (of eight ranks).
    """
    found: dict[str, Plan] = {}
    for layout in FOUR if ranks == 4 else EIGHT:
        model = tiny_model(layers=3 if layout.pp == 1 else 4)
        strategy = layout.model_copy(update={"accumulation_group": 2})
        groups = 2 if ranks == 4 and layout.cp == 1 else 1
        training = masked_training(2 * groups * layout.dp, data, clip_norm=0.5)
        where = all_resident(build_graph(model, training, strategy))
        if layout.pp == layout.cp == 1:
            where = placed_everywhere(layout.zero, SHORT)
        name = name_of(layout) if found else f"{MASKED}-{name_of(layout)}"  # one that validates
        found[name] = plan_of(model, training, strategy, where)
    return found | _spread(ranks, data) | (_more() if ranks == 4 else {})


def _spread(ranks: int, data: str) -> dict[str, Plan]:
    """Experts beside zero groups; of four ranks gradients are of two accumulation groups."""
    found = {}
    for layout in SPREAD[ranks]:
        strategy = layout.model_copy(update={"accumulation_group": 2})
        model = tiny_model(layers=3 if layout.pp == 1 else 4, **WITH_EXPERTS)
        units = 2 if ranks == 4 else 1
        training = masked_training(2 * units * layout.dp, data, clip_norm=0.5)
        where = all_resident(build_graph(model, training, strategy))
        if layout.zero > 1 and layout.pp == 1:
            where = spread(layout.zero)
        found[f"experts-{name_of(layout)}"] = plan_of(model, training, strategy, where)
    return found


def _more() -> dict[str, Plan]:
    """What else a step may have."""
    found, model = {}, tiny_model(layers=3)
    resident = placed(embedding=kind_placement(1), block=kind_placement(3), head=kind_placement(1))
    narrow = {"precision": "bf16", "gradient_precision": "bf16"}
    overflowing = {
        "precision": "fp16",
        "gradient_precision": "fp16",
        "loss_scale": LossScale(initial=2.0**20),  # with which the first steps overflow
    }
    two, one = (Strategy(dp=4, zero=zero, zero_group=2) for zero in (2, 3))
    found["resident-z2"] = plan_of(model, tiny_training(8), two, resident)  # others: beside cp
    for name, changes in (("narrow", narrow), ("overflowing", overflowing)):
        training = tiny_training(8, clip_norm=0.5, **changes)
        found[name] = plan_of(model, training, one, placed_everywhere(3, SHORT))
    tied = tiny_model(layers=3, tied_embeddings=True, **EXPERTS)
    training = tiny_training(8, clip_norm=0.5)
    found["tied-experts"] = plan_of(tied, training, one, placed_everywhere(3, tied=True))
    return found
