"""A running training appraised: priced by the engine that plans for its tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigplan.engines import Chosen, chosen, make_plan
from bigplan.engines.deepspeed import DeepSpeed
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.search import DeepSpeedSearch
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.engines.frameworks.search import FrameworkSearch
from bigplan.engines.frameworks.way import Way
from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.graph import Recompute
from bigplan.intake.completed import Completed
from bigplan.intake.setup import Setup
from bigplan.placement import Tier
from bigplan.plan import Plan, SearchRecord
from bigplan.planner import Request, refused_however_split
from bigplan.solve.search import Watch, unwatched

AS_IT_IS = SearchRecord.of_all(1)


@dataclass(frozen=True, slots=True)
class Appraisal:
    """The training as a plan, even if it does not fit: `short` has the missing bytes by tier."""

    setup: Setup
    request: Request
    plan: Plan
    short: Mapping[Tier, int]


def appraised(found: Completed, file: str) -> Appraisal:
    """Price a training. Raises InputError for settings that exclude each other."""
    if found.setup.engine in FRAMEWORKS:
        return _by_framework(found)
    return _by_deepspeed(found, file)


def _by_framework(found: Completed) -> Appraisal:
    engine, setup = FRAMEWORKS[found.setup.engine], found.setup
    tool = replace(engine.tool, behaviour=setup.behaving(engine.tool.behaviour))
    offload, again = setup.offload, found.again
    way = Way(
        found.strategy,
        again.policy if again.blocks else Recompute.NONE,
        0 if again.policy is Recompute.NONE else again.blocks,
        on_cpu=0.0 if offload.state is Tier.GPU else offload.on_cpu,
        parameters_on_host=offload.parameters is Tier.HOST,
    )
    priced = FrameworkSearch(tool, found.request).priced(way)
    plan = engine.plan_of(priced, found.request, AS_IT_IS)
    return Appraisal(setup, found.request, plan, priced.short)


def _by_deepspeed(found: Completed, file: str) -> Appraisal:
    setup, offload, nodes = found.setup, found.setup.offload, found.request.cluster.group
    stage = setup.split["zero"]
    flows = stage == 3 and offload.state is Tier.HOST and offload.parameters is Tier.GPU
    if offload.on_cpu < 1 and not flows:
        told = (
            "offload_optimizer.ratio: DeepSpeed shares state out with ZeRO 3 in host memory alone"
        )
        setup = setup.with_told((), [told])
    again = found.again
    whole = again.policy is Recompute.FULL and again.blocks == found.request.model.layers
    if again.policy is not Recompute.NONE and not whole:
        raise InputError(
            "--set recompute: for DeepSpeed all blocks are priced alike; use none or full"
        )
    way = Decisions(
        found.strategy,
        stage,
        offload.state,
        offload.parameters,
        offload.on_cpu if flows else 1.0,
        recompute=whole,
        loss_chunk=found.loss_chunk,
        own_pinning=setup.own_pinning,
    )
    for problem in way.problems():
        raise InputError(f"{file}: {problem}; correct the file")
    if Tier.NVME in (way.state, way.parameters) and nodes.nvme is None:
        raise InputError(
            f"{file}: keeps tensors on drives, and {found.request.cluster.name} has none; describe "
            "them in the cluster (nvme:)"
        )
    tried = DeepSpeedSearch(found.request).tried(way, setup.sized)
    plan = DeepSpeed().plan_of(tried, found.request, AS_IT_IS)
    return Appraisal(setup, found.request, plan, tried.short)


@dataclass(frozen=True, slots=True)
class Better:
    """The best plan of the same engine, and of those that run here; or why there is none."""

    same: Plan | str
    fastest: Plan | str


def better_than(appraisal: Appraisal, watch: Watch = unwatched) -> Better:
    """Plan again: model, training and cluster stay, everything else is open."""
    return Better(_same(appraisal.request, watch), _fastest(appraisal.request, watch))


def _same(request: Request, watch: Watch) -> Plan | str:
    try:
        return make_plan(request, watch)
    except (InfeasibleError, InputError) as error:
        return str(error)


def _fastest(request: Request, watch: Watch) -> Plan | str:
    if why := refused_however_split(request):  # then every other split is refused, too
        return why
    try:
        found: Chosen = chosen(replace(request, engine="auto"), watch)
    except (InfeasibleError, InputError) as error:
        return str(error)
    runs = found.plan.executable[found.plan.engine]
    return found.plan if runs is True else f"none that is installed runs it: {runs}"
