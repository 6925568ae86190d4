"""Which operators run as one kernel: the cover of a graph with the least predicted time.

Every operator starts alone, as torch's own or as a generated kernel, whichever is faster. Then the
two groups that save most become one: a producer and its reader, or readers of one tensor. A group
must be convex (nothing outside lies between its members), and some order of all groups must remain.
Forward and backward stay separate. At last single operators change groups if that helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bigplan.kernels.fusion.graph import KernelGraph, KernelNode
from bigplan.kernels.fusion.operators import why_not
from bigplan.kernels.fusion.price import Fused, Pricer

# A generated kernel must save this share of the time of a single torch operator. A smaller gain is
# within the model's error, and torch's operator needs no compilation.
WORTH = 0.05
Members = frozenset[int]  # places of nodes in the graph


@dataclass(frozen=True)
class CoverUnit:
    """Nodes that run as one generated kernel, or one that torch runs."""

    members: tuple[KernelNode, ...]
    fused: Fused | None  # None: torch's own operator
    seconds: float

    @property
    def name(self) -> str:
        """How explanations call it."""
        return " + ".join(dict.fromkeys(node.op for node in self.members))


@dataclass(frozen=True)
class Cover:
    """Units in an order that they can run in."""

    units: tuple[CoverUnit, ...]

    @property
    def seconds(self) -> float:
        """Predicted, all units one after another."""
        return sum(unit.seconds for unit in self.units)


class CoverSearch:
    """The state of a search: groups of places, over the nodes that compute."""

    def __init__(self, graph: KernelGraph, pricer: Pricer) -> None:
        self.graph, self.pricer = graph, pricer
        self.nodes = [node for node in graph.nodes if not node.layout]
        self.place = {v.name: i for i, node in enumerate(self.nodes) for v in node.outputs}
        self.before = [self._reads(node) for node in self.nodes]
        self.after: list[set[int]] = [set() for _ in self.nodes]
        for i, read in enumerate(self.before):
            for j in read:
                self.after[j].add(i)
        self.fusable = [not why_not(node) for node in self.nodes]
        self._reach = self._reachable(self.after, reversed(range(len(self.nodes))))
        self._origin = self._reachable(self.before, range(len(self.nodes)))
        self._priced: dict[Members, CoverUnit | None] = {}
        self.owner: dict[int, Members] = {i: frozenset((i,)) for i in range(len(self.nodes))}

    def _reads(self, node: KernelNode) -> set[int]:
        bases = (self.graph.base[ref] for ref in node.refs())
        return {self.place[base] for base in bases if base in self.place}

    def _reachable(self, edges: list[set[int]], order: Iterable[int]) -> list[int]:
        """For every node, all that follow its edges, as bits."""
        found = [0] * len(self.nodes)
        for i in order:
            for j in edges[i]:
                found[i] |= found[j] | 1 << j
        return found

    # --- Prices.

    def unit(self, members: Members) -> CoverUnit | None:
        """These nodes as one unit, None where they cannot be one."""
        if members not in self._priced:
            self._priced[members] = self._unit(members)
        return self._priced[members]

    def _unit(self, members: Members) -> CoverUnit | None:
        nodes = tuple(self.nodes[i] for i in sorted(members))
        fused: Fused | str = "torch's"
        if all(self.fusable[i] for i in members):
            fused = self.pricer.fused(self.graph, nodes, self.wanted(members))
        if len(nodes) > 1:
            return CoverUnit(nodes, fused, fused.seconds) if isinstance(fused, Fused) else None
        torch = self.pricer.torch(self.graph, nodes[0])
        if isinstance(fused, Fused) and fused.seconds < torch * (1 - WORTH):
            return CoverUnit(nodes, fused, fused.seconds)
        return CoverUnit(nodes, None, torch)

    def wanted(self, members: Members) -> frozenset[str]:
        """Values that others read, or that the graph gives."""
        inside = {id(self.nodes[i]) for i in members}
        found = set()
        for i in members:
            for value in self.nodes[i].outputs:
                readers = self.graph.readers.get(value.name, ())
                if value.name in self.graph.given or any(id(r) not in inside for r in readers):
                    found.add(value.name)
        return frozenset(found)

    # --- What may be one.

    def convex(self, members: Members) -> bool:
        """Whether no path leaves them and comes back."""
        reach = origin = own = 0
        for i in members:
            reach |= self._reach[i]
            origin |= self._origin[i]
            own |= 1 << i
        return not reach & origin & ~own

    def ordered(self, groups: Iterable[Members]) -> list[Members] | None:
        """The groups so that each comes after what it reads; None where they go in circles."""
        whole = list(dict.fromkeys(groups))
        owner = {i: group for group in whole for i in group}
        waiting = {
            group: {owner[j] for i in group for j in self.before[i]} - {group} for group in whole
        }
        readers: dict[Members, list[Members]] = {group: [] for group in whole}
        for group, read in waiting.items():
            for other in read:
                readers[other].append(group)
        left = {group: len(read) for group, read in waiting.items()}
        ready = sorted((g for g in whole if not left[g]), key=min, reverse=True)
        found = []
        while ready:
            group = ready.pop()
            found.append(group)
            for reader in readers[group]:
                left[reader] -= 1
                if not left[reader]:
                    ready.append(reader)
            ready.sort(key=min, reverse=True)
        return found if len(found) == len(whole) else None

    def together(self, a: Members, b: Members) -> bool:
        """Whether they lie on one side of the loss and all of theirs can be generated."""
        both = a | b
        sides = {self.nodes[i].backward for i in both}
        return len(sides) == 1 and all(self.fusable[i] for i in both)

    def neighbours(self, group: Members) -> Iterator[Members]:
        """Groups that read this one's results, make what it reads, or read the same tensor."""
        found = {self.owner[j] for i in group for j in (*self.before[i], *self.after[i])}
        for i in group:
            for ref in self.nodes[i].refs():
                for reader in self.graph.readers.get(self.graph.base[ref], ()):
                    found.add(self.owner[self.place[reader.outputs[0].name]])
        found.discard(group)
        return (g for g in sorted(found, key=min) if self.together(group, g))

    # --- The search.

    def gain(self, a: Members, b: Members) -> float:
        """Seconds that one kernel in place of both saves, negative where it cannot be."""
        if not self.convex(a | b):
            return -1.0
        one, first, second = self.unit(a | b), self.unit(a), self.unit(b)
        if one is None or first is None or second is None:
            return -1.0
        return first.seconds + second.seconds - one.seconds

    def own(self, *groups: Members) -> None:
        """Make these groups of the cover."""
        for group in groups:
            for i in group:
                self.owner[i] = group

    def grow(self) -> None:
        """Merge the pair that saves most until none saves anything."""
        gains: dict[tuple[Members, Members], float] = {}

        def enter(group: Members) -> None:
            for other in self.neighbours(group):
                pair = (group, other) if min(group) < min(other) else (other, group)
                if pair not in gains:
                    gains[pair] = self.gain(*pair)

        for group in dict.fromkeys(self.owner.values()):
            enter(group)
        while gains:
            (a, b), best = max(gains.items(), key=lambda item: (item[1], -min(item[0][0])))
            if best <= 0:
                return
            del gains[a, b]
            current = [g for g in dict.fromkeys(self.owner.values()) if g not in (a, b)]
            if self.ordered([*current, a | b]) is None:
                continue
            gains = {pair: g for pair, g in gains.items() if not {a, b} & {*pair}}
            self.own(a | b)
            enter(a | b)

    def move(self) -> bool:
        """Let single nodes change groups, or leave them, where that saves time; whether any did."""
        moved = False
        for i in range(len(self.nodes)):
            source = self.owner[i]
            if not self.fusable[i] or len(source) == 1:
                continue
            rest = source - {i}
            alone = frozenset((i,))
            for target in (alone, *self.neighbours(alone)):
                if (
                    target is not source
                    and target != source
                    and self._better(source, rest, i, target)
                ):
                    self.own(rest, target | {i})
                    moved = True
                    break
        return moved

    def _better(self, source: Members, rest: Members, i: int, target: Members) -> bool:
        grown = target | {i}
        if not (self.convex(rest) and self.convex(grown)):
            return False
        before = [self.unit(source), *([] if i in target else [self.unit(target)])]
        after = [self.unit(rest), self.unit(grown)]
        if any(unit is None for unit in (*before, *after)):
            return False
        saved = sum(u.seconds for u in before if u) - sum(u.seconds for u in after if u)
        groups = [g for g in dict.fromkeys(self.owner.values()) if g not in (source, target)]
        return saved > 1e-9 and self.ordered([*groups, rest, grown]) is not None

    def settle(self) -> None:
        """Grow and move until nothing saves any more."""
        self.grow()
        while self.move():
            self.grow()

    def cover(self) -> Cover:
        """The groups as they are."""
        order = self.ordered(self.owner.values())
        assert order is not None
        units = [self.unit(group) for group in order]
        return Cover(tuple(unit for unit in units if unit is not None))


def best_cover(graph: KernelGraph, pricer: Pricer) -> Cover:
    """The cover that growing and then moving nodes finds."""
    search = CoverSearch(graph, pricer)
    search.settle()
    return search.cover()


def torch_cover(graph: KernelGraph, pricer: Pricer) -> Cover:
    """Every operator as torch runs it."""
    nodes = (node for node in graph.nodes if not node.layout)
    return Cover(tuple(CoverUnit((node,), None, pricer.torch(graph, node)) for node in nodes))
