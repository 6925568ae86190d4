"""A graph on a cluster: what each kind of layer and each move takes on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil
from typing import NamedTuple

from bigplan.cost.collective import (
    Group,
    LayerGroups,
    all_gather,
    all_reduce,
    beside_compute,
    dispatched_seconds,
    expert_data_group,
    exposed_seconds,
    hop,
    reduce_scatter,
    replica_group,
    send,
    shard_group,
    taken_from_compute,
)
from bigplan.cost.compute import Device, norm, operator_seconds
from bigplan.cost.costs import Costs, GpuWaits, KindCost, Taken
from bigplan.cost.framework import NATIVE, Framework
from bigplan.cost.host import host_seconds, update_launch
from bigplan.cost.muon import orthogonalise_seconds
from bigplan.cost.process import PAGE_TABLES, process_bytes, room
from bigplan.cost.rates import rates_of
from bigplan.graph.graph import Adapters, Graph, LayerKind, Recompute
from bigplan.graph.operators import Collective, Gemm, Operator
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import WIDENED_ELEMENTS
from bigplan.placement import Tier
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.gpu import FlashKernel, Gpu
from bigplan.spec.layers import BLOCKS
from bigplan.spec.training import DTYPE_BYTES, Training

# GPU memory for cuBLAS workspaces, rounding to 2 MiB, and what torch's pools of several streams
# keep from each other. On an H200 a plan that used 14.98 of 15.00 GiB needed 0.03 GiB more. `price`
# reserves at least the largest tensor, because freed memory lies in pieces. If no piece is large
# enough, the allocator stops the GPU to join them. With 1.46 GiB free and tensors of 1.75 and 3.9
# GiB that happened eight times a step and took a sixth of it; with 1.18 GiB and 0.88 it never did.
ALLOCATOR_RESERVE = 0.03


def price(
    graph: Graph, training: Training, nodes: NodeGroup, framework: Framework = NATIVE
) -> Costs:
    """Prices of `graph` on equal nodes. Raises InputError where the GPU lacks the precision."""
    strategy = graph.strategy
    sharing = nodes.shared_by(strategy.ranks)
    boundary = max(kind.boundary for kind in graph.kinds.values())
    muon = training.optimizer.name == "muon"
    available = memory_of_torch(
        nodes.gpu,
        strategy,
        lends_table=graph.lends_table,
        muon=muon,
        folded=framework.folds_experts,
    )
    reserve = max(ceil(available * ALLOCATOR_RESERVE), _largest_tensor(graph, nodes.gpu))
    return Costs(
        kinds={
            name: _kind_cost(graph, kind, training, nodes, framework)
            for name, kind in graph.kinds.items()
        },
        rates=rates_of(nodes, sharing, graph.sizes, generated=training.kernels == "generated"),
        send=send(boundary + graph.handed, strategy, nodes),
        table=_table(graph, nodes),
        capacity={
            Tier.GPU: max(0, available - reserve),
            Tier.HOST: room(nodes, sharing.ranks),
            Tier.NVME: nodes.nvme.node_capacity if nodes.nvme else 0,
        },
        sharing=sharing,
        reserve=reserve,
        processes=process_bytes(nodes, sharing.ranks),
        page_tables=PAGE_TABLES if nodes.gpu.runs_kernels else 0.0,
        adapters=_adapters(graph, training, nodes, framework),
    )


def _adapters(graph: Graph, training: Training, nodes: NodeGroup, framework: Framework) -> KindCost:
    """As in Costs; no compute hides what they exchange at the end of a step."""
    if not graph.frozen:
        return KindCost(0.0, 0.0)
    stages = (graph.adapters(graph.stage_layers(stage)) for stage in range(graph.strategy.pp))
    most = max(stages, key=lambda each: each.elements)
    reduced = DTYPE_BYTES[training.reduce_precision or training.gradient_precision]
    groups = LayerGroups.of(graph.strategy, nodes)
    return KindCost(
        0.0,
        0.0,
        reduce=sum(
            all_reduce(elements * reduced, group)
            for elements, group in _summing(graph.strategy, most, nodes)
        ),
        tensor_reduce=_summed(
            most.repeated, graph.strategy.tp, graph.sizes.gradient, groups.tensor
        ),
        update_launch=update_launch(
            [tensor for _, tensor in most.tensors], nodes.gpu, framework, training
        ),
    )


def _summing(
    strategy: Strategy, adapters: Adapters, nodes: NodeGroup
) -> Iterator[tuple[int, Group]]:
    """Elements whose gradients are summed, and the groups that sum them in turn.

    These are zero groups and their replicas; of experts that are spread, who has the same.
    """
    experts, copies = adapters.whole_experts, replica_group(strategy, nodes)
    rest = adapters.elements - experts
    if experts:
        yield experts, expert_data_group(strategy, nodes)
        yield experts, copies
    yield rest, shard_group(strategy, nodes)
    yield rest, copies


def _largest_tensor(graph: Graph, gpu: Gpu) -> int:
    """Bytes of the largest temporary tensor: a layer's, or fp32 copies of 16-bit gradients."""
    layers, widened = graph.kinds.values(), 0
    if graph.sizes.gradient < 4 and gpu.runs_kernels:
        widened = 4 * min(WIDENED_ELEMENTS, max(kind.parameters for kind in layers))
    return max(widened, *(kind.largest for kind in layers))


def _table(graph: Graph, nodes: NodeGroup) -> tuple[float, float]:
    """As in Costs."""
    elements, sizes = graph.kinds[graph.layers[0]].parameters, graph.sizes
    if not graph.lends_table:
        return 0.0, 0.0
    lent, back = (
        hop(elements * n, graph.strategy, nodes) for n in (sizes.parameter, sizes.gradient)
    )
    return lent, back


def memory_of_torch(
    gpu: Gpu,
    strategy: Strategy,
    locked: int = 0,
    *,
    lends_table: bool = False,
    muon: bool = False,
    folded: bool = False,
) -> int:
    """Bytes of a GPU that are torch's to allocate, with `locked` bytes of host memory page-locked.

    The context, page tables and communicators take the rest. A pipeline stage has a communicator
    for each neighbour and direction, and one for a table that the first stage lends to the last.
    `muon`: as in ranks.communicating; `folded`: as in Strategy.expert_shards.
    """
    taken = gpu.context_memory
    if gpu.runs_kernels:
        around = strategy.pp > 1 and strategy.vpp > 1
        between, ends = (2, 2) if around else (min(2, strategy.pp - 1), min(1, strategy.pp - 1))
        messages = 2 * max(between, ends + lends_table)
        alike = strategy.expert_shards(folded=folded) if strategy.ep > 1 else 1
        of_data = strategy.zero_group or strategy.shards, strategy.zero_copies
        of_updates = strategy.zero_ranks if muon else 1
        groups = (*of_data, strategy.tp, strategy.cp, strategy.ep, alike, of_updates)
        communicators = sum(n > 1 for n in groups) + messages
        taken += communicators * gpu.communicator_memory + ceil(PAGE_TABLES * locked)
    return gpu.memory - taken


# Host and GPU work at the same time, so a pass takes about as long as the slower of the two. If
# they are close, each sometimes waits for the other. So the time is a p-norm; p = 4.7 adds 16% at
# equality.
OVERLAP_NORM = 4.7
# A plan has CUDA graphs if they make a block faster by more than this part. Less is within the
# error of the prices, and graphs take memory.
CAPTURED_GAIN = 0.02
# Of a kernel's host time: a collective is no autograd function of its own.
COLLECTIVE_LAUNCHES = 0.19


def _exchanges(
    graph: Graph, kind: LayerKind, training: Training, nodes: NodeGroup, framework: Framework
) -> KindCost:
    """What data-parallel ranks exchange of a layer, without its passes."""
    strategy, folded = graph.strategy, framework.folds_experts
    sharing = shard_group(strategy, nodes)
    scatters = strategy.zero == 3 or (strategy.zero and framework.reduce_scatters)
    reduce = reduce_scatter if scatters else all_reduce
    reduced = DTYPE_BYTES[training.reduce_precision or training.gradient_precision]
    owners = [(kind.parameters - kind.whole_experts, sharing)]
    if kind.whole_experts:
        owners.append((kind.whole_experts, expert_data_group(strategy, nodes, folded=folded)))
    trained, times = owners, 1.0
    if kind.frozen:
        apart = kind.trained > 0 and not framework.at_once
        trained = [(kind.trained, sharing)] if apart else []
        owners = [*owners, *trained] if strategy.zero == 3 else trained
        times = 1.0 if strategy.zero == 3 else _bucketed(graph, kind)
    engines = framework.loses_beside and all(group.by_copy_engines for _, group in owners)
    gather = all_gather if engines else _beside_compute(all_gather)
    reducing = _together(_beside_compute(reduce), trained, reduced, times)
    gathering = _together(gather, owners, graph.sizes.parameter, times)
    copies, device = replica_group(strategy, nodes), device_of(nodes, training, framework)
    experts = kind.owned_experts(strategy.zero_ranks)
    parts = (kind.owned(strategy.zero_ranks) - experts, experts)
    part = sum(all_reduce(n * reduced, copies) for n in parts)
    summing = 0.0 if kind.frozen else beside_compute(part, copies)
    kept = nodes.gpu.compute_beside_collectives if framework.loses_beside else None
    taken = Taken(
        taken_from_compute(gathering, sharing, kept),
        taken_from_compute(reducing, sharing, kept) + taken_from_compute(summing, copies, kept),
    )
    if engines:
        mine = sum(n * graph.sizes.parameter / group.size for n, group in owners)
        taken = taken._replace(gather=2 * mine / device.stream_rate)  # read and written
    slowed = taken.in_step(graph)
    return KindCost(
        *slowed,
        reduce=reducing,
        gather=gathering,
        sum_replicas=summing,
        taken=taken,
        slowed=slowed,
        orthogonalise=orthogonalise_seconds(graph, kind, training, device, nodes),
    )


def _bucketed(graph: Graph, kind: LayerKind) -> float:
    """A stage's adapters over this layer's: they are few enough to be one bucket of gradients.

    Megatron Core's has 40M elements at least (`bucket_size`), DeepSpeed's 500M.
    """
    every = sum(graph.kinds[name].trained for name in graph.layers) / graph.strategy.pp
    return max(1.0, every / kind.trained) if kind.trained else 1.0


_Collective = Callable[[int, Group], float]  # seconds of so many bytes


def _beside_compute(collective: _Collective) -> _Collective:
    return lambda nbytes, group: beside_compute(collective(nbytes, group), group)


def _together(
    collective: _Collective,
    owners: Iterable[tuple[int, Group]],
    element: int,
    times: float,
) -> float:
    """Seconds of a layer's part of collectives that take so many times its elements at once."""
    return sum(collective(round(times * n * element), group) / times for n, group in owners)


def _kind_cost(
    graph: Graph, kind: LayerKind, training: Training, nodes: NodeGroup, framework: Framework
) -> KindCost:
    strategy, sizes = graph.strategy, graph.sizes
    exchanges = _exchanges(graph, kind, training, nodes, framework)
    if not (kind.forward or kind.backward):  # nobody asks more of a layer without operators
        return exchanges
    device = device_of(nodes, training, framework)
    groups = LayerGroups.of(strategy, nodes, folded=framework.folds_experts)
    hooks = framework.gather_launches * len(kind.tensors) if strategy.zero == 3 else 0.0

    def cost(framework: Framework) -> KindCost:
        timed = partial(pass_cost, device=device, groups=groups, framework=framework, hooks=hooks)
        forward, backward, again = _passes(kind, framework, timed)
        return replace(
            exchanges,
            forward=forward.seconds + exchanges.slowed.forward,
            backward=backward.seconds + exchanges.slowed.backward,
            tensor_reduce=0.0
            if kind.frozen
            else _summed(kind.repeated, strategy.tp, sizes.gradient, groups.tensor),
            update_launch=update_launch(kind.tensors, nodes.gpu, framework, training),
            reruns={recompute: one.seconds for recompute, one in again.items()},
            forward_waits=forward.waits,
            backward_waits=backward.waits,
            rerun_waits={recompute: one.waits for recompute, one in again.items()},
        )

    framework = replace(framework, waits=True) if kind.in_turn else framework
    launched = cost(framework)
    capturing = framework.captures and nodes.gpu.runs_kernels and groups.alone
    if kind.waits or not (capturing and kind.name in BLOCKS):
        return launched
    captured = cost(replace(framework, captured=True))
    gain = (launched.forward + launched.backward) / (captured.forward + captured.backward) - 1
    return replace(captured, launched=launched) if gain > CAPTURED_GAIN else launched


def _passes(
    kind: LayerKind, framework: Framework, cost: Callable[..., PassCost]
) -> tuple[PassCost, PassCost, dict[Recompute, PassCost]]:
    """Forward, backward without recomputation, and what runs again before it."""
    reruns = kind.reruns.items()
    again = {recompute: cost(rerun.operators, again=True) for recompute, rerun in reruns}
    forward, backward = cost(kind.forward), cost(kind.backward)
    if again and not framework.stops_early:
        again[Recompute.FULL] = forward
    return forward, backward, again


def _summed(repeated: Iterable[tuple[int, range]], tp: int, element: int, group: Group) -> float:
    """Seconds to sum gradients of parameters that several tensor-parallel ranks hold whole."""
    return sum(all_reduce(tp // n * len(part) * element, group) for n, part in repeated)


def device_of(nodes: NodeGroup, training: Training, framework: Framework) -> Device:
    """The GPU with the precision of the run and the attention kernel of the framework.

    If the backward must give the same bits every time, the kernel is torch's FlashAttention-2.
    """
    attention: tuple[FlashKernel, ...] = framework.attention
    if training.deterministic:
        attention = ("flash2",)
    kernels = nodes.gpu.runs_kernels and training.kernels == "generated"
    eager = framework.eager if kernels else 1.0
    slowest = nodes.gpu.slowest(nodes.gpus)
    return Device(nodes.gpu, training.precision, attention, framework.gemm_share, eager, slowest)


class PassCost(NamedTuple):
    """Seconds of a layer's operators in a row, and the part of them in which the GPU waits."""

    seconds: float
    waits: GpuWaits


def pass_cost(
    operators: tuple[Operator, ...],
    device: Device,
    groups: LayerGroups,
    framework: Framework,
    hooks: float = 0.0,
    *,
    again: bool = False,
) -> PassCost:
    """What a layer's operators take in a row: GPU, host launching, collectives.

    `hooks`, `again`: see `host_seconds`. A CPU that stands in for a GPU launches and computes in
    turn, and so does a host that waits for the device within a pass.
    """
    kernels = [one for one in operators if not isinstance(one, Collective)]
    collectives = [one for one in operators if isinstance(one, Collective)]
    seconds = [operator_seconds(one, device) for one in kernels]
    gemms = {
        one.name: took for one, took in zip(kernels, seconds, strict=True) if isinstance(one, Gemm)
    }
    beside = device.gpu.runs_kernels
    exposed = sum(
        exposed_seconds(one, groups, framework, gemms, beside=beside)
        for one in collectives
        if not one.rows
    )
    exposed += dispatched_seconds(
        collectives, groups, framework, sum(seconds), device.gpu.multiprocessors
    )
    host = host_seconds(operators, device, framework, hooks, again=again)
    if not groups.alone:
        number = COLLECTIVE_LAUNCHES * sum(one.count for one in collectives)
        host += number * device.gpu.launch_overhead * (framework.host or 1.0)
    busy = sum(seconds) + exposed
    waits = framework.waits or any(one.waits for one in collectives)
    beside = beside and not waits
    whole = norm(busy, host, OVERLAP_NORM) if beside else busy + host
    return PassCost(whole, GpuWaits(exposed, whole - busy))
