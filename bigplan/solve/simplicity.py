"""What a plan does beside computing on the GPU, and plans of the same strategy that do less.

Simulations tell plans apart to about a hundredth, and moves may be late in ways that simulations do
not know. So among plans that usually take at most a hundredth longer, the simplest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bigplan.graph.graph import Recompute
from bigplan.placement import KindPlacement, Placement, Rings, Tier
from bigplan.solve.candidate import Trial
from bigplan.solve.improve import Budget, improved
from bigplan.solve.pins import MOVED, STREAMED, Pin, rings_tried, without_drives
from bigplan.solve.resolve import bounding_problem, model_outlook, planned, resolve
from bigplan.solve.thresholds import NEAR, WITHIN

DRIVE, RECOMPUTE = "drive", "recompute"


def simplest(
    trials: Sequence[Trial], pins: tuple[Pin, ...], budget: Budget
) -> tuple[Trial, tuple[Pin, ...]]:
    """The simplest plan about as fast as the first, with the pins that keep it as simple.

    Mechanisms are forbidden one after the other, all moves first, if that costs next to nothing.
    That is tried for the first plan's strategy. A trial of another strategy is taken if it moves
    nothing. Drives wear out, so plans without them are looked for among all trials' strategies,
    and improved before they are judged.
    """
    most = trials[0].expected * (1 + WITHIN)
    trials = _sharded_plainly(trials, most)
    if DRIVE in mechanisms(trials[0].placement):
        sparing = (*pins, *without_drives(trials[0].candidate.graph.kinds))
        spared = improved(list(_spared(trials, sparing, most)), sparing, budget)
        for trial in sorted(spared, key=lambda t: t.expected)[:1]:
            chosen, forbidden = _simpler(trial, sparing, most)
            if chosen.expected <= most:
                return chosen, forbidden
    chosen, forbidden = _simpler(trials[0], pins, most)
    still = (trial for trial in trials if not trial.moves and trial.expected <= most)
    return (next(still, chosen) if chosen.moves else chosen), forbidden


def _sharded_plainly(trials: Sequence[Trial], most: float) -> Sequence[Trial]:
    """The trials, first one without zero groups that does no more beside and takes `most` s."""
    first = trials[0]
    if not first.candidate.strategy.zero_group:
        return trials
    plain = (trial for trial in trials if not trial.candidate.strategy.zero_group)
    simpler = (t for t in plain if t.expected <= most and complexity(t) < complexity(first))
    found = next(simpler, first)
    return [found, *(trial for trial in trials if trial is not found)]


def _simpler(
    chosen: Trial, forbidden: tuple[Pin, ...], most: float
) -> tuple[Trial, tuple[Pin, ...]]:
    """A plan with fewer mechanisms that takes `most` s at most, and pins that forbid these."""
    for used, without in _ways():
        if used & mechanisms(chosen.placement):
            simpler = _resolved(chosen, (*forbidden, *without), most)
            late = chosen.expected > most
            if simpler is not None and (late or complexity(simpler) < complexity(chosen)):
                chosen, forbidden = simpler, (*forbidden, *without)
    return chosen, forbidden


def complexity(trial: Trial) -> tuple[bool, int, bool]:
    """Whether a plan moves, its mechanisms, and whether drives are one of them.

    Experts that are spread over ranks are a mechanism more, and so are zero groups.
    """
    used, strategy = mechanisms(trial.placement), trial.candidate.strategy
    split = (strategy.ep > 1) + (strategy.zero_group > 0)
    return trial.moves, len(used) + split, DRIVE in used


def mechanisms(placement: Placement) -> frozenset[str]:
    """What a plan does to fit: tensors that it moves, drives, streaming, recomputation."""
    kinds = (kind for stage in placement.stages for kind in stage.kinds.values())
    return frozenset(name for kind in kinds for name in _mechanisms(kind))


def _mechanisms(kind: KindPlacement) -> Iterator[str]:
    placed = (kind.parameters, kind.gradients, kind.optimizer, *kind.activations.values())
    for name, tiers in zip((*MOVED, *MOVED[-1:] * len(placed)), placed, strict=False):
        used = {tier for tier, layers in tiers.items() if layers}
        if used - {Tier.GPU}:
            yield name
        if Tier.NVME in used:
            yield DRIVE
    if kind.streamed:
        yield STREAMED
    if set(kind.activations) - {Recompute.NONE}:
        yield RECOMPUTE


def _ways() -> Iterator[tuple[frozenset[str], tuple[Pin, ...]]]:
    """Mechanisms, and the pins that forbid them."""
    still = {name: Pin(None, name, Tier.GPU, None) for name in MOVED}
    yield frozenset(MOVED), tuple(still.values())
    for name, pin in still.items():
        yield frozenset({name}), (pin,)
    yield frozenset({STREAMED}), (Pin(None, STREAMED, "", 0.0),)
    yield frozenset({RECOMPUTE}), (Pin(None, RECOMPUTE, Recompute.NONE, None),)


def _spared(trials: Sequence[Trial], pins: tuple[Pin, ...], most: float) -> Iterator[Trial]:
    """Plans without drives, of the strategies of trials that are about as fast.

    A trial with drives is solved again with `pins`, which forbid them, if the model sees a plan
    below `most` seconds then.
    """
    for trial in trials:
        if trial.expected > most * (1 + NEAR):
            continue
        if DRIVE not in mechanisms(trial.placement):
            yield trial
            continue
        outlook = model_outlook(bounding_problem(trial.candidate, pins), most)
        if outlook.estimate < most:
            found = planned(trial.candidate, rings_tried(pins), pins)
            if found is not None:
                yield found


def _resolved(trial: Trial, pins: tuple[Pin, ...], most: float) -> Trial | None:
    """A plan of the trial's strategy that keeps the pins and usually takes at most `most` s.

    What moves less may have room for longer rings than the trial.
    """
    for rings in dict.fromkeys((Rings.of(trial.placement), rings_tried(pins)[0])):
        found = resolve(trial.candidate, rings, pins, below=most)
        if found is not None and found.expected <= most:
            return found
    return None
