"""What a forward keeps for its backward, and what the backward computes again instead.

If no kernel of the forward has to write a cheap value anyway, the backward's kernel computes the
value again from what is kept. Other values are kept, unless a byte has a price: seconds that
keeping the byte costs elsewhere, such as on a link to host memory. Then the largest values are
tried one by one, and computed again if time and price together become less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from bigplan.kernels.fusion.cover import Cover, best_cover
from bigplan.kernels.fusion.graph import Arg, Argument, KernelGraph, KernelNode, frozen
from bigplan.kernels.fusion.operators import why_not
from bigplan.kernels.fusion.price import Pricer

AGAIN = "again."  # how the names of what the backward computes again begin
REDUCING = frozenset(
    (
        "sum",
        "mean",
        "amax",
        "native_layer_norm",
        "_fused_rms_norm",
        "_softmax",
        "_log_softmax",
        "cross_entropy_rows",
    )
)


@dataclass(frozen=True)
class KeepPlan:
    """A graph with what is computed again in it, its cover, and what is kept between its halves."""

    graph: KernelGraph
    cover: Cover
    kept: tuple[str, ...]  # values of the forward that the backward reads, by their bases
    price: float  # seconds a byte kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept and was neither an input of the graph nor is a result of it."""
        own = (name for name in self.kept if _own(self.graph, name))
        return sum(self.graph.values[name].nbytes for name in own)

    @property
    def cost(self) -> float:
        """Seconds and the price of what is kept."""
        return self.cover.seconds + self.price * self.kept_bytes


def best_plan(graph: KernelGraph, pricer: Pricer, price: float = 0.0) -> KeepPlan:
    """The cheapest plan found; `price` in seconds a byte that is kept."""
    again = _closed(graph, frozenset())
    best = _plan(graph, again, pricer, price)
    for name in sorted(again & _written(best)):  # which a forward kernel writes all the same
        tried = _plan(graph, again - {name}, pricer, price)
        if tried.cost < best.cost:
            best, again = tried, again - {name}
    if not price:
        return best
    for name in sorted(best.kept, key=lambda n: -graph.values[n].nbytes):
        if _own(graph, name) and _cheap(graph, name):
            more = _closed(graph, again | {name})
            tried = _plan(graph, more, pricer, price)
            if tried.cost < best.cost:
                best, again = tried, more
    return best


def _own(graph: KernelGraph, name: str) -> bool:
    """Whether a value lives from the forward to the backward only because it is kept."""
    results = (graph.base[one] for one in graph.outputs[: graph.forward_outputs])
    return name in graph.producer and name not in results


def _closed(graph: KernelGraph, again: frozenset[str]) -> frozenset[str]:
    """These values, and the cheap values that would be kept only because these read them."""
    while found := _inner(with_again(graph, again)) - again:
        again |= found
    return again


def _written(plan: KeepPlan) -> frozenset[str]:
    """Values that kernels of the forward write."""
    ahead = (unit for unit in plan.cover.units if not unit.members[0].backward)
    fused = (unit.fused for unit in ahead if unit.fused is not None)
    return frozenset(value.name for one in fused for value in one.body.outputs)


def _plan(graph: KernelGraph, again: frozenset[str], pricer: Pricer, price: float) -> KeepPlan:
    changed = with_again(graph, again)
    return KeepPlan(changed, best_cover(changed, pricer), kept(changed), price)


def kept(graph: KernelGraph) -> tuple[str, ...]:
    """Bases that the backward reads and does not make: values and inputs of the forward."""
    made = {value.name for node in graph.nodes if node.backward for value in node.outputs}
    tangents = {value.name for value in graph.inputs if value.name.startswith("tangents")}
    read = (ref for node in graph.nodes if node.backward for ref in node.refs())
    given = graph.outputs[graph.forward_outputs :]
    bases = dict.fromkeys(graph.base[name] for name in (*read, *given))
    return tuple(name for name in bases if name not in made and name not in tangents)


def _inner(graph: KernelGraph) -> frozenset[str]:
    """Cheap values that a forward kernel writes only for the backward."""
    forward = {id(node) for node in graph.nodes if not node.backward}
    found = set()
    for name in kept(graph):
        if name not in graph.producer or name in graph.given or not _cheap(graph, name):
            continue
        readers = [r for r in graph.readers.get(name, ()) if id(r) in forward]
        if all(not why_not(reader) for reader in readers):
            found.add(name)
    return frozenset(found)


def _cheap(graph: KernelGraph, name: str) -> bool:
    """Whether a value is worth computing again: arithmetic on each position, no reduction."""
    node = graph.producer[name]
    if why_not(node):
        return False
    if node.op not in REDUCING:
        return prod(node.outputs[0].shape) > 1
    # A norm's statistics are few bytes and are kept; the norm's output follows from them.
    norm = node.op in ("native_layer_norm", "_fused_rms_norm")
    return norm and name == node.outputs[0].name


def with_again(graph: KernelGraph, again: frozenset[str]) -> KernelGraph:
    """The graph with copies, in its backward, of the nodes that make these values."""
    copies: dict[str, str] = {}
    forward: list[KernelNode] = []
    backward: list[KernelNode] = []
    for node in graph.nodes:
        if not node.backward:
            forward.append(node)
            if any(value.name in again for value in node.outputs):
                backward += [*_views_of(graph, node, copies), *_copied(node, copies)]
    if not copies:
        return graph
    for node in graph.nodes:
        if node.backward:
            backward += [*_views_of(graph, node, copies), _renamed(node, copies)]
    outputs = graph.outputs[: graph.forward_outputs] + tuple(
        copies.get(name, name) for name in graph.outputs[graph.forward_outputs :]
    )
    return replace(graph, nodes=(*forward, *backward), outputs=outputs)


def _copied(node: KernelNode, copies: dict[str, str]) -> Iterable[KernelNode]:
    """A copy of a node that reads copies; for a norm, arithmetic that reads its statistics."""
    outputs = node.outputs
    if node.op in ("native_layer_norm", "_fused_rms_norm"):
        yield from _norm_again(node, copies)
        return
    copy = _renamed(node, copies)
    renamed = tuple(replace(value, name=AGAIN + value.name) for value in outputs)
    copies.update({value.name: AGAIN + value.name for value in outputs})
    yield replace(copy, name=AGAIN + node.name, outputs=renamed, backward=True)


def _norm_again(node: KernelNode, copies: dict[str, str]) -> Iterable[KernelNode]:
    """The output of a norm from its input and kept statistics, in a node of its own kind."""
    out, *statistics = node.outputs
    arguments = dict(_renamed(node, copies).arguments)
    names = ("mean", "rstd") if len(statistics) == 2 else ("rstd",)
    arguments |= {name: Arg(value.name) for name, value in zip(names, statistics, strict=True)}
    copies[out.name] = AGAIN + out.name
    yield KernelNode(
        AGAIN + node.name,
        "norm_of_statistics",
        frozen(arguments),
        (replace(out, name=AGAIN + out.name),),
        backward=True,
    )


def _renamed(node: KernelNode, copies: dict[str, str]) -> KernelNode:
    if not any(ref in copies for ref in node.refs()):
        return node
    arguments = {name: _argument(value, copies) for name, value in node.arguments.items()}
    return replace(node, arguments=frozen(arguments))


def _argument(argument: Argument, copies: dict[str, str]) -> Argument:
    if isinstance(argument, Arg):
        return Arg(copies.get(argument.name, argument.name))
    if isinstance(argument, tuple):
        return tuple(_argument(item, copies) for item in argument)
    return argument


def _views_of(graph: KernelGraph, node: KernelNode, copies: dict[str, str]) -> Iterable[KernelNode]:
    """Copies of the forward's views of what is computed again, for a node that reads them."""
    for ref in node.refs():
        chain: list[KernelNode] = []
        name = ref
        while name not in copies and name in graph.producer and graph.producer[name].layout:
            view = graph.producer[name]
            if view.backward:
                break
            chain.append(view)
            name = next(view.refs())
        if name not in copies:
            continue
        for view in reversed(chain):
            copy = _renamed(view, copies)
            renamed = tuple(replace(value, name=AGAIN + value.name) for value in view.outputs)
            copies.update({value.name: AGAIN + value.name for value in view.outputs})
            yield replace(copy, name=AGAIN + view.name, outputs=renamed, backward=True)
