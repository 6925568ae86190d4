"""A candidate's integer programs solved, and what becomes of their plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from bigplan.placement import Rings
from bigplan.solve.alike import ROOMY
from bigplan.solve.candidate import Candidate, Trial, try_out
from bigplan.solve.formulation import formulate, pinned, placement_of, untimed
from bigplan.solve.ilp import BOUND_GAP, relaxed_steps, solve
from bigplan.solve.linear import Problem
from bigplan.solve.pins import Pin, rings_tried
from bigplan.solve.thresholds import EXPOSED, NOISE, WITHIN

MARGINS = (NOISE, WITHIN)  # of each tier, kept free; the second where the first is not enough
HOPEFUL = EXPOSED / 4  # the surcharge of plans that may move more


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a strategy's step takes: at least, and as simulations will have it."""

    bound: float
    estimate: float


def model_outlook(problem: Problem, below: float) -> Outlook:
    """Bound and estimate from linear programs, infinite where nothing fits.

    A bound that is not below `below` seconds is also the estimate.
    """
    steps = relaxed_steps(problem, (0.0, EXPOSED))
    bound = next(steps)
    return Outlook(bound, bound if bound >= below else next(steps))


def resolve(
    candidate: Candidate,
    rings: Rings,
    pins: tuple[Pin, ...],
    below: float = inf,
    exposed: float = EXPOSED,
    chunk: int | None = None,
) -> Trial | None:
    """The plan with these rings; None if none fits, or none with a step below `below` seconds.

    `exposed`: the share of moves' seconds that the objective adds to the step. `chunk`: tokens for
    which the loss has room; None: for the fewest, at the speed of the most.
    """
    problem = problem_of(candidate, pins, rings, chunk)
    if below < inf and next(relaxed_steps(problem, (0.0,))) >= below:
        return None
    for margin in MARGINS:
        solution = solve(problem, exposed, margin=margin, below=below)
        if solution is None:
            return None
        trial = try_out(candidate, placement_of(candidate.graph, solution.values, rings))
        if trial is not None:
            return trial
    return None


def planned(
    candidate: Candidate, tried: Sequence[Rings], pins: tuple[Pin, ...], best: float = inf
) -> Trial | None:
    """The better of two plans; None where nothing fits.

    Both plans have the first rings with which anything fits. If drives or links bind, a plan that
    moves more may be faster than the one that the usual surcharge finds, so the second plan has a
    smaller surcharge. It is only tried where the model sees it below `best` seconds.
    """
    fitting = ((rings, resolve(candidate, rings, pins)) for rings in tried)
    rings, found = next(((r, trial) for r, trial in fitting if trial), (None, None))
    if rings is None or found is None:
        return None
    hopeful = resolve(candidate, rings, pins, min(best, found.seconds), HOPEFUL)
    return min((hopeful or found, found), key=lambda t: t.expected)


def optimum(candidate: Candidate, pins: tuple[Pin, ...]) -> float:
    """Seconds that no plan of the strategy takes less than; infinite where nothing fits.

    That is the least of linear programs for each of the rings that plans may have, or what an
    integer program for all of them at once says, whose rings are longer in time rows than in memory
    rows. The first says more where nothing but activations moves, the second with state on drives.
    """
    problems = (problem_of(candidate, pins, rings) for rings in rings_tried(pins))
    least = min(next(relaxed_steps(problem, (0.0,))) for problem in problems)
    solution = solve(bounding_problem(candidate, pins), gap=BOUND_GAP)
    if solution is None or not solution.proven:
        return least
    return max(least, solution.step_seconds * (1 - BOUND_GAP))


def problem_of(
    candidate: Candidate,
    pins: tuple[Pin, ...],
    rings: Rings = ROOMY,
    chunk: int | None = None,
    least: Rings | None = None,
) -> Problem:
    """The candidate's integer program for plans with these rings, and room for this chunk.

    `least`: the fewest rings, for a bound over all that lie between.
    """
    known, key = candidate.problems, (pins, rings, chunk, least)
    if key not in known:
        graph, costs = candidate.graph, candidate.costs
        if chunk is not None and candidate.loss is not None:
            graph, costs = candidate.loss.settled(graph, costs, chunk)
        if pins:
            known[key] = pinned(problem_of(candidate, (), *key[1:]), graph, costs, pins)
        else:
            known[key] = formulate(graph, costs, rings, least)
    return known[key]


def bounding_problem(candidate: Candidate, pins: tuple[Pin, ...]) -> Problem:
    """The integer program whose optimum is below every plan, whatever its rings."""
    tried = rings_tried(pins)
    return problem_of(candidate, pins, tried[0], least=tried[-1])


def fits(candidate: Candidate, pins: tuple[Pin, ...]) -> bool:
    """Whether some plan with these pins has room, whatever its rings, parts of layers allowed."""
    tried, graph, costs = rings_tried(pins), candidate.graph, candidate.costs
    problem = pinned(untimed(graph, costs, tried[0], tried[-1]), graph, costs, pins)
    return next(relaxed_steps(problem, (0.0,))) < inf
