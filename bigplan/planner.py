"""From what the user wants to a plan: search, then write down decision, promise and provenance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bigplan.engines import executable, native_refusal
from bigplan.graph.build import build_graph, model_flops
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.placement import Tier
from bigplan.plan import (
    Alternative,
    MemoryUse,
    Plan,
    Predicted,
    SearchRecord,
    digest,
)
from bigplan.program import Program
from bigplan.simulate import simulate
from bigplan.solve.candidate import Candidate, Workload, problem_of
from bigplan.solve.decisions import decisions_of
from bigplan.solve.exact import exact_search
from bigplan.solve.ilp import solver_name
from bigplan.solve.pins import parse_pins
from bigplan.solve.search import Found, Scope, search
from bigplan.spec.cluster import Cluster
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan: resolved descriptions and the user's decisions."""

    model: ModelSpec
    training: Training
    cluster: Cluster  # with the wanted number of nodes and caps applied
    settings: Mapping[str, str | int | float] = field(default_factory=dict)  # --set
    engine: str = "any"
    exact: bool = False


def make_plan(request: Request) -> Plan:
    """Search and write down. Raises InputError, RefusedError, InfeasibleError."""
    fixed, pins = parse_pins(request.settings)
    workload = Workload(request.model, request.training, request.cluster.group)

    def allowed(strategy: Strategy) -> bool:
        length = request.training.sequence_length
        return request.engine == "any" or native_refusal(request.model, strategy, length) is None

    scope = Scope(fixed, pins, allowed)
    found = (exact_search if request.exact else search)(workload, scope)
    best = found.best
    return Plan(
        inputs={name: digest(getattr(request, name)) for name in ("model", "training", "cluster")},
        predicted=predict(found, workload),
        strategy=best.candidate.strategy,
        placement=best.placement,
        executable=executable(
            request.model, best.candidate.strategy, request.training.sequence_length
        ),
        search=SearchRecord(
            solver=solver_name(),
            strategies=found.strategies,
            relaxations=found.relaxations,
            programs=found.programs,
        ),
        alternatives=tuple(_alternatives(found)),
        model=request.model,
        training=request.training,
        cluster=request.cluster,
    )


def predict(found: Found, workload: Workload) -> Predicted:
    """The promise of the best plan found."""
    best, tokens = found.best, workload.training.tokens_per_step
    seconds, flops = best.seconds, model_flops(workload.model, workload.training)
    peak = workload.nodes.gpus * workload.nodes.gpu.peak(workload.training.precision)
    candidate = best.candidate
    problem = problem_of(candidate, ())
    overlapped = problem.step_seconds(decisions_of(candidate.graph, best.placement))
    busy = best.timeline.busy()
    return Predicted(
        step_seconds=seconds,
        step_seconds_low=min(overlapped, seconds),
        step_seconds_high=max(seconds, _serial_seconds(best.timeline)),
        tokens_per_second=tokens / seconds,
        mfu=flops / seconds / peak,
        lower_bound_seconds=found.bound,
        model_gap=found.model_gap,
        simulated_gap=found.simulated_gap,
        bottleneck=max(busy, key=lambda lane: busy[lane]),
        busy_seconds=busy,
        op_seconds=best.timeline.total_by(lambda event: event.op),
        memory=tuple(memory_use(best.programs, candidate)),
    )


def _serial_seconds(timeline: Timeline) -> float:
    """The slowest stage with nothing overlapped."""
    return max(timeline.total_by(lambda event: str(event.stage)).values(), default=0.0)


def memory_use(programs: tuple[Program, ...], candidate: Candidate) -> Iterator[MemoryUse]:
    """Bytes by stage and tier, as the program allocates them."""
    for program in programs:
        for tier in Tier:
            scale = 1 if tier is Tier.GPU else candidate.costs.ranks_per_node
            purposes: dict[str, int] = defaultdict(int)
            for buffer in program.buffers.values():
                if buffer.tier is tier:
                    purposes[buffer.purpose] += buffer.total * scale
            yield MemoryUse(
                stage=program.stage,
                tier=tier,
                scope="gpu" if tier is Tier.GPU else "node",
                used_bytes=sum(purposes.values()),
                capacity_bytes=candidate.costs.capacity[tier],
                by_purpose={name: n for name, n in sorted(purposes.items()) if n},
            )


def _alternatives(found: Found) -> Iterator[Alternative]:
    seen: set[Strategy] = {found.best.candidate.strategy}
    for rival in found.rivals:
        strategy = rival.candidate.strategy
        if strategy not in seen:
            seen.add(strategy)
            busy = rival.busy
            yield Alternative(
                strategy=strategy,
                step_seconds=rival.seconds,
                bottleneck=max(busy, key=lambda lane: busy[lane]),
            )


def programs_of(plan: Plan) -> tuple[Candidate, tuple[Program, ...]]:
    """The plan lowered again: graph and prices, and one program per stage."""
    workload = Workload(plan.model, plan.training, plan.cluster.group)
    candidate = Candidate.of(workload, plan.strategy)
    return candidate, lower(build_graph(plan.model, plan.training, plan.strategy), plan.placement)


def simulate_plan(plan: Plan) -> Timeline:
    """The plan's steady step, played again."""
    candidate, programs = programs_of(plan)
    return simulate(programs, candidate.graph, candidate.costs)
