"""Classes of pipeline stages and the decision variables of each.

Stages between the first and the last are alike, so one set of counts serves them all. Memory rows
are those of the class's first stage, which has the most activations in flight. Time rows are those
of its last stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, product

from bigplan.graph.graph import Graph, LayerKind, Recompute, chunk_layers
from bigplan.graph.strategy import Cut
from bigplan.placement import Rings, Tier
from bigplan.solve.alike import ROOMY, AlikeStages
from bigplan.solve.linear import Linear, Rule, Variable, total, var

AWAY = (Tier.HOST, Tier.NVME)
TENSORS = ("parameters", "gradients", "optimizer")


def tensors_of(kind: LayerKind) -> tuple[str, ...]:
    """What of a kind of layer is placed besides activations."""
    return TENSORS[:1] if kind.frozen else TENSORS


@dataclass(frozen=True, slots=True)
class StageClass(AlikeStages):
    """Alike stages with their decisions, by name.

    The decisions: parameters, gradients and optimizer by tier; activations by policy; whether a
    ring or a staging area exists. A decision without a choice is a constant.
    """

    # Where layers are, as was asked before: rules and rows ask some ten times.
    _placed: dict[tuple[str, str, Tier], Linear] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def tensor(self, kind: LayerKind, tensor: str, tier: Tier) -> Linear:
        """Layers of the kind whose `tensor` is on `tier`; frozen ones have parameters alone."""
        key = kind.name, tensor, tier
        if key not in self._placed:
            self._placed[key] = self._tensor(kind, tensor, tier)
        return self._placed[key]

    def _tensor(self, kind: LayerKind, tensor: str, tier: Tier) -> Linear:
        on_disk = tensor == "optimizer" and tier is Tier.NVME
        if tensor not in tensors_of(kind) or (on_disk and kind.orthogonalised):
            return Linear()
        if self.resident(kind, tensor):
            return Linear(constant=float(self.count(kind) if tier is Tier.GPU else 0))
        return var(f"{self.name}.{kind.name}.{tensor}.{tier}")

    def away(self, kind: LayerKind, tensor: str) -> Linear:
        """Layers of the kind whose `tensor` is not on the GPU."""
        return total([self.tensor(kind, tensor, tier) for tier in AWAY])

    def looked_up(self, kind: LayerKind) -> Linear:
        """Layers of the kind whose rows are looked up, and added to, in host memory."""
        return var(f"{self.name}.{kind.name}.looked_up") if kind.looked_up else Linear()

    def passing(self, kind: LayerKind, tensor: str) -> Linear:
        """Layers of the kind whose parameters pass through a slot, or gradients through a sum."""
        return self.away(kind, tensor) - self.looked_up(kind)

    def policy(self, kind: LayerKind, recompute: Recompute, tier: Tier) -> Linear:
        """Layers of the kind with this policy for activations."""
        key = kind.name, recompute, tier
        if key not in self._placed:
            self._placed[key] = self._policy(kind, recompute, tier)
        return self._placed[key]

    def _policy(self, kind: LayerKind, recompute: Recompute, tier: Tier) -> Linear:
        if not kind.stores_activations:
            plain = recompute is Recompute.NONE and tier is Tier.GPU
            return Linear(constant=float(self.count(kind) if plain else 0))
        stays = self.interleaved or kind.varies(recompute)
        if recompute not in self.graph.recomputes or (stays and tier is not Tier.GPU):
            return Linear()
        return var(f"{self.name}.{kind.name}.activations.{recompute}.{tier}")

    def keeping(self, kind: LayerKind, recompute: Recompute) -> Linear:
        """Layers of the kind that recompute this, whatever tier holds what they keep."""
        return total([self.policy(kind, recompute, tier) for tier in Tier])

    def switch(self, kind: LayerKind | None, name: str) -> Linear:
        """Whether (1) or not (0) something exists."""
        if kind is not None:
            always, never = self._certain(kind, name)
            if always or never:
                return Linear(constant=float(always))
        return var(f"{self.name}.{kind.name if kind else 'stage'}.has.{name}")

    def _certain(self, kind: LayerKind, name: str) -> tuple[bool, bool]:
        """Whether it exists in every placement, or in none."""
        if name == "slots":
            return self.sharded(kind, 3) > 1, self.resident(kind, "parameters")
        if name == "shards":
            return False, self.sharded(kind, 3) == 1
        if name in ("sums", "staged_gradients") and kind.frozen:
            return False, True
        if name == "sums":
            return self.sharded(kind, 2) > 1, self.resident(kind, "gradients")
        if name in ("staged_weights", "staged_gradients"):
            return False, False
        use, recompute = name.split(".")
        moved = use != "again"
        impossible = not kind.stores_activations or (moved and self.interleaved)
        return False, impossible or Recompute(recompute) not in self.graph.recomputes

    def streamed(self, kind: LayerKind) -> Linear:
        """Layers' worth of optimizer state in host memory that passes through the GPU.

        Of layers that Muon updates all of it does.
        """
        if kind.orthogonalised:
            return self.tensor(kind, "optimizer", Tier.HOST)
        has_state = self.graph.sizes.state and not kind.frozen
        return var(f"{self.name}.{kind.name}.streamed") if has_state else Linear()

    def decisions(self, kind: LayerKind) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """Layers of the kind, or their worth of state, by where a KindPlacement has them."""
        for tensor, tier in product(TENSORS, Tier):
            yield (tensor, tier), self.tensor(kind, tensor, tier)
        for recompute, tier in product(Recompute, Tier):
            yield ("activations", recompute, tier), self.policy(kind, recompute, tier)
        yield ("streamed",), self.streamed(kind)

    def in_gradients(self, kind: LayerKind, recompute: Recompute) -> Linear:
        """Layers with this policy whose activations lie in gradients' place in host memory."""
        moved = self.policy(kind, recompute, Tier.HOST).terms
        gradients = self.tensor(kind, "gradients", Tier.HOST).terms
        if self.graph.units > 1 or not moved or not gradients:
            return Linear()
        return var(f"{self.name}.{kind.name}.in_gradients.{recompute}")

    def stays(self, kind: LayerKind, recompute: Recompute) -> Linear:
        """Whether activations of a layer with this policy stay in their ring and need no home."""
        if not self.policy(kind, recompute, Tier.HOST).terms or not self._rings_hold_a_layer:
            return Linear()
        return var(f"{self.name}.{kind.name}.stays.{recompute}")

    @property
    def _rings_hold_a_layer(self) -> bool:
        """Whether a ring holds a whole layer, whose backward may follow its forward."""
        group, units = self.graph.strategy.accumulation_group, self.graph.in_flight_units
        return self.most.slots >= group and units(self.stages[0]) == 1

    def others_on_gpu(self, kind: LayerKind, tensor: str) -> Linear:
        """Layers' worth of rows with `tensor` on the GPU, but not their optimizer state."""
        if kind.frozen:
            return Linear()
        return self.tensor(kind, tensor, Tier.GPU) - self.tensor(kind, "optimizer", Tier.GPU)


def stage_classes(
    graph: Graph, most: Rings = ROOMY, least: Rings | None = None
) -> tuple[StageClass, ...]:
    """The classes of the graph's pipeline: all, or first, those in the middle, and last."""
    strategy = graph.strategy
    return tuple(
        StageClass(name, graph, stages, counts, opening, most, least or most)
        for name, stages, counts, opening in _alike(graph.layers, strategy.cut, strategy.pp)
    )


Counts = tuple[tuple[str, int], ...]


@lru_cache(maxsize=1024)  # strategies that cut the model alike are bounded one after the other
def _alike(
    layers: tuple[str, ...], cut: Cut, pp: int
) -> tuple[tuple[str, range, Counts, Counts], ...]:
    """Each class by name: its stages, its layers of each kind, and those of its first chunk."""
    chunks = chunk_layers(layers, cut)
    if pp == 1:
        ranges = {"all": range(1)}
    else:
        between = _between(layers, chunks, pp)
        ranges = {"first": range(1), **between, "last": range(pp - 1, pp)}
    return tuple(
        (
            name,
            stages,
            _counted(layers[i] for chunk in chunks[stages[0] :: pp] for i in chunk),
            _runs(layers[i] for i in chunks[stages[0]]),
        )
        for name, stages in ranges.items()
        if stages
    )


def _between(layers: tuple[str, ...], chunks: Sequence[range], pp: int) -> dict[str, range]:
    """Neighbours among the inner stages that have the same kinds of layers in order, by name.

    Those before the last may have a block more, and first ones kinds of blocks of their own.
    """

    def order(stage: int) -> list[Counts]:
        return [_runs(layers[i] for i in chunk) for chunk in chunks[stage::pp]]

    found, start = {}, 1
    for number, (_, stages) in enumerate(groupby(range(1, pp - 1), order)):
        stop = start + len(list(stages))
        found["middle" if number == 0 else "late" if number == 1 else f"late{number}"] = range(
            start, stop
        )
        start = stop
    return found


def _counted(layers: Iterable[str]) -> Counts:
    return tuple(Counter(layers).items())


def _runs(layers: Iterable[str]) -> Counts:
    return tuple((kind, len([*alike])) for kind, alike in groupby(layers))


RERUN = tuple(recompute for recompute in Recompute if recompute is not Recompute.NONE)
SWITCHES = (
    *("slots", "shards", "sums", "staged_weights", "staged_gradients"),
    *(f"again.{recompute}" for recompute in RERUN),
    *(f"{name}.{recompute}" for name in ("passing", "on_disk") for recompute in Recompute),
)


# Rings that time rows count on, used by whole layers. Staging is also used by parts of layers.
HOLD_LAYERS = ("slots", "passing", "on_disk")
PASSING = ("state_chunks", "streaming")  # rings of state: from NVMe, and through the GPU


def variables(stage: StageClass) -> Iterator[Variable]:
    """Counts (integers), optimizer shares (continuous) and switches of a class."""
    for kind, count in stage.kinds:
        for tensor, tier in product(TENSORS, Tier):
            whole = tensor != "optimizer" or bool(kind.orthogonalised)
            yield from _decided(stage.tensor(kind, tensor, tier), count, whole)
        if not kind.orthogonalised:
            yield from _decided(stage.streamed(kind), count, integer=False)
        yield from _decided(stage.looked_up(kind), count)
        for recompute, tier in product(Recompute, Tier):
            yield from _decided(stage.policy(kind, recompute, tier), count)
        for recompute in Recompute:
            yield from _decided(stage.in_gradients(kind, recompute), count, integer=False)
            yield from _decided(stage.stays(kind, recompute), 1, integer=False)
        for name in SWITCHES:
            yield from _decided(stage.switch(kind, name), 1)
    for name in PASSING:
        yield from _decided(stage.switch(None, name), 1)


def _decided(expression: Linear, upper: int, integer: bool = True) -> Iterator[Variable]:
    """The expression's variable, if it has one."""
    return (Variable(name, upper, integer) for name in expression.terms)


def placement_rules(stage: StageClass) -> Iterator[Rule]:
    """Every layer's tensors are placed once."""
    for kind, count in stage.kinds:
        where = f"{stage.name}.{kind.name}"
        for tensor in tensors_of(kind):
            if not stage.resident(kind, tensor):
                placed = total([stage.tensor(kind, tensor, tier) for tier in Tier])
                yield Rule(f"{where}: place {tensor} once", placed - count, equal=True)
        if kind.stores_activations:
            policies = total([stage.keeping(kind, recompute) for recompute in Recompute])
            yield Rule(f"{where}: keep activations one way", policies - count, equal=True)
        on_gpu = stage.tensor(kind, "optimizer", Tier.GPU)
        for tensor in () if kind.frozen else ("parameters", "gradients"):
            if not stage.resident(kind, tensor):
                limit = stage.tensor(kind, tensor, Tier.GPU)
                yield Rule(f"{where}: the GPU updates rows whose {tensor} it has", on_gpu - limit)
        yield from _streaming_rules(stage, kind, count)
        yield from _look_up_rules(stage, kind, count)
        yield from _no_home_rules(stage, kind)


def _streaming_rules(stage: StageClass, kind: LayerKind, count: int) -> Iterator[Rule]:
    """Streamed state is in host memory, and only of layers with nothing else on NVMe."""
    where, streamed = f"{stage.name}.{kind.name}", stage.streamed(kind)
    if not streamed.terms:
        return
    on_gpu, on_host = (stage.tensor(kind, "optimizer", t) for t in (Tier.GPU, Tier.HOST))
    yield Rule(f"{where}: streamed state is in host memory", streamed - on_host)
    for tensor in ("parameters", "gradients"):
        on_disk = stage.tensor(kind, tensor, Tier.NVME)
        if on_disk.terms:
            rule = f"{where}: streamed rows have their {tensor} in memory"
            yield Rule(rule, streamed + on_gpu + on_disk - count)


def _look_up_rules(stage: StageClass, kind: LayerKind, count: int) -> Iterator[Rule]:
    """Rows are looked up exactly if parameters and gradients, if any, are in host memory."""
    where, looked_up = f"{stage.name}.{kind.name}", stage.looked_up(kind)
    if not looked_up.terms:
        return
    tensors = (tensor for tensor in tensors_of(kind) if tensor != "optimizer")
    homes = [stage.tensor(kind, tensor, Tier.HOST) for tensor in tensors]
    for home in homes:
        yield Rule(f"{where}: looked up in host memory", looked_up - home)
    others = float(count * (len(homes) - 1))
    yield Rule(f"{where}: looked up where it can be", total(homes) - others - looked_up)


def _no_home_rules(stage: StageClass, kind: LayerKind) -> Iterator[Rule]:
    """Activations in host memory lie in the place of gradients there; one layer's need no place.

    That layer's stay in their ring; its gradients may be in host memory.
    """
    where, every = f"{stage.name}.{kind.name}", list[Linear]()
    for recompute in stage.graph.recomputes:
        shared, stays = stage.in_gradients(kind, recompute), stage.stays(kind, recompute)
        every += [shared, stays] if shared.terms else []
        if (shared + stays).terms:
            moved = stage.policy(kind, recompute, Tier.HOST)
            yield Rule(f"{where}: {recompute} without a home", shared + stays - moved)
        if stays.terms:
            on_disk = stage.switch(kind, f"on_disk.{recompute}")
            yield Rule(f"{where}: {recompute} stays in its ring", stays + on_disk - 1.0)
    if every:
        gradients = stage.tensor(kind, "gradients", Tier.HOST)
        yield Rule(f"{where}: in place of gradients", total(every) - gradients)


def switch_rules(stage: StageClass) -> Iterator[Rule]:
    """A ring or staging area exists where a layer needs it."""
    for kind, count in stage.kinds:
        for name, used in _needs(stage, kind):
            switch = stage.switch(kind, name)
            if switch.terms:
                rule = f"{stage.name}.{kind.name}: {name} exist where used"
                yield Rule(rule, used - count * switch)
    layers = sum(count for _, count in stage.counts)
    on_disk = [stage.tensor(kind, "optimizer", Tier.NVME) for kind, _ in stage.kinds]
    streamed = [stage.streamed(kind) for kind, _ in stage.kinds]
    for name, users in zip(PASSING, (on_disk, streamed), strict=True):
        used = total(users) - layers * stage.switch(None, name)
        yield Rule(f"{stage.name}: {name} exist where used", used)


def unused_rules(stage: StageClass) -> Iterator[Rule]:
    """No ring through which whole layers pass exists where none does.

    Time rows leave out what rings may hold when a pass starts. So an empty ring would look like
    time gained: one for 4 micro-batches' activations took 8 s off a step of 44.
    """
    for kind, _ in stage.kinds:
        for name, used in _needs(stage, kind):
            switch = stage.switch(kind, name)
            if switch.terms and name.split(".")[0] in HOLD_LAYERS:
                rule = f"{stage.name}.{kind.name}: {name} exist only where used"
                yield Rule(rule, switch - used)


def _needs(stage: StageClass, kind: LayerKind) -> Iterator[tuple[str, Linear]]:
    """What of a kind uses each of its switches."""
    yield "slots", stage.passing(kind, "parameters")
    yield "shards", stage.passing(kind, "parameters")
    yield "sums", stage.passing(kind, "gradients")
    on_disk = stage.tensor(kind, "parameters", Tier.NVME)
    by_cpu = Linear() if kind.orthogonalised else stage.others_on_gpu(kind, "parameters")
    yield "staged_weights", on_disk + by_cpu
    added = stage.tensor(kind, "gradients", Tier.HOST) - stage.looked_up(kind)
    added = added if stage.graph.units > 1 else Linear()
    on_disk = stage.tensor(kind, "gradients", Tier.NVME)
    by_cpu = Linear() if kind.orthogonalised else stage.others_on_gpu(kind, "gradients")
    yield "staged_gradients", on_disk + by_cpu + added
    for recompute in Recompute:
        on_disk = stage.policy(kind, recompute, Tier.NVME)
        yield f"passing.{recompute}", on_disk + stage.policy(kind, recompute, Tier.HOST)
        yield f"on_disk.{recompute}", on_disk
        if recompute in RERUN:
            yield f"again.{recompute}", stage.keeping(kind, recompute)
