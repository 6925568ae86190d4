"""A candidate's integer programs solved, and what becomes of their plans."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from bigplan.placement import Placement, Rings
from bigplan.solve.alike import ROOMY
from bigplan.solve.bounds import Outlook
from bigplan.solve.candidate import Candidate, Trial, try_out
from bigplan.solve.formulation import formulate, placement_of
from bigplan.solve.ilp import BOUND_GAP, solve
from bigplan.solve.linear import Problem
from bigplan.solve.pins import Pin, rings_tried
from bigplan.solve.relaxation import relaxed_steps

# Surcharges on serial transfer seconds. Perfect overlap makes moving look free; the first is about
# what simulations come to, so it also ranks strategies: of 22 plans for one to eight GPUs, a tenth
# gave slower ones than a fifth in seven, by 9% at most, and faster ones in four, by 1.7% at most.
# The second is tried too: by a fifth, a GiB of activations there and back costs 8 ms on an H200
# and spares 7.
SURCHARGES = (0.2, 0.05)
MARGIN = 1e-3  # of each tier, kept free for what rounding to whole rows and pages adds
MARGINS = (MARGIN, 10 * MARGIN)  # the second where the first is not enough


def model_outlook(problem: Problem, below: float) -> Outlook:
    """Bound and estimate from linear programs, infinite where nothing fits.

    A bound that is not below `below` seconds needs no estimate, and is its own.
    """
    steps = relaxed_steps(problem, (0.0, SURCHARGES[0]))
    bound = next(steps)
    return Outlook(bound, bound if bound >= below else next(steps))


def resolve(
    candidate: Candidate,
    ways: Iterable[tuple[float, Rings]],
    pins: tuple[Pin, ...],
    best: Trial | None = None,
    below: float = inf,
) -> Trial | None:
    """The best plan of several surcharges and rings, and `best`; None where none fits.

    Plans that the model puts above `below` seconds, or above the best so far, are not tried.
    """
    for rho, rings in ways:
        problem = problem_of(candidate, pins, rings)
        for margin in MARGINS:
            most = min(below, best.seconds) if best else below
            solution = solve(problem, rho, margin=margin, below=most)
            if solution is None:
                break
            placement = placement_of(candidate.graph, solution.values, rings)
            if best and _same_but_loss(placement, best.placement):
                break
            trial = try_out(candidate, placement)
            if trial is not None:
                best = trial if best is None or trial.expected < best.expected else best
                break
    return best


def _same_but_loss(one: Placement, other: Placement) -> bool:
    """Equal, whatever is left of the GPU for the loss."""
    return one == other.model_copy(update={"loss_chunk": one.loss_chunk})


def optimum(problem: Problem) -> float:
    """The integer optimum's step, below every plan; infinite where nothing fits."""
    solution = solve(problem, gap=BOUND_GAP)
    return inf if solution is None else solution.step_seconds * (1 - BOUND_GAP)


def problem_of(candidate: Candidate, pins: tuple[Pin, ...], rings: Rings = ROOMY) -> Problem:
    """The candidate's integer program for plans with these rings."""
    return formulate(candidate.graph, candidate.costs, pins, rings)


def bounding_problem(candidate: Candidate, pins: tuple[Pin, ...]) -> Problem:
    """The integer program whose optimum is below every plan, whatever its rings."""
    tried = rings_tried(pins)
    return formulate(candidate.graph, candidate.costs, pins, tried[0], tried[-1])
