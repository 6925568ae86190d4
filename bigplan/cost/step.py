"""A step as a named framework runs it: everything on the GPUs, closed formulas, part by part.

With M micro-batches, p pipeline stages of v chunks each, and T_s the seconds in which stage s does
one micro-batch forward and backward (recomputation, exposed collectives and messages included):

    pipeline  = M max_s T_s + (sum_s T_s - max_s T_s) / v          (1F1B; Narayanan et al., SC'21)
    step      = pipeline + reductions after the last backward + optimizer + CPU update

A collective of c seconds beside b seconds of compute that could hide it costs e c + max(0, (1 - e)
c - b): a share e is never hidden (framework.py), the rest is hidden as far as compute reaches. In a
backward the gather and the reduction share b, as they share the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bigplan.cost.costs import Costs
from bigplan.cost.framework import Framework
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import chunk_blocks, chunk_ranges
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.layers import BLOCK, BLOCKS

# Bytes an element of fp32 AdamW on the GPU moves: gradient, master and two moments read, all but
# the gradient written, the parameter cast and written; the norm reads every gradient before.
UPDATE_BYTES = 4 + 12 + 12 + 2 + 4


@dataclass(frozen=True, slots=True)
class Execution:
    """Decisions that a strategy leaves open, the same for all layers of a published run."""

    recompute: Recompute = Recompute.NONE
    recomputed: float = 1.0  # share of the layers that do so
    virtual_stages: int = 1
    cpu_update: bool = False
    passing_bytes: int = 0  # of an element: come to the GPU for its update, and leave
    on_cpu: float = 1.0  # of the state, the share that the CPU updates, where it does
    state_on_disk: bool = False
    parameters_on_host: bool = False
    boundaries_on_host: bool = False


def framework_step(
    graph: Graph, costs: Costs, nodes: NodeGroup, framework: Framework, run: Execution
) -> dict[str, float]:
    """Seconds of a step by part; their sum is the step."""
    stages = [_Stage.of(graph, costs, framework, run, s) for s in range(graph.strategy.pp)]
    slowest, every = max(s.micro_batch for s in stages), sum(s.micro_batch for s in stages)
    units, compute = graph.micro_batches, max(s.compute for s in stages)
    update = max(s.owned for s in stages) * UPDATE_BYTES / costs.rates.device_memory
    parts = {
        "compute": units * compute,
        "communication": units * (slowest - compute),
        "bubble": (every - slowest) / run.virtual_stages,
        "reduce": max(s.after_backward for s in stages),
        "update": update,
    }
    if run.passing_bytes:
        moved = max(s.owned for s in stages) * run.passing_bytes
        parts["copies"] = max(0.0, moved / min(costs.rates.h2d, costs.rates.d2h) - update)
    if run.cpu_update:
        away = _offloaded(graph, costs, nodes, framework, run, stages)
        # The GPU updates its share of the state first; no framework updates on both at once.
        parts |= away | {"update": away["update"] + (1.0 - run.on_cpu) * update}
    return parts


@dataclass(frozen=True, slots=True)
class _Stage:
    """One pipeline stage: seconds of a micro-batch, and of what follows the last one."""

    compute: float
    micro_batch: float
    after_backward: float
    held: int  # elements of parameters that one rank holds between their uses under ZeRO 3
    owned: int  # elements that one rank updates

    @classmethod
    def of(
        cls, graph: Graph, costs: Costs, framework: Framework, run: Execution, stage: int
    ) -> _Stage:
        """The stage's layers summed up."""
        strategy = graph.strategy
        counts = stage_counts(graph, stage, weighed=framework.weighs_stages)
        compute = communication = last_backward = reduces = gathers = sums = 0.0
        for name, count in counts.items():
            kind, cost = graph.kinds[name], costs.kinds[name]
            rerun = run.recomputed * cost.again(run.recompute) if kind.stores_activations else 0.0
            backward = cost.backward + rerun
            compute += count * (cost.forward + backward)
            last_backward += count * backward
            # A rank's sum over zero groups takes turns with the scatter inside its group. Megatron
            # Core queues both on one stream. torch has a stream for each, but even there NVLink's
            # scatter is a few hundredths of the sum over a network.
            reduces += count * (cost.reduce + cost.sum_replicas)
            sums += count * cost.sum_replicas
            gathers += count * cost.gather
            gather = cost.gather if strategy.zero == 3 else 0.0
            summing = 0.0 if framework.sums_once else cost.sum_replicas
            reduce = cost.reduce + summing if strategy.zero >= 2 else 0.0
            before = (gather, framework.gather_exposed)
            again = (gather, framework.regather_exposed)
            beside = (reduce, framework.reduce_exposed)
            communication += count * hidden_together(cost.forward, before)
            communication += count * hidden_together(backward, again, beside)
        if strategy.pp > 1:
            communication += 2 * run.virtual_stages * framework.send_exposed * costs.send
        after = 0.0
        if strategy.dp > 1 and strategy.zero < 2:
            after += hidden_by(reduces, last_backward, framework.reduce_exposed)
        if strategy.zero >= 2 and framework.sums_once:
            after += hidden_by(sums, last_backward, framework.reduce_exposed)
        if strategy.zero in (1, 2):
            exposed = framework.owned_exposed
            after += gathers * (framework.reduce_exposed if exposed is None else exposed)
        return cls(compute, compute + communication, after, *_elements(graph, counts))


def _elements(graph: Graph, counts: Mapping[str, int]) -> tuple[int, int]:
    """Elements of so many layers of each kind that a rank holds and owns, as in _Stage."""
    strategy, layers = graph.strategy, [(graph.kinds[name], n) for name, n in counts.items()]
    held = owned = sum(n * kind.parameters for kind, n in layers)
    if strategy.zero:
        experts = sum(n * kind.whole_experts for kind, n in layers)
        held = -(-(held - experts) // strategy.zero_ranks)
        held += -(-experts // strategy.expert_shards(folded=True))
        owned = held
    if graph.frozen:
        trained = sum(n * kind.trained for kind, n in layers)
        owned = -(-trained // strategy.zero_ranks)
        held += owned
    return held, owned


def hidden_by(seconds: float, compute: float, exposed: float) -> float:
    """What remains of a collective that a share of `exposed` keeps from hiding behind compute."""
    return hidden_together(compute, (seconds, exposed))


def hidden_together(compute: float, *collectives: tuple[float, float]) -> float:
    """What remains of collectives, each with its exposed share, that one pass's compute hides.

    They take turns on one network: in a backward ZeRO-3 gathers a layer's parameters and scatters
    another's gradients.
    """
    shown = sum(exposed * seconds for seconds, exposed in collectives)
    behind = sum((1.0 - exposed) * seconds for seconds, exposed in collectives)
    return shown + max(0.0, behind - compute)


def stage_counts(graph: Graph, stage: int, *, weighed: bool = False) -> Mapping[str, int]:
    """Layers of each kind on a stage: blocks as the strategy cuts them, the ends to the ends.

    `weighed`: as `blocks_by_weight`.
    """
    stages = graph.strategy.pp
    blocks = [name for name in graph.layers if name in BLOCKS]
    chunks = blocks_by_weight(graph) if weighed else chunk_blocks(len(blocks), graph.strategy)
    mine = chunk_ranges(chunks)[stage::stages]
    counts = {BLOCK: 0} | Counter(blocks[number] for chunk in mine for number in chunk)
    if stage == 0:
        counts["embedding"] = 1
    if stage == stages - 1:
        counts["head"] = 1
    return counts


def blocks_by_weight(graph: Graph) -> tuple[int, ...]:
    """Blocks of each stage where stages have about the same weights and the head counts.

    nanotron's `build_model` gives a stage blocks until it has more than its part of all so far.
    """
    block, stages = graph.kinds["block"].parameters, graph.strategy.pp
    number, dealt = graph.layers.count("block"), 0
    every = number * block + graph.kinds["head"].parameters
    found = []
    for stage in range(1, stages):
        upto = min(number, every * stage // (stages * block) + 1)
        found.append(upto - dealt)
        dealt = upto
    return (*found, number - dealt)


def _offloaded(
    graph: Graph,
    costs: Costs,
    nodes: NodeGroup,
    framework: Framework,
    run: Execution,
    stages: list[_Stage],
) -> dict[str, float]:
    """The CPU's update and its copies, one after the other while the GPUs wait."""
    rates, whole = costs.rates, max(s.owned for s in stages)
    owned = run.on_cpu * whole
    host, parameter = rates.host_memory, graph.sizes.parameter
    if framework.one_numa_domain:
        host = min(host, nodes.host.domain_bandwidth)
    down = framework.offloaded_gradient or graph.sizes.gradient
    # Passes of the update, of the cast of the master copy (a separate pass there), and others.
    passes = graph.sizes.update_bytes + 4 + framework.update_bytes
    extra = owned * framework.update_bytes / host
    parts = {
        "update": max(owned / rates.cpu_update + extra, owned * passes / host),
        "copies": owned * (down / rates.d2h + parameter / rates.h2d),
    }
    if run.parameters_on_host:  # each rank loads its share for every forward and backward
        passes_over = 2 + (run.recompute is Recompute.FULL)
        held = max(s.held for s in stages)
        parts["copies"] += passes_over * graph.micro_batches * held * parameter / rates.h2d
    if framework.sums_on_gpu and graph.strategy.zero == 2:
        again = owned * (graph.micro_batches - 1) * graph.sizes.gradient
        parts["copies"] += again * (1 / rates.d2h + 1 / rates.h2d)
    if framework.summed_on_cpu:
        again = (graph.micro_batches - 1) * whole * graph.sizes.gradient
        parts["copies"] += again / framework.summed_on_cpu
    if run.state_on_disk:
        state = owned * graph.sizes.stored
        parts["disk"] = state / rates.nvme_read + state / rates.nvme_write
    return parts
