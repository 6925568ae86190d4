"""Runs that write checkpoints and go on from them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan, graph_of
from bigplan.runtime.result import Saved
from bigplan.runtime.weights.digest import weights_digest
from bigplan.runtime.worker import NativeWorker
from tests.runtime.execution.streamed import streamed_kind
from tests.runtime.harness import context_of, state_of
from tests.runtime.plans import CHUNK, SHORT, placed, plan_of, plans, tiny_model, tiny_training
from tests.runtime.reference import State
from tests.toys import kind_placement, placements


@dataclass(frozen=True, slots=True)
class Course:
    """What a run computed from its first step on: losses, and the state after the last."""

    first: int  # steps done before
    losses: list[float]
    state: State
    saved: tuple[Saved, ...]
    begun: State  # before its first step
    digest: str  # of its weights
    written: State  # where it wrote a checkpoint, what that is of; else as begun
    ended: str  # digest of the weights after its last step


@contextmanager
def running(
    plan: Plan, resume: Path | None = None, *, rank: int = 0, meeting: Path = Path()
) -> Iterator[tuple[NativeWorker, int]]:
    """A started worker, and the steps it has behind it."""
    with tempfile.TemporaryDirectory() as scratch:
        worker = NativeWorker(plan, rank, Path(scratch), poison=True)
        try:
            worker.preflight()
            yield worker, worker.start(meeting, resume)
        finally:
            worker.close()


def course(
    plan: Plan,
    until: int,
    resume: Path | None = None,
    *,
    at: int = -1,
    folder: Path | None = None,
    rank: int = 0,
    meeting: Path = Path(),
) -> Course:
    """Steps up to `until`; step number `at` (from 1) also writes a checkpoint into `folder`."""
    with running(plan, resume, rank=rank, meeting=meeting) as (worker, first):
        begun = written = state_of(worker)
        digest = weights_digest(context_of(worker))
        results = []
        for number in range(first + 1, until + 1):
            results.append(worker.step(folder if number == at else None))
            if number == at:
                written = state_of(worker)
        ended = worker.finish().digest
        saved = tuple(saved for result in results for saved in result.saved)
        losses = [result.loss for result in results]
        return Course(first, losses, state_of(worker), saved, begun, digest, written, ended)


def away(tier: Tier = Tier.HOST, chunk: int = CHUNK, **changes: object) -> Plan:
    """Everything that can leave the GPU does; optimizer state is on `tier`."""
    ends = kind_placement(1, Tier.HOST, Tier.HOST, (Recompute.NONE, Tier.HOST), tier)
    blocks = kind_placement(2, Tier.NVME, Tier.NVME, (Recompute.NONE, Tier.NVME), tier)
    placement = placed(embedding=ends, block=blocks, head=ends, chunk=chunk)
    training = tiny_training(3, **{"clip_norm": 0.5, "precision": "bf16", **changes})
    return plan_of(tiny_model(), training, Strategy(dp=1), placement)


def resident(**changes: object) -> Plan:
    """The same training with everything on the GPU."""
    placement = placed(embedding=kind_placement(1), block=kind_placement(2), head=kind_placement(1))
    training = tiny_training(3, **{"clip_norm": 0.5, "precision": "bf16", **changes})
    return plan_of(tiny_model(), training, Strategy(dp=1), placement)


def passing(chunk: int = CHUNK, **changes: object) -> Plan:
    """The same training with state that passes through the GPU, beside the CPU's or alone."""
    ends = streamed_kind(Tier.HOST, Tier.HOST, 0.5)
    blocks = streamed_kind(Tier.GPU, Tier.GPU, 2.0, layers=2)
    placement = placed(embedding=ends, block=blocks, head=ends, chunk=chunk)
    training = tiny_training(3, **{"clip_norm": 0.5, "precision": "bf16", **changes})
    return plan_of(tiny_model(), training, Strategy(dp=1), placement)


def on_device(plan: Plan, device: str) -> Plan:
    """The same plan for another kind of device."""
    return plan_of(plan.model, plan.training, plan.strategy, plan.placement, device)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Two plans of one training whose sums have the same order: only the tiers differ."""
    plan = draw(plans())
    strategy = plan.strategy
    if graph_of(plan).units > 1:  # a group's sum is added as one, where sums leave the GPU
        strategy = strategy.model_copy(update={"accumulation_group": 1})
    graph = graph_of(plan)
    chunk = draw(st.sampled_from((SHORT, 30_000, CHUNK)))
    other = draw(placements(graph, free=True)).model_copy(update={"chunk": chunk})
    changes = ({"placement": placement} for placement in (plan.placement, other))
    one, two = (plan.model_copy(update={**change, "strategy": strategy}) for change in changes)
    return one, two
