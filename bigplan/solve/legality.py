"""Whether decisions that were read, not found, are ones that a search could have made.

A plan file may have been edited. Its strategy must be in the space of strategies. Its placement
must have the values that the integer program holds constant. KindPlacement and Strategy refuse some
values by themselves; these checks are not repeated here.
"""

from __future__ import annotations

from collections import Counter

from bigplan.capabilities.splits import (
    carried_refusal,
    context_parallel_refusal,
    muon_refusal,
    spread_refusal,
    tensor_parallel_refusal,
)
from bigplan.errors import InputError
from bigplan.graph.build import loss_chunks
from bigplan.graph.graph import LOSS_CHUNK_TOKENS, Graph, LayerKind
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import Space
from bigplan.mechanics import MOST_GRAPHS
from bigplan.placement import CHUNK, KindPlacement, Placement, StagePlacement, Tier, may_capture
from bigplan.solve.candidate import Workload
from bigplan.solve.decisions import decided
from bigplan.solve.stage import StageClass, stage_classes
from bigplan.units import counted

EXACT = 1e-5  # layers' worth of optimizer state that rounding may add or take


def require_legal_strategy(workload: Workload, strategy: Strategy) -> None:
    """Raise InputError that names the first value with which no strategy is left."""
    model, training, nodes = workload.model, workload.training, workload.nodes
    why = spread_refusal(model, training, dict(strategy))
    why = why or carried_refusal(model, dict(strategy))
    why = why or tensor_parallel_refusal(model, strategy.tp)
    why = why or context_parallel_refusal(model, dict(strategy))
    if why := why or muon_refusal(training, dict(strategy)):
        raise InputError(f"strategy.{why}")
    # A search may not have tried this cp by itself, and experts divide by a zero group's ranks.
    fixed: dict[str, int] = {"cp": strategy.cp, "zero_group": strategy.zero_group}
    for name, value in strategy.model_dump().items():
        fixed[name] = int(value)
        machine = nodes.gpus, nodes.gpus_per_node
        space = Space(model, training, *machine, fixed, spreads=True, hybrid=True)
        if next(space.strategies(), None) is None:
            beside = ", ".join(f"{k} {v}" for k, v in fixed.items() if k != name)
            raise InputError(
                f"strategy.{name}: {value} is no way to split {model.name} "
                f"({counted(model.layers, 'block')}) with a global batch of "
                f"{counted(training.global_batch, 'sequence')} over {counted(nodes.gpus, 'GPU')}"
                f"{f' beside {beside}' if beside else ''}; dp x cp x tp x pp must "
                "equal the GPUs, and dp x micro_batch x accumulation_group must divide the global "
                "batch"
            )


def require_legal_placement(workload: Workload, graph: Graph, placement: Placement) -> None:
    """Raise InputError that names the first value that the graph's layers do not allow."""
    stages, pp = placement.stages, graph.strategy.pp
    if len(stages) != pp:
        raise InputError(f"placement.stages: {len(stages)} stages, but strategy.pp is {pp}")
    if placement.chunk != CHUNK:
        raise InputError(f"placement.chunk: {placement.chunk}; every plan has {CHUNK} bytes")
    most = max(*loss_chunks(workload.model, workload.training, graph.strategy), LOSS_CHUNK_TOKENS)
    if placement.loss_chunk > most:
        raise InputError(
            f"placement.loss_chunk: {placement.loss_chunk} tokens; with micro_batch "
            f"{graph.strategy.micro_batch} the loss takes at most {most} at a time"
        )
    on_cuda = workload.nodes.gpu.runs_kernels
    if placement.captured and not (on_cuda and may_capture(graph, placement)):
        raise InputError(
            "placement.captured: true; CUDA graphs repeat blocks only on CUDA devices, without "
            "tensor, context or pipeline parallelism, with all activations of blocks on the GPU, "
            "no experts whose products wait for numbers of rows, "
            f"and at most {MOST_GRAPHS} passes a step"
        )
    for alike in stage_classes(graph):
        first = alike.stages[0]
        for number in alike.stages:
            _require_layers(graph, number, stages[number])
            if stages[number] != stages[first]:
                raise InputError(
                    f"placement.stages.{number}: differs from stage {first}, which has the same "
                    "layers; stages alike are placed alike"
                )
        for kind, _ in alike.kinds:
            _require_choices(alike, kind, stages[first].kinds[kind.name])


def _require_layers(graph: Graph, number: int, stage: StagePlacement) -> None:
    have = Counter(graph.layers[layer] for layer in graph.stage_layers(number))
    where = f"placement.stages.{number}.kinds"
    if set(stage.kinds) != set(have):
        raise InputError(f"{where}: {', '.join(stage.kinds)}; the stage has {', '.join(have)}")
    for name, count in have.items():
        if stage.kinds[name].layers != count:
            cut = ("pp", "vpp", "first_blocks", "last_blocks")
            how = ", ".join(f"{key} {getattr(graph.strategy, key)}" for key in cut)
            raise InputError(
                f"{where}.{name}.layers: {stage.kinds[name].layers}; with {how} the stage has "
                f"{count}"
            )


def _require_choices(stage: StageClass, kind: LayerKind, placed: KindPlacement) -> None:
    """Raise InputError for a decision that differs from its constant in the integer program."""
    where = f"placement.stages.{stage.stages[0]}.kinds.{kind.name}"
    if not kind.frozen and not placed.gradients:
        raise InputError(
            f"{where}.gradients: nowhere, and so is the optimizer; only with training.lora are "
            "layers without"
        )
    if kind.orthogonalised:
        _require_whole_states(where, placed)
    for key, decision, layers in decided(stage, kind, placed):
        if not decision.terms and abs(layers - decision.constant) > EXACT:
            strategy = stage.graph.strategy
            raise InputError(
                f"{where}.{key}: {layers:g} layers; with zero {strategy.zero} and vpp "
                f"{strategy.vpp} it is {decision.constant:g} of {placed.layers}"
            )


def _require_whole_states(where: str, placed: KindPlacement) -> None:
    """Raise InputError where Muon would update a part of a layer, or the CPU would."""
    on_gpu, on_host = (placed.optimizer.get(tier, 0.0) for tier in (Tier.GPU, Tier.HOST))
    if abs(on_gpu - round(on_gpu)) > EXACT or abs(on_gpu + on_host - placed.layers) > EXACT:
        raise InputError(
            f"{where}.optimizer: gpu {on_gpu:g} and host {on_host:g} of {placed.layers} layers; "
            "Muon's state is on the GPU or in host memory, a whole layer's on one of them"
        )
    if abs(placed.streamed - on_host) > EXACT:
        raise InputError(
            f"{where}.streamed: {placed.streamed:g} of {on_host:g} layers with state in host "
            "memory; the GPU makes Muon's updates, so all of it is streamed"
        )
