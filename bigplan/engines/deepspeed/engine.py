"""DeepSpeed as an engine: what it can place, at the price that placement has there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bigplan.capabilities.native import device_refusal
from bigplan.cost.band import error_band
from bigplan.engines.deepspeed.config import configuration
from bigplan.engines.deepspeed.decisions import Decisions
from bigplan.engines.deepspeed.refusals import refusal
from bigplan.engines.deepspeed.search import DeepSpeedSearch, TriedWay
from bigplan.engines.engine import require_plannable
from bigplan.errors import InputError, RefusedError
from bigplan.graph.strategy import Strategy
from bigplan.installed import LAUNCH, missing
from bigplan.plan import (
    Alternative,
    Plan,
    Predicted,
    SearchRecord,
    StepParts,
    digests,
    fullest,
    mfu,
)
from bigplan.planner import Request
from bigplan.program import Lane
from bigplan.recheck import Rechecked, decisions_of, priced_again
from bigplan.runtime.deepspeed.config import needed
from bigplan.runtime.deepspeed.preparing import SOON, build_apart
from bigplan.solve.search import Watch
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline
from bigplan.units import format_bytes

RIVALS = 5  # other strategies that a plan tells of
ON_GPU = (Lane.COMPUTE, Lane.GPU_UPDATE)


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """ZeRO with what it offloads, and pipelines, on bigplan's layers."""

    name: str = "deepspeed"
    worker: str = "bigplan.runtime.deepspeed.worker:DeepSpeedWorker"

    def refusal(self, model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
        """See Engine."""
        return refusal(model, training, strategy)

    def missing(self) -> str | None:
        """See Engine."""
        return missing((*LAUNCH, "deepspeed"), "launch,deepspeed")

    def prepare(self, plan: Plan, waiting: Callable[[str], None]) -> None:
        """See Engine; this compiles operators, which takes minutes the first time."""
        if names := needed(plan.config):
            device, named = plan.cluster.group.gpu.device, ", ".join(names)

            def told(seconds: float) -> None:
                if seconds > SOON:
                    waiting(
                        f"Compiling DeepSpeed's {named}, once for this machine: {seconds:.0f} s"
                    )

            build_apart(names, device, told)

    def make_plan(self, request: Request, watch: Watch) -> Plan:
        """See Engine."""
        if why := device_refusal(request.cluster.group.gpu):
            raise RefusedError(f"{why}; plan with --engine any")
        require_plannable(request, self.name, "DeepSpeed")
        search = DeepSpeedSearch(request)
        found = search.run(watch)
        record = SearchRecord.of_all(search.counted, stopped=search.stopped)
        return self.plan_of(found[0], request, record, tuple(_alternatives(found, request)))

    def plan_of(
        self,
        tried: TriedWay,
        request: Request,
        search: SearchRecord,
        alternatives: tuple[Alternative, ...] = (),
    ) -> Plan:
        """A plan for a given way, whether or not it fits."""
        return Plan(
            inputs=digests(request.model, request.training, request.cluster),
            predicted=predicted(tried, request),
            strategy=tried.decisions.strategy,
            placement=tried.placement,
            executable=_executable(request, tried.decisions),
            search=search,
            alternatives=alternatives,
            model=request.model,
            training=request.training,
            cluster=request.cluster,
            engine=self.name,
            config=_config(tried, request),
        )

    def recheck(self, plan: Plan, path: Path) -> Rechecked:
        """See Engine; sizes of buffers in the configuration follow from its decisions."""
        request = _request(plan)
        with decisions_of(path):
            tried = DeepSpeedSearch(request).tried(Decisions.of(plan))
            if why := refusal(plan.model, plan.training, plan.strategy):
                raise InputError(why)
            for tier, nbytes in tried.short.items():
                raise InputError(
                    f"config: needs {format_bytes(nbytes)} more of {tier} memory than the plan's "
                    "cluster has"
                )
        again = plan.model_copy(
            update={
                "predicted": predicted(tried, request),
                "placement": tried.placement,
                "config": _config(tried, request),
            }
        )
        return priced_again(plan, again, path, "promises and sizes")

    def timeline(self, plan: Plan) -> Timeline:
        """See Engine: forward and backward of each micro-batch, and the update."""
        return DeepSpeedSearch(_request(plan)).tried(Decisions.of(plan)).step.timeline()


def _request(plan: Plan) -> Request:
    return Request(plan.model, plan.training, plan.cluster, engine=plan.engine)


def _config(tried: TriedWay, request: Request) -> dict[str, object]:
    held = tried.held
    return configuration(tried.decisions, held.sizes, request.training, request.cluster.group)


def _executable(request: Request, decisions: Decisions) -> dict[str, bool | str]:
    why = device_refusal(request.cluster.group.gpu) or refusal(
        request.model, request.training, decisions.strategy
    )
    return {
        "native": "it is placed as DeepSpeed places; plan with --engine native",
        "deepspeed": why or True,
    }


def predicted(tried: TriedWay, request: Request) -> Predicted:
    """The promise. Phases follow each other, so the critical path of one stage is all of them."""
    step, nodes = tried.step, request.cluster.group
    seconds, busy = step.seconds, step.busy()
    offloads = tried.placement.stages[0].kinds["block"].moves
    low, high = error_band(seconds, nodes.gpu.name, offloads=offloads)
    path = dict(sorted(step.by_lane().items(), key=lambda item: -item[1]))
    return Predicted(
        step_seconds=seconds,
        step_seconds_low=low,
        step_seconds_high=high,
        step_seconds_overlapped=max(busy.values()),
        step_seconds_serial=seconds,
        tokens_per_second=request.training.tokens_per_step / seconds,
        mfu=mfu(request.model, request.training, nodes, seconds),
        lower_bound_seconds=seconds,
        model_gap=0.0,
        simulated_gap=0.0,
        bottleneck=next(iter(path)),
        critical_path=path,
        busy_seconds=busy,
        op_seconds=step.by_op(),
        moved_bytes=step.moved(),
        parts=_parts(tried),
        memory=tried.memory,
    )


def _parts(tried: TriedWay) -> StepParts:
    lanes, again = tried.step.on_busiest(), tried.step.again
    compute, update = (lanes.get(lane, 0.0) for lane in ON_GPU)
    others = {lane: seconds for lane, seconds in lanes.items() if lane not in ON_GPU}
    return StepParts(
        compute=compute - again,
        recompute=again,
        collectives=0.0,
        update=update,
        bubble=max(0.0, tried.step.seconds - sum(lanes.values())),
        waiting=sum(others.values()),
        waits_for=max(others, key=lambda lane: others[lane], default=""),
    )


def _alternatives(found: list[TriedWay], request: Request) -> Iterator[Alternative]:
    """The best of other strategies."""
    seen = {found[0].decisions.strategy}
    for tried in found:
        strategy = tried.decisions.strategy
        if strategy not in seen and len(seen) <= RIVALS:
            seen.add(strategy)
            yield Alternative(
                strategy=strategy,
                step_seconds=tried.step.seconds,
                parts=_parts(tried),
                memory=fullest(predicted(tried, request).memory),
            )
