"""A stage's adapters as one layer more: all that is trained where the model is frozen.

What updates, stores and fills layers finds them under the number ADAPTERS. Their tensors have the
names that they have in the whole model, since they are of several layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.layer_placement import LayerPlacement
from bigplan.placement import IN_CHUNKS, Share, Tier
from bigplan.program import Program
from bigplan.ranks import Coordinates
from bigplan.runtime.memory.pieces import LayerRows, Owner
from bigplan.spec.layers import BLOCKS
from bigplan.spec.lora import Lora, adapters
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import ParameterRule, full_name, rules
from bigplan.spec.step import Parameter
from bigplan.spec.training import Training

NAME = "adapters"  # of their kind


def adapter_kind(graph: Graph, program: Program) -> LayerKind:
    """The stage's adapters as a kind of layer, without tensors where a whole model is trained."""
    every = graph.adapters(program.layers)
    return LayerKind(
        name=NAME,
        tensors=tuple(
            replace(t, name=full_name(graph.layers, layer, t.name)) for layer, t in every.tensors
        ),
        forward=(),
        backward=(),
        saved=0,
        boundary=0,
        reruns={},
        forward_workspace=0,
        backward_workspace=0,
        whole_experts=every.whole_experts,
        ep=graph.strategy.ep if every.whole_experts else 1,
    )


def adapter_parameters(
    model: ModelSpec, lora: Lora | None, layers: Iterable[int]
) -> tuple[Parameter, ...]:
    """The adapters of these layers as the model describes them, by their names in the model."""
    sequence = model.layer_sequence()
    return tuple(
        replace(parameter, name=full_name(sequence, layer, parameter.name))
        for layer in layers
        for parameter in adapters(model, lora, sequence[layer])
    )


def adapter_rows(
    kind: LayerKind, parameters: Iterable[Parameter], at: Coordinates, strategy: Strategy
) -> LayerRows:
    """What a rank has of them: as tensor parallelism splits them, and those of its experts.

    Nobody shares them out.
    """
    placement = LayerPlacement(Tier.GPU, Tier.GPU, Recompute.NONE, Tier.GPU, {Share.GPU: 1.0})
    alone = strategy.model_copy(update={"zero": 0, "zero_group": 0})
    owner, counts = Owner.of(at, alone), dict.fromkeys(IN_CHUNKS, 0)
    return LayerRows.of(kind, parameters, placement, counts, owner)


def adapter_rules(
    model: ModelSpec, training: Training, layers: Iterable[int]
) -> dict[str, ParameterRule]:
    """Weight decay and rate factor of each, by its name in the model."""
    sequence = model.layer_sequence()
    return {
        full_name(sequence, layer, name): rule
        for layer in layers
        if sequence[layer] in BLOCKS
        for name, rule in rules(training.optimizer, model, layer, training.lora).items()
    }
