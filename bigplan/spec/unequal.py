"""Sizes of micro-batches with which unlike groups of nodes take about as long.

A replica of a group whose micro-batch has b of at most B sequences works as B / b times faster
nodes would with B. So groups with sizes of their own are planned as equal nodes once each one's
rates of work by tokens are multiplied by its B / b.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from math import gcd

from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.mixed import equal_nodes, large_products
from bigplan.spec.part import MachinePart

Sizes = tuple[int, ...]  # sequences in a micro-batch, by group, without a common divisor

# The largest micro-batch. Two groups' speeds are met within 3% by a ratio of numbers up to 16.
MOST = 16
# Of ratios whose steps differ by less, the smallest: activations grow with the micro-batch.
CLOSE = 0.01
_BY_TOKENS = ("bandwidth", "reduce_scatter_bandwidth", "all_gather_bandwidth", "send_bandwidth")


def most_ranks(groups: Sequence[NodeGroup]) -> int:
    """The most ranks of a replica: every group has whole ones."""
    return gcd(*(group.gpus for group in like_numbers(groups)))


def together(groups: Sequence[NodeGroup], sizes: Sizes) -> int:
    """Sequences of a micro-batch of every GPU, each a replica by itself.

    A batch divides among replicas of r ranks where this number divides r times the batch.
    """
    gpus = (group.gpus for group in like_numbers(groups))
    return sum(number * size for number, size in zip(gpus, sizes, strict=True))


def like_numbers(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """The groups with as many GPUs a node as the least of them has."""
    each = min(group.gpus_per_node for group in groups)
    return [group.model_copy(update={"gpus_per_node": each}) for group in groups]


def first_speeds(groups: Sequence[NodeGroup]) -> tuple[float, ...]:
    """How fast a GPU of each group is, by its large products."""
    return tuple(large_products(group.gpu) for group in groups)


def step_of(groups: Sequence[NodeGroup], sizes: Sizes, speeds: Sequence[float]) -> float:
    """What a step takes with these sizes, in proportion: the slowest group's part of the batch."""
    slowest = max(size / speed for size, speed in zip(sizes, speeds, strict=True))
    return slowest / together(groups, sizes)


def best_sizes(
    groups: Sequence[NodeGroup],
    speeds: Sequence[float],
    batch: int,
    without: Collection[Sizes] = (),
    most: int = MOST,
) -> Sizes | None:
    """The sizes, up to `most`, with the shortest step; None where none divide the batch.

    For replicas of several ranks each, `batch` is as many times as large (see `together`).
    """
    found = [
        sizes
        for sizes in _near(speeds, most)
        if sizes not in without and batch % together(groups, sizes) == 0
    ]
    if not found:
        return None
    least = min(step_of(groups, sizes, speeds) for sizes in found) * (1 + CLOSE)
    close = (sizes for sizes in found if step_of(groups, sizes, speeds) <= least)
    return min(close, key=lambda sizes: (max(sizes), sizes))


def _near(speeds: Sequence[float], most: int) -> Iterator[Sizes]:
    """For every largest size the others' rounded down and up, as the speeds are."""
    fastest, seen = max(speeds), set[Sizes]()
    for largest in range(1, most + 1):
        exact = [largest * speed / fastest for speed in speeds]
        around = [sorted({max(1, int(part)), min(largest, int(part) + 1)}) for part in exact]
        for sizes in product(*around):
            if gcd(*sizes) == 1 and sizes not in seen:
                seen.add(sizes)
                yield sizes


def as_equal(groups: Sequence[NodeGroup], sizes: Sizes) -> NodeGroup:
    """Equal nodes that work on the largest micro-batch as slowly as any group on its own."""
    largest = max(sizes)
    return equal_nodes(
        [_faster(group, largest / size) for group, size in zip(groups, sizes, strict=True)]
    )


def _faster(group: NodeGroup, times: float) -> NodeGroup:
    """The group with so many times the rates of work by tokens."""
    if times == 1:
        return group
    peaks = {name: times * rate for name, rate in group.gpu.peak_flops.items()}
    memory = times * group.gpu.memory_bandwidth
    link = group.intra_node
    rates = {name: times * rate for name in _BY_TOKENS if (rate := getattr(link, name))}
    gpu = {"peak_flops": peaks, "memory_bandwidth": memory}
    return group.model_copy(
        update={
            "gpu": _replaced(group.gpu, gpu, times),
            "intra_node": _replaced(link, rates, times),
        }
    )


def _replaced(part: MachinePart, values: dict[str, object], times: float) -> MachinePart:
    told = {name: f"{times:g} times: {part.sources.get(name, 'the default')}" for name in values}
    return part.replaced(values, told)


def with_figures(cluster: Cluster, groups: Sequence[NodeGroup]) -> Cluster:
    """Equal nodes of several groups, each with its own figures beside."""
    figures = {group.name: group for group in groups}
    members = tuple(
        member.model_copy(update={"figures": figures[member.name]})
        for member in cluster.members or ()
    )
    return cluster.model_copy(update={"members": members})


def without_figures(cluster: Cluster) -> Cluster:
    """The same with equal nodes alone."""
    if cluster.members is None:
        return cluster
    members = tuple(m.model_copy(update={"figures": None}) for m in cluster.members)
    return cluster.model_copy(update={"members": members})


def own_groups(cluster: Cluster) -> dict[str, NodeGroup]:
    """The groups of unlike nodes by name: a cluster's own, or those that its equal nodes are of."""
    figures = [m.figures for m in cluster.members or () if m.figures is not None]
    return {group.name: group for group in figures or cluster.node_groups}
