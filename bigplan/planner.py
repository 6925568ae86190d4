"""From a request to a plan: search, then write down decisions, predictions and input digests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

from bigplan.capabilities.native import executable, gpu_refusal, native_refusal
from bigplan.capabilities.splits import (
    carried_refusal,
    context_parallel_refusal,
    muon_refusal,
    spread_refusal,
    tensor_parallel_refusal,
    zero_group_refusal,
)
from bigplan.cost import Costs
from bigplan.cost.band import error_band
from bigplan.cost.framework import NATIVE
from bigplan.cost.process import locked_bytes
from bigplan.effort import Effort
from bigplan.errors import InfeasibleError, RefusedError
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower, lower_buffers
from bigplan.pace import GroupStep, pacing, workload_of
from bigplan.parts import PlayedStep, step_parts
from bigplan.placement import Tier
from bigplan.plan import (
    Alternative,
    MemoryUse,
    Plan,
    Predicted,
    SearchRecord,
    digests,
    fullest,
    mfu,
)
from bigplan.program import Lane, Program, counted, resource
from bigplan.simulate import busy_seconds, critical_path, simulate
from bigplan.solve.candidate import Candidate, Placed, Trial, Workload, capacity_beside
from bigplan.solve.decisions import decisions_of
from bigplan.solve.ilp import solver_name
from bigplan.solve.pins import (
    WRITTEN,
    Pin,
    parse_pins,
    refuse_of_launched,
    refuse_of_muon,
    refuse_of_trained,
)
from bigplan.solve.resolve import problem_of
from bigplan.solve.search import Found, Scope, Watch, search, unwatched
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.experiment import Experiment
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline
from bigplan.wear import allowed_bytes, worn_out


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan: model, training and cluster, and the decisions that the user has fixed."""

    model: ModelSpec
    training: Training
    cluster: Cluster  # with the wanted number of nodes and caps applied
    settings: Mapping[str, str | int | float] = field(default_factory=dict)  # fixed by --set
    engine: str = "any"
    exact: bool = False
    effort: Effort = Effort.USUAL
    idling: bool = True  # whether nodes may be left without work
    max_wear: float | None = None  # see Experiment
    told: bool = True  # see Scope
    allowed: Callable[[Strategy], bool] = lambda strategy: True  # of those that the engine executes

    @classmethod
    def of(cls, experiment: Experiment, *, exact: bool = False) -> Request:
        """The experiment with its names looked up. Raises InputError."""
        return cls(
            experiment.model_spec(),
            _described(experiment.resolved_training()),
            experiment.cluster_spec(),
            experiment.set,
            experiment.engine,
            exact,
            max_wear=experiment.max_wear,
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> Request:
        """The request of a plan, for all GPUs that it was asked for, those that are idle too.

        A plan does not say what was pinned, so all decisions are free. One that the native runtime
        cannot execute was asked for whatever executes it.
        """
        planned_only = plan.engine == "native" and plan.executable.get("native") is not True
        engine = "any" if planned_only else plan.engine
        return cls(plan.model, plan.training, _asked(plan), engine=engine)


def _described(training: Training) -> Training:
    """With what its data says of documents that are kept apart."""
    if not training.isolate_documents:
        return training
    from bigplan.data.documents import described

    return described(training)


def _asked(plan: Plan) -> Cluster:
    """The plan's cluster with the nodes, or the GPUs of the only node, that it leaves idle."""
    group, idle = plan.cluster.group, plan.search
    nodes = group.nodes + idle.idle_nodes
    each = group.gpus_per_node + (0 if idle.idle_nodes else idle.idle_gpus)
    every = group.model_copy(update={"nodes": nodes, "gpus_per_node": each})
    return plan.cluster.model_copy(update={"node_groups": (every,)})


def _refusal(model: ModelSpec, training: Training, fixed: Mapping[str, object]) -> str | None:
    """Why no plan has what is fixed of its strategy; None: some may have."""
    return (
        spread_refusal(model, training, fixed)
        or carried_refusal(model, fixed)
        or tensor_parallel_refusal(model, fixed.get("tp", 1))
        or context_parallel_refusal(model, fixed)
        or zero_group_refusal(fixed)
        or muon_refusal(training, fixed)
    )


def make_plan(request: Request, watch: Watch = unwatched) -> Plan:
    """The best plan that a search finds while `watch` lets it go on.

    Raises InputError, RefusedError, InfeasibleError.
    """
    scope = _scope(request)
    workload = Workload(request.model, request.training, request.cluster.group)
    found = _found(request, workload, scope, watch)
    best, cluster = found.best, request.cluster
    strategy = best.candidate.strategy
    idle = cluster.gpus - strategy.ranks
    if idle:
        workload = workload.on(strategy.ranks)
        cluster = cluster.model_copy(update={"node_groups": (workload.nodes,)})
    return Plan(
        inputs=digests(request.model, request.training, cluster),
        predicted=predict(best, workload, found.bound, found.model_gap),
        strategy=strategy,
        placement=best.placement,
        executable=executable(request.model, request.training, strategy, request.cluster.group.gpu),
        search=_record(found, idle, request.cluster.nodes - cluster.nodes),
        alternatives=tuple(_alternatives(found, workload.nodes)),
        model=request.model,
        training=request.training,
        cluster=cluster,
    )


def _scope(request: Request) -> Scope:
    """What the search may decide. Raises InputError and RefusedError for what no plan has."""
    model, training, group = request.model, request.training, request.cluster.group
    fixed, pins = parse_pins(request.settings)
    refuse_of_launched(fixed, pins, group.gpu)
    if training.lora is not None:
        refuse_of_trained(fixed, pins)
    if why := _refusal(model, training, fixed):
        raise RefusedError(why)
    if training.optimizer.name == "muon":
        refuse_of_muon(pins)
    written = allowed_bytes(request.max_wear, training, group)
    if written is not None:
        pins = (*pins, Pin(None, WRITTEN, "", written))
    if request.engine == "native" and (refusal := refused_however_split(request)):
        raise RefusedError(f"{refusal}; change it, or plan with --engine any")

    def allowed(strategy: Strategy) -> bool:
        if muon_refusal(training, dict(strategy)) or not request.allowed(strategy):
            return False  # nor is it priced
        return request.engine == "any" or native_refusal(model, training, strategy) is None

    return Scope(fixed, pins, allowed, request.idling, request.told)


def _record(found: Found, idle_gpus: int, idle_nodes: int) -> SearchRecord:
    """What the search tried, and what its plan leaves without work."""
    return SearchRecord(
        solver=solver_name(),
        strategies=found.strategies,
        relaxations=found.relaxations,
        programs=found.programs,
        stopped=found.stopped,
        idle_gpus=idle_gpus,
        idle_nodes=idle_nodes,
    )


def _found(request: Request, workload: Workload, scope: Scope, watch: Watch) -> Found:
    """What the search finds. An InfeasibleError due to a limit on wear names that limit first."""
    try:
        return _searcher(request)(workload, scope, watch)
    except InfeasibleError as error:
        if request.max_wear is None:
            raise
        nodes = request.cluster.group
        raise worn_out(error, request.max_wear, request.training, nodes) from None


def _searcher(request: Request) -> Callable[[Workload, Scope, Watch], Found]:
    """The function that searches; for an exact request it tries every placement."""
    if request.exact:
        from bigplan.solve.exact import exact_search

        return exact_search
    return partial(search, effort=request.effort)


def refused_however_split(request: Request) -> str | None:
    """Why the native runtime can execute no plan of the request; None: it may execute some.

    This asks about plain data parallelism, which the native runtime always has. So a refusal is
    never about how the work is split.
    """
    split = Strategy(dp=request.cluster.gpus)
    model, training = request.model, request.training
    return gpu_refusal(request.cluster.group.gpu, model, training) or native_refusal(
        model, training, split
    )


def predict(best: Placed, workload: Workload, bound: float, model_gap: float) -> Predicted:
    """The predictions of a plan; `bound` and `model_gap` come from its search."""
    tokens, seconds = workload.training.tokens_per_step, best.seconds
    candidate, graph, costs = best.candidate, best.candidate.graph, best.candidate.costs
    problem = problem_of(candidate, ())
    overlapped = problem.step_seconds(decisions_of(graph, best.placement))
    path = critical_path(best.programs, graph, costs)
    memory = tuple(memory_use(best.programs, costs, workload.nodes))
    offloads = any(
        use.by_purpose.get(tensors)
        for use in memory
        if use.tier is not Tier.GPU
        for tensors in ("parameters", "gradients", "optimizer", "activations")
    )
    nodes = workload.nodes
    profiled = candidate.strategy.ranks == 1 and nodes.host.adam_rate_beside_copies is not None
    low, high = error_band(seconds, nodes.gpu.name, offloads=offloads, profiled=profiled)
    return Predicted(
        step_seconds=seconds,
        step_seconds_low=low,
        step_seconds_high=high,
        step_seconds_overlapped=min(overlapped, seconds),
        step_seconds_serial=max(seconds, best.totals.serial),
        tokens_per_second=tokens / seconds,
        mfu=mfu(workload.model, workload.training, workload.nodes, seconds),
        lower_bound_seconds=bound,
        model_gap=model_gap,
        simulated_gap=seconds / bound - 1.0,
        bottleneck=max(path, key=lambda name: path[name]),
        critical_path=path,
        busy_seconds=busy_seconds(best.programs, graph, costs),
        op_seconds=best.totals.by_op,
        moved_bytes=moved_bytes(best.programs),
        parts=step_parts(graph, costs, best.placement, PlayedStep(seconds, best.busy)),
        memory=memory,
    )


def memory_use(
    programs: tuple[Program, ...], costs: Costs, nodes: NodeGroup
) -> Iterator[MemoryUse]:
    """Bytes by stage and tier, as the programs allocate them.

    Host memory also includes what the processes and locked memory need.
    """
    room = capacity_beside(programs, costs)
    for program in programs:
        for tier in Tier:
            capacity = room[tier]
            purposes: dict[str, int] = defaultdict(int)
            for buffer in program.buffers.values():
                if buffer.tier is tier:
                    nbytes = costs.sharing.counted(program.added_bytes(buffer), tier.scope)
                    purposes[buffer.purpose] += nbytes
            if tier is Tier.HOST:
                placed = sum(purposes.values())
                purposes["processes"] = costs.processes + locked_bytes(nodes, placed)
                capacity += costs.processes + locked_bytes(nodes, capacity)
            yield MemoryUse(
                stage=program.stage,
                tier=tier,
                scope=tier.scope,
                used_bytes=sum(purposes.values()),
                capacity_bytes=capacity,
                by_purpose={name: n for name, n in sorted(purposes.items()) if n},
            )


def moved_bytes(programs: tuple[Program, ...]) -> dict[str, int]:
    """For each link, bytes that one GPU moves in a step, of the stage that moves most."""
    most: dict[str, int] = {}
    for program in programs:
        alone: dict[str, int] = defaultdict(int)
        for action, times in counted(program.step):
            if action.lane not in (Lane.COMPUTE, Lane.GPU_UPDATE, Lane.CPU) and action.amount:
                alone[resource(action.lane).value] += times * action.amount
        most.update({lane: n for lane, n in alone.items() if n > most.get(lane, 0)})
    return dict(sorted(most.items()))


def _alternatives(found: Found, nodes: NodeGroup) -> Iterator[Alternative]:
    seen: set[Strategy] = {found.best.candidate.strategy}
    for rival in found.rivals:
        strategy = rival.candidate.strategy
        if strategy not in seen:
            seen.add(strategy)
            yield _alternative(rival, nodes)


def _alternative(rival: Trial, nodes: NodeGroup) -> Alternative:
    step, settled = PlayedStep(rival.seconds, rival.busy), rival.settled
    graph, costs = settled.graph, settled.costs
    programs = lower_buffers(graph, rival.placement)
    return Alternative(
        strategy=rival.candidate.strategy,
        step_seconds=rival.seconds,
        parts=step_parts(graph, costs, rival.placement, step),
        memory=fullest(memory_use(programs, costs, nodes)),
    )


def memory_of_groups(steps: Iterable[GroupStep]) -> Iterator[MemoryUse]:
    """For each stage and tier, the use of the group that uses most."""
    uses = (memory_use(s.programs, s.candidate.costs, s.workload.nodes) for s in steps)
    for same in zip(*uses, strict=True):
        yield max(same, key=lambda use: use.used_bytes)


def seen(plan: Plan) -> Plan:
    """The plan as the group of nodes that paces it sees it: with equal work, of its own size."""
    return pacing(plan).view if plan.strategy.replicas else plan


@lru_cache(maxsize=2)  # a command asks several times, for at most two plans side by side
def programs_of(plan: Plan) -> tuple[Candidate, tuple[Program, ...]]:
    """The plan lowered again: its graph and prices, and one program per stage.

    Where groups of nodes have unequal work, they are those of the group that paces the step.
    Raises RefusedError for the plan of an engine that runs no programs.
    """
    if plan.engine != NATIVE.name:
        raise RefusedError(
            f"the plan is for {plan.engine}, which runs no program of actions: what a step takes "
            "there is in its report, and `bigplan simulate` shows its phases"
        )
    if plan.strategy.replicas:
        step = pacing(plan)
        return step.candidate, step.programs
    candidate = Candidate.of(workload_of(plan), plan.strategy).settled(plan.placement)
    return candidate, lower(candidate.graph, plan.placement)


def simulate_plan(plan: Plan) -> Timeline:
    """The plan's steady step, simulated again."""
    candidate, programs = programs_of(plan)
    return simulate(programs, candidate.graph, candidate.costs)
