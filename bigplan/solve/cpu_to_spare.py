"""Plans that are less at the mercy of the CPU's update, and of copies beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from bigplan.placement import KindPlacement, Placement, Rings, StagePlacement, Tier
from bigplan.solve.candidate import Trial, try_out
from bigplan.solve.ilp import GAP
from bigplan.solve.pins import STREAMED, Pin
from bigplan.solve.resolve import SURCHARGES, resolve

# Parts of the CPU's rate beside copies, as measured before, that are reached, and how often. Of 75
# runs the slowest fifth had 0.76 in the middle, the next 0.86, the others 0.95 and more, as hosts
# change; copies to the host beside it had 0.82 to 1.04, in the mean of five runs the same 0.9
# (benchmarks/cpu_reached.py). Up to a hundredth of a step is paid for being ready.
REACHED = ((1.0, 0.6), (0.86, 0.2), (0.76, 0.2))
PREMIUM = 0.01
STREAMED_BESIDES = (-0.1, -0.05, 0.05, 0.1, 0.15, 0.2)  # parts of the state in host memory, to try
STREAMED_LAST = (0.0, 0.25, 0.5, 0.75, 1.0)  # and of the last layer's, which is one


def with_cpu_to_spare(trial: Trial, pins: tuple[Pin, ...]) -> Trial:
    """The trial, or a plan that streams more or less of the state and is less at the CPU's mercy.

    The model lets the CPU's update end just when it must, and lets activations leave beside it as
    fast as alone. So a step is longer where they do not, or where the CPU reaches less than
    measured, as it does beside a machine's neighbours. Taken is what is fastest as a rule, by
    REACHED, of plans that stream more or less and of those made for slower updates and copies.
    """
    pinned = any(pin.tensor == STREAMED for pin in pins)
    if pinned or expected_seconds(trial) < trial.seconds * (1 + GAP):
        return trial
    most = trial.seconds * (1 + PREMIUM)
    besides = [_streaming_more(trial.placement, part) for part in STREAMED_BESIDES]
    ways = [(rho, Rings.of(trial.placement)) for rho in SURCHARGES]
    slower = (trial.candidate.hindered(reached).beside_update() for reached, _ in REACHED)
    resolved = (resolve(candidate, ways, pins) for candidate in slower)
    found = [found.placement for found in resolved if found]
    trial = _fastest_as_a_rule(trial, [*besides, *found], most)
    last = [_streaming_last(trial, part) for part in STREAMED_LAST]
    return _fastest_as_a_rule(trial, last, most)


def _fastest_as_a_rule(trial: Trial, placements: Iterable[Placement], most: float) -> Trial:
    """The trial, or the plan of these that is expected to be faster and promised below `most`."""
    least = expected_seconds(trial)
    tried = (try_out(trial.candidate, p) for p in placements if p != trial.placement)
    for found in [found for found in tried if found and found.seconds < most]:
        if (expected := expected_seconds(found)) < least:
            trial, least = found, expected
    return trial


def expected_seconds(trial: Trial) -> float:
    """The mean of a step's seconds over the rates that the CPU may reach."""
    total = 0.0
    for reached, part in REACHED:
        slower = trial.candidate.hindered(reached)
        found = trial if reached == 1.0 else try_out(slower, trial.placement)
        total += part * (found.seconds if found else inf)
    return total


def _streaming_more(placement: Placement, part: float) -> Placement:
    """The placement with this part of the state in host memory streamed besides, or less."""

    def more(_: str, kind: KindPlacement) -> float:
        return kind.streamed + part * kind.optimizer.get(Tier.HOST, 0.0) if kind.streamed else 0.0

    return _streaming(placement, more)


def _streaming_last(trial: Trial, part: float) -> Placement:
    """The trial's placement with this part of the last layer's state streamed.

    The integer program adds up what a forward moves, and does not see when: that layer is updated
    while the last activations leave, and chunks go before these.
    """

    def streamed(name: str, kind: KindPlacement) -> float:
        return part if name == last else kind.streamed

    last = trial.candidate.graph.layers[-1]
    return _streaming(trial.placement, streamed)


def _streaming(placement: Placement, streamed: Callable[[str, KindPlacement], float]) -> Placement:
    """The placement with so many layers' state of each kind streamed, as far as there is some."""

    def changed(name: str, kind: KindPlacement) -> KindPlacement:
        on_host = kind.optimizer.get(Tier.HOST, 0.0)
        most = min(on_host, kind.layers - kind.on_disk - kind.optimizer.get(Tier.GPU, 0.0))
        return kind.model_copy(update={"streamed": max(0.0, min(streamed(name, kind), most))})

    stages = (
        StagePlacement(kinds={name: changed(name, kind) for name, kind in stage.kinds.items()})
        for stage in placement.stages
    )
    return placement.model_copy(update={"stages": tuple(stages)})
