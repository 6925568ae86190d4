"""A way priced by the closed formulas that published runs are held against.

Seconds come from cost/step.py. GPU memory comes from cost/memory.py, as torch's counter of reserved
memory shows it, with the behaviour of the way's framework. Host memory, where a rank's state is
there, takes these bytes for each element that the rank owns:

    FSDP's CPUOffloadPolicy    parameters in fp32 and their gradients, each tensor a page-locked
                               block, which torch rounds up to a power of two; moments: 8
    Megatron's offloading      of the share that is there: master, gradient and moments, 16
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from bigplan.cost.band import error_band
from bigplan.cost.costs import Costs
from bigplan.cost.memory import BASE_BYTES, FRAGMENTS, stage_memory
from bigplan.cost.price import memory_of_torch
from bigplan.cost.process import block_of, locked_bytes
from bigplan.cost.run import PricedRun
from bigplan.cost.step import Execution, framework_step, stage_counts
from bigplan.engines.frameworks.way import Way
from bigplan.graph.graph import Graph, Recompute, Tensor
from bigplan.placement import Tier
from bigplan.plan import MemoryUse, Predicted, StepParts, mfu
from bigplan.program import Lane, Op
from bigplan.timeline import Event, Timeline, sums

COUNTER = "reserved"
MASTER, MOMENTS, GRADIENT = 4, 8, 4  # bytes an element in host memory
BUBBLE = "pipeline bubble"
# What each part of the closed formulas keeps busy.
_LANES = {
    "compute": (Lane.COMPUTE, Op.FORWARD),
    "communication": (Lane.COMM, Op.GATHER),
    "bubble": (BUBBLE, Op.RECV),
    "reduce": (Lane.COMM, Op.REDUCE),
    "update": (Lane.GPU_UPDATE, Op.UPDATE),
    "copies": (Lane.D2H, Op.GRAD_OUT),
}
_PURPOSES = {"temporaries": "workspace", "buffers": "staging"}


@dataclass(frozen=True)
class PricedWay:
    """A way with its graph and prices."""

    way: Way
    run: PricedRun
    graph: Graph
    costs: Costs

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Seconds of a step by part."""
        return self._parts(self.run.execution)

    def _parts(self, execution: Execution) -> Mapping[str, float]:
        run = self.run
        return framework_step(self.graph, self.costs, run.nodes, run.framework, execution)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Memory of every stage's GPUs, and of its ranks' node."""
        return tuple(use for stage in range(self.way.strategy.pp) for use in self._stage(stage))

    @property
    def short(self) -> dict[Tier, int]:
        """Bytes that are missing, by tier."""
        most: dict[Tier, int] = {}
        for use in self.memory:
            most[use.tier] = max(most.get(use.tier, 0), use.used_bytes - use.capacity_bytes)
        return {tier: nbytes for tier, nbytes in most.items() if nbytes > 0}

    def _stage(self, stage: int) -> Iterator[MemoryUse]:
        run, costs = self.run, self.costs
        parts = stage_memory(self.graph, run.execution, run.framework, stage)
        gpu: dict[str, int] = {"workspace": round(BASE_BYTES[COUNTER])}
        for name, nbytes in parts.items():
            purpose = _PURPOSES.get(name, name)
            gpu[purpose] = gpu.get(purpose, 0) + round(FRAGMENTS[COUNTER] * nbytes)
        each, sharing = self._host(stage), costs.sharing
        host = {name: sharing.counted(n, "node") for name, n in each.items()}
        placed = sum(host.values())
        host["processes"] = costs.processes + locked_bytes(run.nodes, placed)
        room = costs.capacity[Tier.HOST]
        lends = self.graph.lends_table
        own = sharing.bytes_of_rank(placed)
        capacity = memory_of_torch(run.nodes.gpu, run.strategy, own, lends_table=lends, folded=True)
        of_node = room + costs.processes + locked_bytes(run.nodes, room)
        for tier, purposes, most in (
            (Tier.GPU, gpu, capacity),
            (Tier.HOST, host, of_node),
            (Tier.NVME, {}, costs.capacity[Tier.NVME]),
        ):
            yield MemoryUse(
                stage=stage,
                tier=tier,
                scope=tier.scope,
                used_bytes=sum(purposes.values()),
                capacity_bytes=most,
                by_purpose={name: n for name, n in sorted(purposes.items()) if n},
            )

    def _host(self, stage: int) -> dict[str, int]:
        """Bytes of one rank in host memory, by purpose."""
        if not self.way.on_cpu:
            return {}
        counts, strategy = stage_counts(self.graph, stage), self.way.strategy

        def ranks(tensor: Tensor) -> int:
            whole = strategy.zero and tensor.experts
            return strategy.expert_shards(folded=True) if whole else strategy.zero_ranks

        tensors = [
            (count, -(-tensor.elements // ranks(tensor)))
            for name, count in counts.items()
            for tensor in self.graph.kinds[name].tensors
        ]
        owned = sum(count * elements for count, elements in tensors)
        if self.way.parameters_on_host:
            each = {"parameters": MASTER, "gradients": GRADIENT}
            found = {
                name: sum(count * block_of(n * elements) for count, elements in tensors)
                for name, n in each.items()
            }
            return found | {"optimizer": MOMENTS * owned}
        away = round(self.way.on_cpu * owned)
        return {"optimizer": (MASTER + MOMENTS) * away, "gradients": GRADIENT * away}

    @property
    def least(self) -> float:
        """Seconds of a step if ranks that share states exchanged nothing."""
        run, alone = self.run, self.costs.without_sharing()
        parts = framework_step(self.graph, alone, run.nodes, run.framework, run.execution)
        return sum(parts.values())

    @property
    def preference(self) -> tuple[float, float, int, str]:
        """Sort key: fastest first, then what moves least, then the lowest stage."""
        return round(self.seconds, 9), self.way.on_cpu, self.way.strategy.zero, repr(self.way)

    def lanes(self) -> Iterator[tuple[str, Op, float]]:
        """Resource, kind of action and seconds of each part, in a step's order."""
        for name, seconds in self.parts.items():
            lane, op = _LANES[name]
            if name == "update" and self.way.on_cpu:
                lane = Lane.CPU
            if seconds:
                yield lane, op, seconds

    def timeline(self) -> Timeline:
        """The parts one after the other, because closed formulas know no finer grain."""
        events, now = list[Event](), 0.0
        for lane, op, seconds in self.lanes():
            events.append(Event(0, lane, op, 0, 0, now, now + seconds))
            now += seconds
        return Timeline(tuple(events), now)

    def predicted(self) -> Predicted:
        """The promise. The parts follow each other, so the critical path is all of them."""
        run, seconds = self.run, self.seconds
        path = sums((lane, took) for lane, _, took in self.lanes())
        path = dict(sorted(path.items(), key=lambda item: -item[1]))
        low, high = error_band(
            seconds,
            run.nodes.gpu.name,
            offloads=self.way.on_cpu > 0,
            experts=run.model.experts > 0,
        )
        return Predicted(
            step_seconds=seconds,
            step_seconds_low=low,
            step_seconds_high=high,
            step_seconds_overlapped=max(path.values()),
            step_seconds_serial=seconds,
            tokens_per_second=run.training.tokens_per_step / seconds,
            mfu=mfu(run.model, run.training, run.nodes, seconds),
            lower_bound_seconds=seconds,
            model_gap=0.0,
            simulated_gap=0.0,
            bottleneck=next(iter(path)),
            critical_path=path,
            busy_seconds={lane: took for lane, took in path.items() if lane != BUBBLE},
            op_seconds=sums((op, took) for _, op, took in self.lanes()),
            moved_bytes={},
            parts=self.step_parts(),
            memory=self.memory,
        )

    def step_parts(self) -> StepParts:
        """How the step's time divides on the busiest GPU."""
        parts = self.parts
        without = self._parts(replace(self.run.execution, recompute=Recompute.NONE))
        again = parts["compute"] - without["compute"]
        on_gpu = 0.0 if self.way.on_cpu else parts["update"]
        waits = {
            str(Lane.COMM): parts["communication"] + parts["reduce"],
            str(Lane.CPU): parts["update"] - on_gpu,
            str(Lane.D2H): parts.get("copies", 0.0),
        }
        waits = {lane: seconds for lane, seconds in waits.items() if seconds > 0}
        return StepParts(
            compute=parts["compute"] - again,
            recompute=again,
            collectives=0.0,
            update=on_gpu,
            bubble=parts["bubble"],
            waiting=sum(waits.values()),
            waits_for=max(waits, key=lambda lane: waits[lane], default=""),
        )
