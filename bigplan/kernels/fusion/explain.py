"""Why a graph runs as it does: its kernels, what binds each, and why they are apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bigplan.kernels.fusion.cover import CoverSearch, CoverUnit, Members, torch_cover
from bigplan.kernels.fusion.keep import AGAIN, KeepPlan
from bigplan.kernels.fusion.operators import why_not
from bigplan.kernels.fusion.price import Fused, Pricer


@dataclass(frozen=True)
class KernelLine:
    """One kernel, or one operator of torch's."""

    number: int
    side: str  # forward, backward
    operators: tuple[str, ...]
    generated: bool
    seconds: float
    apart: float  # what torch's operators take one by one
    limit: float  # its bytes at the nominal bandwidth of the memory
    nbytes: float
    bound: str
    kernel: str  # template and tile
    again: tuple[str, ...]  # operators of the forward that it computes again


@dataclass(frozen=True)
class Boundary:
    """A value that leaves one kernel for another, and why they are two."""

    writer: int
    reader: int
    nbytes: int
    reason: str


@dataclass(frozen=True)
class GraphExplanation:
    """A whole graph on a GPU."""

    gpu: str
    lines: tuple[KernelLine, ...]
    boundaries: tuple[Boundary, ...]
    seconds: float
    apart: float
    kept_bytes: int
    left: tuple[tuple[str, str], ...]  # operators that torch runs, and why

    def to_json(self) -> dict[str, Any]:
        """Plain values; seconds and bytes."""
        return asdict(self)


def explained(plan: KeepPlan, pricer: Pricer, gpu: str) -> GraphExplanation:
    """What a plan does and why."""
    lines = tuple(_line(plan, pricer, unit, i) for i, unit in enumerate(plan.cover.units, 1))
    left = {
        node.op: why_not(node) or "torch's own operator is as fast"
        for unit in plan.cover.units
        if unit.fused is None
        for node in unit.members
    }
    return GraphExplanation(
        gpu,
        lines,
        tuple(_boundaries(plan, pricer)),
        plan.cover.seconds,
        torch_cover(plan.graph, pricer).seconds,
        plan.kept_bytes,
        tuple(left.items()),
    )


def _line(plan: KeepPlan, pricer: Pricer, unit: CoverUnit, number: int) -> KernelLine:
    graph, fused = plan.graph, unit.fused
    apart = sum(pricer.torch(graph, node) for node in unit.members)
    if fused is None:
        node = unit.members[0]
        read = sum(graph.values[ref].nbytes for ref in dict.fromkeys(node.refs()))
        nbytes = float(read + sum(value.nbytes for value in node.outputs))
        bound, kernel = "torch", "torch's own"
    else:
        nbytes = float(sum(v.nbytes for v in (*fused.body.inputs, *fused.body.outputs)))
        tile = fused.tile
        strips = f", {tile.programs} strips" if tile.programs else ""
        kernel = f"{tile.shape}: {tile.rows} x {tile.columns}, {tile.warps} warps{strips}"
        bound = str(fused.time.bound)
    side = "backward" if unit.members[0].backward else "forward"
    again = tuple(n.op for n in unit.members if n.name.startswith(AGAIN))
    operators = tuple(node.op for node in unit.members)
    limit = nbytes / pricer.gpu.memory_bandwidth
    return KernelLine(
        number, side, operators, fused is not None, unit.seconds, apart, limit, nbytes, bound,
        kernel, again,
    )  # fmt: skip


def _boundaries(plan: KeepPlan, pricer: Pricer) -> Iterator[Boundary]:
    """Where a value passes from one unit to another that could have been one with it."""
    graph, search = plan.graph, CoverSearch(plan.graph, pricer)
    groups = [
        frozenset(search.place[node.outputs[0].name] for node in unit.members if node.outputs)
        for unit in plan.cover.units
    ]
    search.own(*groups)
    number = {group: i for i, group in enumerate(groups, 1)}
    seen = set()
    for group in groups:
        for i in sorted(group):
            for value in search.nodes[i].outputs:
                for reader in graph.readers.get(value.name, ()):
                    other = search.owner[search.place[reader.outputs[0].name]]
                    if other != group and (group, other) not in seen:
                        seen.add((group, other))
                        reason = why_apart(search, group, other)
                        yield Boundary(number[group], number[other], value.nbytes, reason)


def why_apart(search: CoverSearch, a: Members, b: Members) -> str:
    """Why two groups are not one kernel."""
    for group in (a, b):
        for i in sorted(group):
            reason = why_not(search.nodes[i])
            if reason:
                return f"{search.nodes[i].op}: {reason}"
    if len({search.nodes[i].backward for i in a | b}) > 1:
        return "kept from the forward for the backward"
    if not search.convex(a | b):
        return "something that is not in either lies between them"
    one = search.unit(a | b)
    nodes = [search.nodes[i] for i in sorted(a | b)]
    if one is None:
        fused = search.pricer.fused(search.graph, nodes, search.wanted(a | b))
        return fused if isinstance(fused, str) else "no kernel"
    gain = search.gain(a, b)
    if gain <= 0:
        return f"one kernel would take {-gain * 1e6:.1f} us more than two"
    return "one of them already waits for the other through a third"


__all__ = ["Boundary", "Fused", "GraphExplanation", "KernelLine", "explained", "why_apart"]
