"""Classes of pipeline stages and the decision variables of each.

Stages between the first and the last are alike, so one set of counts serves them all; the class is
held to the memory of its first stage (most activations in flight) and the time of its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import SLOTS, Tier
from bigplan.solve.linear import Linear, Rule, Variable, total, var

AWAY = (Tier.HOST, Tier.NVME)


@dataclass(frozen=True, slots=True)
class StageClass:
    """Alike stages: `stages` of them, with `counts` layers of each kind."""

    name: str
    graph: Graph
    stages: range
    counts: tuple[tuple[str, int], ...]

    @property
    def kinds(self) -> Iterator[tuple[LayerKind, int]]:
        """Kinds with their number of layers."""
        return ((self.graph.kinds[name], count) for name, count in self.counts)

    @property
    def last(self) -> bool:
        """Whether it ends the pipeline."""
        return self.stages[-1] == self.graph.strategy.pp - 1

    @property
    def held(self) -> int:
        """Micro-batches whose activations the class's fullest stage holds at once."""
        units = self.graph.in_flight_units(self.stages[0])
        return units * self.graph.strategy.accumulation_group

    def is_loss(self, kind: LayerKind) -> bool:
        """Whether the kind is the last layer, whose backward follows its forward at once."""
        return self.last and kind.name == self.graph.layers[-1]

    def sharded(self, kind: LayerKind, from_zero: int) -> int:
        """Ranks a tensor kind is split over by ZeRO from stage `from_zero` on."""
        strategy = self.graph.strategy
        whole = kind.pinned and from_zero > 1
        return strategy.dp if strategy.zero >= from_zero and not whole else 1

    def ring(self, count: int) -> int:
        """GPU slots of a kind with `count` layers."""
        return min(SLOTS, count)

    # Decisions, by name: parameters, gradients, optimizer on a tier; activations by policy; whether
    # a ring or a staging area exists.

    def tensor(self, kind: LayerKind, tensor: str, tier: Tier) -> Linear:
        """Layers of the kind whose `tensor` is on `tier`."""
        return var(f"{self.name}.{kind.name}.{tensor}.{tier}")

    def away(self, kind: LayerKind, tensor: str) -> Linear:
        """Layers of the kind whose `tensor` is not on the GPU."""
        return total([self.tensor(kind, tensor, tier) for tier in AWAY])

    def policy(self, kind: LayerKind, recompute: Recompute, tier: Tier) -> Linear:
        """Layers of the kind that keep activations so."""
        return var(f"{self.name}.{kind.name}.activations.{recompute}.{tier}")

    def recomputed(self, kind: LayerKind) -> Linear:
        """Layers of the kind that run their forward twice."""
        return total([self.policy(kind, Recompute.FULL, tier) for tier in Tier])

    def switch(self, kind: LayerKind | None, name: str) -> Linear:
        """Whether (1) or not (0) something exists."""
        return var(f"{self.name}.{kind.name if kind else 'stage'}.has.{name}")

    def cpu_rows_on_gpu(self, kind: LayerKind, tensor: str) -> Linear:
        """Layers' worth of rows that the CPU updates though `tensor` is at home on the GPU."""
        return self.tensor(kind, tensor, Tier.GPU) - self.tensor(kind, "optimizer", Tier.GPU)


def stage_classes(graph: Graph) -> tuple[StageClass, ...]:
    """The classes of the graph's pipeline: all, first and last, or first, middle and last."""
    pp = graph.strategy.pp
    ranges = {"all": range(1)} if pp == 1 else {"first": range(1), "last": range(pp - 1, pp)}
    if pp > 2:
        ranges = {"first": range(1), "middle": range(1, pp - 1), "last": range(pp - 1, pp)}
    return tuple(_stage_class(graph, name, stages) for name, stages in ranges.items())


def _stage_class(graph: Graph, name: str, stages: range) -> StageClass:
    names = [graph.layers[layer] for layer in graph.stage_layers(stages[0])]
    counts = tuple((kind, names.count(kind)) for kind in dict.fromkeys(names))
    return StageClass(name, graph, stages, counts)


SWITCHES = ("slots", "sums", "staged_weights", "staged_gradients", "recompute")


def variables(stage: StageClass) -> Iterator[Variable]:
    """Counts (integers), optimizer shares (continuous) and switches of a class."""
    for kind, count in stage.kinds:
        start = f"{stage.name}.{kind.name}"
        for tensor, tier in product(("parameters", "gradients", "optimizer"), Tier):
            yield Variable(f"{start}.{tensor}.{tier}", count, tensor != "optimizer")
        for recompute, tier in product(Recompute, Tier):
            yield Variable(f"{start}.activations.{recompute}.{tier}", count, True)
        for name in SWITCHES:
            yield Variable(f"{start}.has.{name}", 1, True)
        for recompute in Recompute:
            yield Variable(f"{start}.has.passing.{recompute}", 1, True)
            yield Variable(f"{start}.has.on_disk.{recompute}", 1, True)
    yield Variable(f"{stage.name}.stage.has.state_chunks", 1, True)


def placement_rules(stage: StageClass) -> Iterator[Rule]:
    """Every layer's tensors are placed once; what a kind cannot do is ruled out."""
    for kind, count in stage.kinds:
        where = f"{stage.name}.{kind.name}"
        for tensor in ("parameters", "gradients", "optimizer"):
            placed = total([stage.tensor(kind, tensor, tier) for tier in Tier])
            yield Rule(f"{where}: place {tensor} once", placed - count, equal=True)
        policies = total([stage.policy(kind, r, tier) for r, tier in product(Recompute, Tier)])
        yield Rule(f"{where}: keep activations one way", policies - count, equal=True)
        on_gpu = stage.tensor(kind, "optimizer", Tier.GPU)
        for tensor in ("parameters", "gradients"):
            limit = stage.tensor(kind, tensor, Tier.GPU)
            yield Rule(f"{where}: the GPU updates rows whose {tensor} it has", on_gpu - limit)
        yield from _fixed(stage, kind, count, where)


def _fixed(stage: StageClass, kind: LayerKind, count: int, where: str) -> Iterator[Rule]:
    if kind.pinned or stage.graph.strategy.zero in (1, 2):
        rule = f"{where}: parameters stay on the GPU"
        yield Rule(rule, stage.tensor(kind, "parameters", Tier.GPU) - count, equal=True)
    if kind.pinned:
        rule = f"{where}: gradients stay on the GPU"
        yield Rule(rule, stage.tensor(kind, "gradients", Tier.GPU) - count, equal=True)
    if not kind.stores_activations:
        kept = stage.policy(kind, Recompute.NONE, Tier.GPU)
        yield Rule(f"{where}: nothing to move or recompute", kept - count, equal=True)


def switch_rules(stage: StageClass) -> Iterator[Rule]:
    """A ring or staging area exists where a layer needs it."""
    units = stage.graph.units
    state_on_disk = []
    for kind, count in stage.kinds:
        needs = {
            "slots": stage.away(kind, "parameters"),
            "sums": stage.away(kind, "gradients"),
            "staged_weights": stage.tensor(kind, "parameters", Tier.NVME)
            + stage.cpu_rows_on_gpu(kind, "parameters"),
            "staged_gradients": stage.tensor(kind, "gradients", Tier.NVME)
            + stage.cpu_rows_on_gpu(kind, "gradients")
            + (stage.tensor(kind, "gradients", Tier.HOST) if units > 1 else Linear()),
            "recompute": stage.recomputed(kind),
        }
        if stage.sharded(kind, 3) > 1:
            needs["slots"] = Linear(constant=count)
        if stage.sharded(kind, 2) > 1:
            needs["sums"] = Linear(constant=count)
        for recompute in Recompute:
            on_disk = stage.policy(kind, recompute, Tier.NVME)
            needs[f"passing.{recompute}"] = on_disk + stage.policy(kind, recompute, Tier.HOST)
            needs[f"on_disk.{recompute}"] = on_disk
        for name, used in needs.items():
            rule = f"{stage.name}.{kind.name}: {name} exist where used"
            yield Rule(rule, used - count * stage.switch(kind, name))
        state_on_disk.append(stage.tensor(kind, "optimizer", Tier.NVME))
    layers = sum(count for _, count in stage.counts)
    used = total(state_on_disk) - layers * stage.switch(None, "state_chunks")
    yield Rule(f"{stage.name}: state chunks exist where used", used)
