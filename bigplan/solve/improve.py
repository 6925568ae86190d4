"""The best plans of some strategies, improved: a local search in which the simulator decides.

The integer program does not see when an overlapped action is late. So plans that it takes for equal
differ by up to a quarter in simulations. Neighbours are drawn with a fixed seed, and those that the
time rows show to be slower are dropped. Then one neighbour is simulated: the first that is drawn,
or the one among several that the model promises most. The search stays with one of these two ways
while it finds faster plans, then takes the other: the model knows best where drives bind, and leads
nowhere elsewhere. The plan with the least expected step wins. Other rings, more room for the loss,
and layers that all do alike are too far for a climb: integer programs are solved for them before.

The best strategies share half of the simulations. The other half improves the plan that was chosen
among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from bigplan.effort import Effort
from bigplan.placement import Rings, Tier
from bigplan.program import Lane
from bigplan.solve.candidate import Trial, try_out
from bigplan.solve.ilp import relaxed_steps
from bigplan.solve.moves import Moves, Neighbour
from bigplan.solve.pins import Pin, rings_tried, without_drives
from bigplan.solve.resolve import HOPEFUL, problem_of, resolve
from bigplan.solve.thresholds import EXPOSED, NEAR, NOISE, PATIENCE

GAIN = NOISE / 3  # share of a step; a smaller gain is worth no simulation
DRAWN = 100  # neighbours in a row that cannot be faster, after which a climb ends
VARIED = 2  # rings that a plan is solved again with, in each way
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
        self._moves = Moves(trial.candidate, pins, Rings.of(trial.placement), seed)
        self._tried = set[tuple[object, ...]]()
        self._several = False

    def go(self, budget: Budget, sharing: int = 1) -> Trial:
        """The best plan after one of so many parts of the simulations, fewer without progress."""
        simulations, patience = budget.of(self.best) // sharing, budget.patience_with(self.best)
        self._stream_less()
        idle = 0
        for _ in range(simulations):
            neighbour = self._promising(SEVERAL if self._several else 1)
            if neighbour is None or idle == patience:
                break
            idle = 0 if self._try(neighbour) else idle + 1
        return self.best

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

    def _stream_less(self) -> None:
        """Stream less and less of the state, as long as that is faster."""
        while neighbour := self._moves.streaming_less(
            self.best.placement, self.best.expected * (1 - GAIN)
        ):
            if not self._try(neighbour):
                break

    def _promising(self, several: int) -> Neighbour | None:
        """The most promising of several neighbours, if there is any."""
        found = islice(self._drawn(), several)
        return min(found, key=lambda n: n.seconds + EXPOSED * n.serial, default=None)

    def _drawn(self) -> Iterator[Neighbour]:
        below = self.best.expected * (1 - GAIN)
        for _ in range(DRAWN):
            neighbour = self._moves.draw(self.best.placement, below)
            if neighbour is not None and neighbour.key not in self._tried:
                yield neighbour


def improved(trials: Sequence[Trial], pins: tuple[Pin, ...], budget: Budget) -> list[Trial]:
    """The best trials, solved again in other ways and improved by half of the simulations.

    If the best plan moves nothing, none is improved: others would have to gain more by their moves
    than moves are worth. If one gains much, others may gain as much, so those that are as far
    behind the best are improved, too. Of small programs twice as many are, and from further behind,
    by what moves may take: one that was 12% slower came to be 3% faster.
    """
    ranked = sorted(trials, key=lambda trial: trial.expected)
    if not ranked or not ranked[0].moves:
        return []
    few, near = budget.strategies, 1 + NEAR
    if ranked[0].instructions < 2 * SMALL:
        few, near = 2 * few, 1 + EXPOSED
    moving, found = [trial for trial in ranked[:few] if trial.moves], list[Trial]()
    for trial in moving:
        most = near * moving[0].expected
        if trial.expected < most:
            sharing = min(budget.strategies, sum(other.expected < most for other in moving))
            found.append(Climb(_started(trial, pins), pins).go(budget, 2 * sharing))
            near = max(near, trial.expected / found[-1].expected)
    return found


def further(trial: Trial, pins: tuple[Pin, ...], budget: Budget) -> Trial:
    """A plan of the same strategy and pins, improved by the other half."""
    return Climb(trial, pins, seed=1).go(budget, 2) if trial.moves else trial


def _started(trial: Trial, pins: tuple[Pin, ...]) -> Trial:
    """The trial, or a faster plan of its strategy that no climb gets to.

    The trial's integer program had the first rings that fit, the time of the largest chunk of the
    loss and the memory of the smallest. Linear programs judge chunks well and rings poorly, so
    several rings are tried, of small programs more. From some layers' gradients in host memory to
    all of them takes many moves, and each alone is slower. Moves of layers that do alike overlap
    better than the surcharge has it, so there it is small.
    """
    candidate, tried, loss = trial.candidate, rings_tried(pins), trial.candidate.loss

    def hope(rings: Rings, alike: tuple[Pin, ...], chunk: int | None) -> float:
        problem = problem_of(candidate, (*pins, *alike), rings, chunk)
        return round(next(relaxed_steps(problem, (EXPOSED,))) / trial.expected, 3)

    present, before = trial.placement.loss_chunk, Rings.of(trial.placement)
    chunks = [c for c in loss.chunks if c >= present] if loss else [None]
    for alike in _alike(trial):
        chunk = min(chunks, key=lambda c: hope(tried[-1], alike, c))  # these leave the most room
        exposed = HOPEFUL if alike else EXPOSED
        hopes = {rings: hope(rings, alike, chunk) for rings in tried}
        if chunk == present and not alike:
            hopes.pop(before, None)
        for rings in sorted(hopes, key=hopes.__getitem__)[: _as_long(VARIED, trial)]:
            below = trial.expected * (1 - GAIN)
            found = resolve(candidate, rings, (*pins, *alike), below, exposed, chunk)
            if found is not None and found.expected < below:
                trial = found
    return trial


def _alike(trial: Trial) -> tuple[tuple[Pin, ...], ...]:
    """Pins by which layers do alike: none, gradients in host memory, activations as most are.

    Small programs are solved and simulated at little cost, so of these also: all parameters with
    their gradients in host memory, the blocks' activations there, and both.
    """
    kept, block = Counter[str](), trial.candidate.graph.layers[-2]
    for stage in trial.placement.stages:
        placed = stage.kinds.get(block)  # a first stage may have blocks of another kind alone
        for how, tiers in placed.activations.items() if placed else ():
            kept.update({f"{how}.{tier}": layers for tier, layers in tiers.items()})
    most = max(kept, key=kept.__getitem__)
    gradients = Pin(None, "gradients", Tier.HOST, None)
    usual = (), (gradients,), (Pin(block, "activations", most, None),)
    if trial.instructions >= 2 * SMALL:
        return usual
    layers = gradients, Pin(None, "parameters", Tier.HOST, None)
    activations = Pin(block, "activations", Tier.HOST, None)
    return *usual, layers, (activations,), (*layers, activations)
