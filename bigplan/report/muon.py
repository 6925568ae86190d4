"""What Muon would take of a plan whose AdamW has state off the GPU, and what it would cost."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.capabilities.native import native_refusal
from bigplan.cost import price
from bigplan.errors import InputError
from bigplan.graph.build import element_sizes
from bigplan.placement import Tier
from bigplan.plan import Plan, graph_of
from bigplan.report.moments import held_up, state_is_away
from bigplan.report.text import seconds_text
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer, orthogonalised
from bigplan.spec.training import Training
from bigplan.units import format_bytes

MOMENT = 4  # bytes


def muon_advice(plan: Plan) -> Iterator[str]:
    """Bytes of the model's state that Muon has not, and a GPU's seconds for its directions.

    Nothing where these take longer than all that state could hold up, or where GPUs and host have
    no room for Muon's state. How fast training goes then depends on what a new plan does with the
    room.
    """
    if not state_is_away(plan) or plan.training.lora is not None:
        return
    by_muon = with_muon(plan.training)
    if native_refusal(plan.model, by_muon, plan.strategy):
        return
    try:
        seconds = directions_seconds(plan, by_muon)
    except InputError:  # of a GPU without bf16
        return
    if seconds >= held_up(plan) or not _has_room(plan, by_muon):
        return
    saved = MOMENT * matrix_elements(plan.model, by_muon.optimizer)
    old, new = (element_sizes(each).state for each in (plan.training, by_muon))
    yield (
        f"Muon (`--optimizer muon`) has no second moment of the blocks' matrices: "
        f"{format_bytes(saved)} less of the model's optimizer state, which then takes {new} bytes "
        f"a parameter there in place of {old}. Its products take {seconds_text(seconds)} of a GPU "
        f"a step, which moves and updates off the GPU hold up for {seconds_text(held_up(plan))}. "
        "It is another training: plan with it, and compare losses."
    )


def _has_room(plan: Plan, by_muon: Training) -> bool:
    """Whether GPUs and host hold Muon's state, which is never on a drive, beside all else there."""
    old, new = (element_sizes(each).state for each in (plan.training, by_muon))
    matrices = matrix_elements(plan.model, by_muon.optimizer) / plan.model.parameter_count
    sharing = plan.cluster.group.shared_by(plan.strategy.ranks)
    state, room = 0.0, 0.0  # bytes of a rank of every stage
    for use in plan.predicted.memory:
        ranks = sharing.counted(1, use.scope)
        there = use.by_purpose.get("optimizer", 0)
        state += there / ranks
        if use.tier is not Tier.NVME:
            room += (use.capacity_bytes - use.used_bytes + there) / ranks
    return state * matrices * new / old <= room


def with_muon(training: Training) -> Training:
    """The training with Muon's usual constants, and AdamW's as they are for the rest."""
    old = training.optimizer
    kept = old.model_dump(exclude={"name", "momentum", "moments"})
    return training.model_copy(update={"optimizer": Optimizer(name="muon", **kept)})


def matrix_elements(model: ModelSpec, optimizer: Optimizer) -> int:
    """Elements that Muon updates."""
    return sum(
        parameter.count
        for kind in model.layer_sequence()
        for parameter in model.kinds()[kind]
        if orthogonalised(optimizer, kind, parameter)
    )


def directions_seconds(plan: Plan, training: Training) -> float:
    """Seconds that the stage with most takes to make its layers' directions."""
    graph = graph_of(plan.model_copy(update={"training": training}))
    kinds = price(graph, training, plan.cluster.group).kinds
    return max(
        sum(kinds[graph.layers[layer]].orthogonalise for layer in graph.stage_layers(stage))
        for stage in range(plan.strategy.pp)
    )
