"""Exact search for small problems: placements in the order of their bounds.

The bound of a placement is the model's step for it, which is below its simulated step. The search
ends when the next bound is no better than the best simulation: no later placement can be faster.
Optimizer state is split in quarters of what fits, and streamed state in halves; the answer is exact
on that grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from math import comb, prod

from bigplan.errors import InputError
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.placement import Rings, Tier
from bigplan.solve.candidate import Candidate, Placed, Trial, Workload, try_out, verified
from bigplan.solve.decisions import Consequences, Values
from bigplan.solve.formulation import WEAR, placement_of
from bigplan.solve.linear import Linear, Rule
from bigplan.solve.pins import Pin, pin_rules, rings_tried
from bigplan.solve.resolve import problem_of
from bigplan.solve.search import Choice, Found, Scope, Watch, unwatched
from bigplan.solve.shortage import infeasible
from bigplan.solve.stage import TENSORS, StageClass, placement_rules, stage_classes

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
    stages = stage_classes(candidate.graph, rings)
    follows = Consequences.of(stages)
    bounded: list[tuple[float, int, Sequence[Values]]] = []
    for number, chosen in enumerate(decisions(stages, pins)):
        values = _all(chosen)
        follows.complete(values)
        if all(rule.expression.at(values) <= 0 for rule in limits):
            bounded.append((problem.step_seconds(values), number, chosen))
    best: Trial | None = None
    for bound, _, chosen in sorted(bounded, key=lambda item: item[:2]):
        if best is not None and bound >= best.seconds:
            break
        trial = try_out(candidate, placement_of(candidate.graph, _all(chosen), rings))
        if trial is not None and (best is None or trial.seconds < best.seconds):
            best = trial
    return None if best is None else verified(best)


def _all(chosen: Sequence[Values]) -> Values:
    return dict(chain.from_iterable(values.items() for values in chosen))


def decisions(
    stages: Iterable[StageClass], pins: tuple[Pin, ...] = ()
) -> Iterator[Sequence[Values]]:
    """Every placement that keeps the pins, optimizer state on a grid, as parts of its decisions.

    Raises InputError where there are too many.
    """
    parts: list[list[Values]] = []
    for stage in stages:
        rules = [*placement_rules(stage), *pin_rules(stage, pins)]
        for kind, count in stage.kinds:
            parts += [_policies(stage, kind, count, rules), _tensors(stage, kind, count, rules)]
    _check(prod(len(part) for part in parts))
    return product(*parts)


def _check(number: int) -> None:
    """Raises InputError where there are too many placements."""
    if number > MOST_PLACEMENTS:
        raise InputError(
            f"--exact would try {number} placements per strategy or more; it is for small problems "
            f"of at most {MOST_PLACEMENTS}: pin more decisions with --set, or leave it out"
        )


Counts = tuple[float, ...]  # layers, by tier or by policy


def _policies(stage: StageClass, kind: LayerKind, count: int, rules: list[Rule]) -> list[Values]:
    """Every way to keep the activations of a kind's layers."""
    every = (stage.policy(kind, *policy) for policy in product(Recompute, Tier))
    policies = [policy for policy in every if policy != Linear()]
    return _extended([{}], policies, lambda _: _compositions(count, len(policies)), rules)


def _tensors(stage: StageClass, kind: LayerKind, count: int, rules: list[Rule]) -> list[Values]:
    """Every way to place a kind's parameters and gradients, and on a grid its optimizer state."""
    parameters, gradients, optimizer = (
        [stage.tensor(kind, tensor, tier) for tier in Tier] for tensor in TENSORS
    )
    if kind.frozen:
        return _extended([{}], parameters, lambda _: _compositions(count, len(Tier)), rules)

    def shares(way: Values) -> Iterator[Counts]:
        on_gpu = min(parameters[0].at(way), gradients[0].at(way))
        for gpu, host in product(sorted({q * on_gpu for q in QUARTERS}), QUARTERS):
            rest = count - gpu
            if rest or host == QUARTERS[0]:
                yield gpu, rest * host, rest * (1.0 - host)

    def streamed(way: Values) -> Iterator[Counts]:
        in_memory = count - max(parameters[-1].at(way), gradients[-1].at(way))
        on_gpu, on_host, _ = (share.at(way) for share in optimizer)
        most = max(0.0, min(on_host, in_memory - on_gpu))
        return ((layers,) for layers in sorted({half * most for half in HALVES}))

    ways: list[Values] = [{}]
    for tensor in (parameters, gradients):
        ways = _extended(ways, tensor, lambda _: _compositions(count, len(Tier)), rules)
    ways = _extended(ways, optimizer, shares, rules)
    return _extended(ways, [stage.streamed(kind)], streamed, rules)


def _extended(
    ways: list[Values],
    decisions: list[Linear],
    choices: Callable[[Values], Iterable[Counts]],
    rules: list[Rule],
) -> list[Values]:
    """Each way with each of its choices that keeps the rules about what is decided by then."""
    new = {name for decision in decisions for name in decision.terms}
    known = new.union(*ways[:1])
    judging = [
        r for r in rules if r.expression.terms.keys() & new and known.issuperset(r.expression.terms)
    ]
    found = []
    for way in ways:
        for counts in choices(way):
            both = list(zip(decisions, counts, strict=True))
            values = way | {name: count for decision, count in both for name in decision.terms}
            possible = all(decision.at(values) == count for decision, count in both)
            if possible and all(rule.holds(values) for rule in judging):
                found.append(values)
        _check(len(found))
    return found


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
