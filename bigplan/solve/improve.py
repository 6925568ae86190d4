"""The best plans of some strategies, improved: a local search in which the simulator decides.

The integer program does not see when an overlapped action is late. So plans that it takes for equal
differ by up to a quarter in simulations. Neighbours are drawn with a fixed seed, and those that the
time rows show to be slower are dropped. Then one neighbour is simulated: the first that is drawn,
or the one among several that the model promises most. The search stays with one of these two ways
while it finds faster plans, then takes the other: the model knows best where drives bind, and leads
nowhere elsewhere. The plan with the least expected step wins. Other rings, and more room for the
loss, are too far for a climb, so integer programs are solved for them before.

The best strategies share half of the simulations. The other half improves the plan that was chosen
among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from bigplan.effort import Effort
from bigplan.placement import Rings, Tier
from bigplan.program import Lane
from bigplan.solve.candidate import Trial, try_out
from bigplan.solve.moves import Moves, Neighbour
from bigplan.solve.pins import Pin, rings_tried, without_drives
from bigplan.solve.resolve import promise, resolve
from bigplan.solve.thresholds import EXPOSED, NEAR, NOISE, PATIENCE

GAIN = NOISE / 3  # share of a step; a smaller gain is worth no simulation
DRAWN = 100  # neighbours in a row that cannot be faster, after which a climb ends
VARIED = 2  # other rings that a plan is solved again with
SMALL = 400  # instructions of a program: simulated in 8 ms, as long as it takes to draw one
SEVERAL = 6  # neighbours of which the most promising is simulated


@dataclass(frozen=True, slots=True)
class Budget:
    """Plans simulated to improve the best strategies' plans, at most.

    Programs of fewer than SMALL instructions count by their time, as a part of one of so many.
    """

    simulations: int
    instructions: int  # of all simulated programs: larger models take longer
    strategies: int  # strategies that share the first half of the simulations
    patience: int  # simulations in a row without progress after which a plan counts as the best

    def of(self, trial: Trial) -> int:
        """Simulations of plans like the trial."""
        most = self.instructions // max(1, trial.instructions)
        return min(_as_long(self.simulations, trial), most)

    def patience_with(self, trial: Trial) -> int:
        """Simulations of plans like the trial, without progress, after which a climb ends."""
        return _as_long(self.patience, trial)


def _as_long(simulations: int, trial: Trial) -> int:
    """Simulations of plans like the trial that take as long as so many of SMALL instructions."""
    return max(simulations, simulations * SMALL // max(1, trial.instructions))


BUDGETS = {
    Effort.USUAL: Budget(48, 110_000, 3, PATIENCE),
    Effort.HIGH: Budget(400, 1_000_000, 8, 10 * PATIENCE),
}


class Climb:
    """A strategy's plan on its way to a better one.

    A plan without drives stays so: they wear out, and the integer program has judged them before.
    """

    def __init__(self, trial: Trial, pins: tuple[Pin, ...], seed: int = 0) -> None:
        if not trial.busy.get(Lane.NVME_WRITE, 0.0):
            pins = (*pins, *without_drives(trial.candidate.graph.kinds))
        self.best = trial
        self._moves = Moves(trial.candidate, pins, rings_tried(pins), seed)
        self._tried = set[tuple[object, ...]]()
        self._several = False

    def go(self, simulations: int, patience: int) -> None:
        """Simulate so many neighbours, fewer where there are none, or without progress."""
        self.stream_less()
        idle = 0
        for _ in range(simulations):
            neighbour = self._promising(SEVERAL if self._several else 1)
            if neighbour is None or idle == patience:
                break
            idle = 0 if self._try(neighbour) else idle + 1

    def _try(self, neighbour: Neighbour) -> bool:
        """Whether it is better, and the best from now on."""
        self._tried.add(neighbour.key)
        below = self.best.expected * (1 - GAIN)
        found = try_out(self.best.candidate, self._moves.placement(neighbour), below)
        if found is None or found.expected >= below:
            self._several = not self._several
            return False
        self.best = found
        return True

    def stream_less(self) -> None:
        """Stream less and less of the state, as long as that is faster."""
        while neighbour := self._moves.streaming_less(
            self.best.placement, self.best.expected * (1 - GAIN)
        ):
            if not self._try(neighbour):
                break

    def _promising(self, several: int) -> Neighbour | None:
        """The most promising of several neighbours, if there is any."""
        found = list[Neighbour]()
        for neighbour in self._drawn():
            found.append(neighbour)
            if len(found) == several:
                break
        return min(found, key=lambda n: n.seconds + EXPOSED * n.serial, default=None)

    def _drawn(self) -> Iterator[Neighbour]:
        below = self.best.expected * (1 - GAIN)
        for _ in range(DRAWN):
            neighbour = self._moves.draw(self.best.placement, below)
            if neighbour is not None and neighbour.key not in self._tried:
                yield neighbour


def improved(trials: Sequence[Trial], pins: tuple[Pin, ...], budget: Budget) -> list[Trial]:
    """The best trials, improved by half of the simulations.

    If the best plan moves nothing, none is improved: others would have to gain more by their moves
    than moves are worth. If one gains much, others may gain as much, so those that are as far
    behind the best are improved, too.
    """
    ranked = sorted(trials, key=_expected)[: budget.strategies]
    moving = [trial for trial in ranked if trial.moves] if ranked and ranked[0].moves else []
    found, near = list[Trial](), 1 + NEAR
    for trial in moving:
        most = near * moving[0].expected
        if trial.expected < most:
            climb = Climb(_varied(trial, pins), pins)
            sharing = sum(other.expected < most for other in moving)
            climb.go(budget.of(climb.best) // (2 * sharing), budget.patience_with(climb.best))
            found.append(climb.best)
            near = max(near, trial.expected / climb.best.expected)
    return found


def further(trial: Trial, pins: tuple[Pin, ...], budget: Budget) -> Trial:
    """A plan of the same strategy and pins, improved by the other half."""
    if not trial.moves:
        return trial
    climb = min((Climb(start, pins, seed=1) for start in _starts(trial, pins)), key=_streamed_less)
    climb.go(budget.of(climb.best) // 2, budget.patience_with(climb.best))
    return climb.best


def _starts(trial: Trial, pins: tuple[Pin, ...]) -> Iterator[Trial]:
    """The trial, and plans that keep activations of all blocks, or all gradients, in one way.

    A climb cannot go from one such plan to another: it takes many moves, and each alone makes the
    plan slower.
    """
    yield trial
    graph, rings = trial.candidate.graph, Rings.of(trial.placement)
    most = (1 + NEAR) * trial.expected
    ways = product(graph.recomputes, (Tier.GPU, Tier.HOST))
    alike = [Pin(graph.layers[1], "activations", f"{how}.{tier}", None) for how, tier in ways]
    if len({tier for tier, part in _gradients(trial) if part}) > 1:
        alike.append(Pin(None, "gradients", Tier.HOST, None))
    for pin in alike:
        found = resolve(trial.candidate, rings, (*pins, pin), below=most)
        if found is not None and found.expected < most:
            yield found


def _gradients(trial: Trial) -> Iterator[tuple[Tier, int]]:
    """Tiers of gradients, with the number of layers there."""
    for stage in trial.placement.stages:
        for kind in stage.kinds.values():
            yield from kind.gradients.items()


def _streamed_less(climb: Climb) -> float:
    climb.stream_less()
    return climb.best.expected


def _varied(trial: Trial, pins: tuple[Pin, ...]) -> Trial:
    """The trial, or a plan with other rings and the chunk of the loss that promise more.

    The trial's integer program had the first rings that fit, the time of the largest chunk and the
    memory of the smallest. Linear programs judge chunks well and rings poorly, so several rings are
    tried, of small programs more.
    """
    candidate, tried, loss = trial.candidate, rings_tried(pins), trial.candidate.loss

    def hope(rings: Rings, chunk: int | None) -> float:
        return round(promise(candidate, rings, pins, chunk) / trial.expected, 3)

    present = trial.placement.loss_chunk
    chunks = [c for c in loss.chunks if c >= present] if loss else [None]
    chunk = min(chunks, key=lambda c: hope(tried[-1], c))  # these leave the most room
    hopes = {rings: hope(rings, chunk) for rings in tried}
    if chunk == present:
        hopes.pop(Rings.of(trial.placement), None)
    for rings in sorted(hopes, key=hopes.__getitem__)[: _as_long(VARIED, trial)]:
        below = trial.expected * (1 - GAIN)
        solved = resolve(candidate, rings, pins, below=below, chunk=chunk)
        if solved is not None and solved.expected < below:
            trial = solved
    return trial


def _expected(trial: Trial) -> float:
    return trial.expected
