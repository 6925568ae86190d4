"""Exact search for small problems: placements in the order of their bounds.

The bound of a placement is the model's step for it, which is below its simulated step. The search
ends when the next bound is no better than the best simulation: no later placement can be faster.
Optimizer state is split in quarters of what fits, and streamed state in halves; the answer is exact
on that grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import comb, prod
from typing import TypeVar

from bigplan.errors import InputError
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, Rings, StagePlacement, Tier
from bigplan.solve.candidate import Candidate, Placed, Trial, Workload, try_out, verified
from bigplan.solve.decisions import Consequences
from bigplan.solve.formulation import WEAR
from bigplan.solve.linear import Linear
from bigplan.solve.pins import Pin, pin_rules, rings_tried
from bigplan.solve.resolve import problem_of
from bigplan.solve.search import Choice, Found, Scope, Watch, unwatched
from bigplan.solve.shortage import infeasible
from bigplan.solve.stage import StageClass, placement_rules, stage_classes

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
HALVES = (0.0, 0.5, 1.0)
MOST_PLACEMENTS = 200_000  # per strategy: bounding takes about 0.3 ms each


def exact_search(workload: Workload, scope: Scope, watch: Watch = unwatched) -> Found:
    """The fastest plan in simulation of all strategies and placements in scope.

    It has no answer before its end, so it raises InputError if `watch` stops it.
    """
    every = Choice.of(workload, scope).candidates()
    placed: list[Placed] = []
    for number, candidate in enumerate(every):
        if not watch(min((p.seconds for p in placed), default=None), 0.0, len(every) - number):
            raise InputError("stopped: --exact has no plan before its end; leave it out")
        found = exact_placement(candidate, scope.pins)
        placed += [found] if found is not None else []
    if not placed:
        raise infeasible(workload, every, scope.pins)
    rivals = sorted(placed, key=lambda p: (p.seconds, str(p.candidate.strategy)))
    best = rivals[0].seconds
    return Found(
        best=rivals[0],
        rivals=tuple(rivals[1:]),
        model_seconds=best,
        bound=best,
        strategies=len(every),
        relaxations=0,
        programs=len(every),
    )


def exact_placement(candidate: Candidate, pins: tuple[Pin, ...] = ()) -> Placed | None:
    """The candidate's fastest placement in simulation; None where none fits."""
    for rings in rings_tried(pins):  # fewer only where more fit nowhere
        if (found := _exact_placement(candidate, pins, rings)) is not None:
            return found
    return None


def _exact_placement(candidate: Candidate, pins: tuple[Pin, ...], rings: Rings) -> Placed | None:
    problem = problem_of(candidate, pins, rings)
    limits = [rule for rule in problem.rules if rule.name.endswith(WEAR)]
    follows = Consequences.of(stage_classes(candidate.graph, rings))
    bounded: list[tuple[float, int, Placement]] = []
    for every in placements(candidate.graph, pins):
        placement = every.model_copy(update=rings._asdict())
        values = follows.decisions(placement)
        if all(rule.expression.at(values) <= 0 for rule in limits):
            bounded.append((problem.step_seconds(values), len(bounded), placement))
    best: Trial | None = None
    for bound, _, placement in sorted(bounded, key=lambda item: item[:2]):
        if best is not None and bound >= best.seconds:
            break
        trial = try_out(candidate, placement)
        if trial is not None and (best is None or trial.seconds < best.seconds):
            best = trial
    return None if best is None else verified(best)


def placements(graph: Graph, pins: tuple[Pin, ...] = ()) -> Iterator[Placement]:
    """Every placement by counts that keeps the pins, optimizer state on a grid.

    Raises InputError where there are too many.
    """
    stages = stage_classes(graph)
    choices = [_Choices.of(stage, kind, n, pins) for stage in stages for kind, n in stage.kinds]
    number = prod(each.number for each in choices)
    if number > MOST_PLACEMENTS:
        raise InputError(
            f"--exact would try {number} placements per strategy; it is for small problems of at "
            f"most {MOST_PLACEMENTS}: pin more decisions with --set, or leave it out"
        )
    for chosen in product(*(list(each.placements()) for each in choices)):
        yield _placement(stages, iter(chosen))


def _placement(stages: tuple[StageClass, ...], chosen: Iterator[KindPlacement]) -> Placement:
    every: list[StagePlacement] = []
    for stage in stages:
        kinds = {kind.name: next(chosen) for kind, _ in stage.kinds}
        every += [StagePlacement(kinds=kinds)] * len(stage.stages)
    return Placement(stages=tuple(every))


Counts = tuple[float, ...]  # layers, by tier or by policy


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the rules leave to choose for the layers of a kind in a class of stages."""

    layers: int
    parameters: list[Counts]
    gradients: list[Counts]
    policies: list[Counts]
    optimizer: list[list[Counts]]  # by the number of layers that the GPU may update
    streamed: Callable[[float], bool]  # whether so many layers' state may pass through the GPU

    @classmethod
    def of(cls, stage: StageClass, kind: LayerKind, count: int, pins: tuple[Pin, ...]) -> _Choices:
        """The counts of each tensor that keep the rules about it alone."""
        rules = (*placement_rules(stage), *pin_rules(stage, pins))

        def kept(decisions: list[Linear], every: Iterable[Counts]) -> list[Counts]:
            names = {name for decision in decisions for name in decision.terms}
            own = [r for r in rules if r.expression.terms and set(r.expression.terms) <= names]
            found = ((c, dict(_values(decisions, c))) for c in every if _are(decisions, c))
            return [c for c, values in found if all(rule.holds(values) for rule in own)]

        def tensor(name: str, every: Iterable[Counts]) -> list[Counts]:
            return kept([stage.tensor(kind, name, tier) for tier in Tier], every)

        policies = [stage.policy(kind, recompute, tier) for recompute in Recompute for tier in Tier]
        return cls(
            layers=count,
            parameters=tensor("parameters", _compositions(count, len(Tier))),
            gradients=tensor("gradients", _compositions(count, len(Tier))),
            policies=kept(policies, _compositions(count, len(policies))),
            optimizer=[tensor("optimizer", _shares(count, most)) for most in range(count + 1)],
            streamed=lambda layers: bool(kept([stage.streamed(kind)], [(layers,)])),
        )

    @property
    def number(self) -> int:
        """How many placements these are."""
        tiers = product(self.parameters, self.gradients)
        return len(self.policies) * sum(len(list(self._state(p, g))) for p, g in tiers)

    def placements(self) -> Iterator[KindPlacement]:
        """Each of them."""
        for parameters, gradients, policy in product(
            self.parameters, self.gradients, self.policies
        ):
            for optimizer, streamed in self._state(parameters, gradients):
                yield KindPlacement(
                    layers=self.layers,
                    parameters=_by_tier(parameters, int),
                    gradients=_by_tier(gradients, int),
                    activations={
                        recompute: _by_tier(policy[i * len(Tier) : (i + 1) * len(Tier)], int)
                        for i, recompute in enumerate(Recompute)
                    },
                    optimizer=_by_tier(optimizer, float),
                    streamed=streamed,
                )

    def _state(self, parameters: Counts, gradients: Counts) -> Iterator[tuple[Counts, float]]:
        """Where the optimizer state may be, and how much of it is streamed."""
        in_memory = self.layers - max(parameters[-1], gradients[-1])
        for optimizer in self.optimizer[int(min(parameters[0], gradients[0]))]:
            on_gpu, on_host, _ = optimizer
            most = max(0.0, min(on_host, in_memory - on_gpu))
            for streamed in sorted({half * most for half in HALVES}):
                if self.streamed(streamed):
                    yield optimizer, streamed


Number = TypeVar("Number", int, float)


def _by_tier(counts: Counts, number: Callable[[float], Number]) -> dict[Tier, Number]:
    return {tier: number(count) for tier, count in zip(Tier, counts, strict=True)}


def _are(decisions: Iterable[Linear], counts: Counts) -> bool:
    """Whether what leaves no choice has the value it must have."""
    both = zip(decisions, counts, strict=True)
    return all(decision.terms or decision.constant == count for decision, count in both)


def _values(decisions: Iterable[Linear], counts: Counts) -> Iterator[tuple[str, float]]:
    both = zip(decisions, counts, strict=True)
    return ((name, count) for decision, count in both for name in decision.terms)


def _shares(layers: int, on_gpu: int) -> Iterator[Counts]:
    """Layers of optimizer state by tier, the GPU's at most `on_gpu`."""
    for gpu, host in product(sorted({q * on_gpu for q in QUARTERS}), QUARTERS):
        rest = layers - gpu
        if rest or host == QUARTERS[0]:
            yield gpu, rest * host, rest * (1.0 - host)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to split `total` layers. Raises InputError where there are too many."""
    number = comb(total + parts - 1, parts - 1)
    if number > MOST_PLACEMENTS:
        raise InputError(
            f"--exact would try {number} ways to place {total} layers' activations alone; it is "
            f"for small problems of at most {MOST_PLACEMENTS} placements per strategy"
        )
    if parts == 1:
        yield (total,)
        return
    for first in range(total, -1, -1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
