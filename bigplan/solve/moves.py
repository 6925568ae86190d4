"""Neighbours of a plan: a few of its decisions are changed, and all others follow.

Decisions are the variables of the strategy's integer program. Its rules say which of them belong
together: a move takes layers from one place of a tensor to another, or from one way to keep
activations to another. So the integer program alone judges a neighbour: rules and memory rows say
whether it is legal, and time rows say how fast it can be at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from random import Random

from bigplan.placement import Placement, Rings, Tier
from bigplan.solve.candidate import Candidate
from bigplan.solve.decisions import Consequences, Values, decisions_of
from bigplan.solve.formulation import placement_of
from bigplan.solve.linear import EXACT, Linear
from bigplan.solve.pins import Pin
from bigplan.solve.resolve import problem_of
from bigplan.solve.stage import StageClass, placement_rules, stage_classes
from bigplan.solve.thresholds import NOISE

# Shares of the streamed state that a plan keeps, tried while it becomes faster. Chunks and other
# copies wait for each other on the link. The rows do not know this, so the integer program streams
# too much.
LESS = 0.85
# How many changes a move makes, and how many layers (or which part of their state) each one moves.
CHANGES, LAYERS, PARTS = (1, 1, 1, 2, 2, 3), (1, 1, 1, 2, 4, 999), (0.1, 0.25, 0.5, 1.0)
# Of the state in host memory, streamed besides.
ADDED = (-1.0, -0.3, -0.1, -0.05, 0.05, 0.1, 0.3, 1.0)
OF_STREAMED, REFILLED, RAISED = 0.3, 0.8, 0.3  # shares of moves that do it
BELOW = {Tier.GPU: Tier.HOST, Tier.HOST: Tier.NVME}


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A plan beside another by its decisions, with what the model says of it."""

    values: Mapping[str, float]
    seconds: float  # no plan with these decisions is faster
    serial: float  # seconds of moves

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal plans."""
        return tuple(round(value, 5) for value in self.values.values())


@dataclass(frozen=True, slots=True)
class _State:
    """The optimizer state of a kind of layer by tier, and what bounds the GPU's share."""

    tiers: Mapping[Tier, str]
    host: Linear
    streamed: str | None
    homes: tuple[Linear, Linear]  # layers with parameters, with gradients on the GPU

    @classmethod
    def of(cls, stage: StageClass, name: str) -> _State:
        kind = stage.graph.kinds[name]
        tiers = {tier: next(iter(stage.tensor(kind, "optimizer", tier).terms)) for tier in Tier}
        homes = (stage.tensor(kind, tensor, Tier.GPU) for tensor in ("parameters", "gradients"))
        host = stage.tensor(kind, "optimizer", Tier.HOST)
        streamed = next(iter(stage.streamed(kind).terms), None)
        parameters, gradients = homes
        return cls(tiers, host, streamed, (parameters, gradients))

    def shift(self, values: Values, tier: Tier, layers: float) -> float:
        """Bring so many layers' state to `tier` from the one below, or back; how many it were."""
        here, below = self.tiers[tier], self.tiers[BELOW[tier]]
        if tier is Tier.GPU and layers > 0:
            layers = min(layers, self._most(values) - values[here])
        layers = max(-values[here], min(values[below], layers))
        values[here] += layers
        values[below] -= layers
        self.restrain(values)
        return layers

    def restrain(self, values: Values) -> None:
        """The GPU updates rows that it has, and no more streams than is in host memory."""
        gpu, host = self.tiers[Tier.GPU], self.tiers[Tier.HOST]
        if (surplus := values[gpu] - self._most(values)) > 0:
            values[gpu] -= surplus
            values[host] += surplus
        if self.streamed is not None:
            values[self.streamed] = max(0.0, min(values[self.streamed], values[host]))

    def _most(self, values: Values) -> float:
        return max(0.0, min(home.at(values) for home in self.homes))


class Moves:
    """Draws neighbours of a strategy's plans with the same rings, with a fixed seed."""

    def __init__(self, candidate: Candidate, pins: tuple[Pin, ...], rings: Rings, seed: int):
        self._problem = problem = problem_of(candidate, pins, rings)
        self._graph, self._rings = candidate.graph, rings
        self._random, self._excluded = Random(seed), problem.excluded
        self._of: Placement | None = None
        self._values: Values = {}
        stages = stage_classes(candidate.graph, rings)
        self._consequences = Consequences.of(stages)
        # Decisions that add up: where tensors are, how activations are kept.
        adding = (rule for stage in stages for rule in placement_rules(stage) if rule.equal)
        left = ([n for n in rule.expression.terms if n not in self._excluded] for rule in adding)
        self._groups = [names for names in left if len(names) > 1]
        kinds = [(stage, kind) for stage in stages for kind, _ in stage.kinds if not kind.frozen]
        by_muon = [(stage, kind) for stage, kind in kinds if kind.orthogonalised]
        self._whole = {
            name for s, k in by_muon for t in Tier for name in s.tensor(k, "optimizer", t).terms
        }
        states = (_State.of(stage, kind.name) for stage, kind in kinds if not kind.orthogonalised)
        self._states = [s for s in states if self._excluded.isdisjoint(s.host.terms)]

    def placement(self, neighbour: Neighbour) -> Placement:
        """The placement that a neighbour's decisions describe."""
        return placement_of(self._graph, neighbour.values, self._rings)

    def draw(self, placement: Placement, below: float) -> Neighbour | None:
        """A random neighbour; None if it is illegal or cannot be faster than `below` seconds."""
        values = self._values_of(placement)
        self._change(values)
        if self._random.random() < REFILLED:
            self._consequences.complete(values)
            self._refill(values)
        return self._neighbour(values, below)

    def streaming_less(self, placement: Placement, below: float) -> Neighbour | None:
        """The placement with a part less streamed; None if it cannot be faster."""
        values = self._values_of(placement)
        names = [s.streamed for s in self._states if s.streamed is not None]
        for name in names:
            values[name] *= LESS
        if not any(values[name] > EXACT for name in names):
            return None
        return self._neighbour(values, below)

    def _neighbour(self, values: Values, below: float) -> Neighbour | None:
        self._consequences.complete(values)
        if not self._allows(values):
            return None
        seconds = self._problem.step_seconds(values)
        if seconds >= below:
            return None
        return Neighbour(values, seconds, self._problem.serial.at(values))

    def _allows(self, values: Values) -> bool:
        """Whether decisions keep all rules and fit into all memories."""
        problem = self._problem
        if any(values.get(name, 0.0) > EXACT for name in self._excluded):
            return False
        if not all(rule.holds(values) for rule in problem.rules):
            return False
        return all(row.used.at(values) <= row.limit for row in problem.capacities)

    def _values_of(self, placement: Placement) -> Values:
        """The placement's decisions; those of the last placement are kept."""
        if placement is not self._of:
            self._of, self._values = placement, decisions_of(self._graph, placement)
        return dict(self._values)

    def _change(self, values: Values) -> None:
        draw = self._random
        states = [s for s in self._states if s.streamed is not None]
        # Most streamed state is of the kind that has the most state in host memory.
        streaming = [s for s in states for _ in range(ceil(s.host.at(values)))]
        for _ in range(draw.choice(CHANGES)):
            if streaming and draw.random() < OF_STREAMED:
                state = draw.choice(streaming)
                assert state.streamed is not None
                values[state.streamed] += draw.choice(ADDED) * state.host.at(values)
            elif self._groups:
                names = draw.choice(self._groups)
                source = draw.choice([name for name in names if values[name] > EXACT])
                target = draw.choice([name for name in names if name != source])
                whole = ".optimizer." not in source or source in self._whole
                layers = draw.choice(LAYERS) if whole else draw.choice(PARTS) * values[source]
                layers = min(layers, values[source])
                values[source] -= layers
                values[target] += layers
        for state in self._states:
            state.restrain(values)

    def _refill(self, values: Values) -> None:
        """Share memory out again: layers that do not fit go one tier down, others go up."""
        for row in self._problem.capacities:
            if row.tier not in BELOW:
                continue
            free = row.limit * (1.0 - NOISE) - row.used.at(values)
            if row.tier is Tier.GPU and free > 0 and self._random.random() >= RAISED:
                continue
            states = [s for s in self._states if s.tiers[row.tier] in row.used.terms]
            for state in self._random.sample(states, len(states)):
                here, below = (state.tiers[t] for t in (row.tier, BELOW[row.tier]))
                each = row.used.terms[here] - row.used.terms.get(below, 0.0)
                if each > 0:
                    free -= each * state.shift(values, row.tier, free / each)
