"""Freed slots filled with NaN do find out who reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")


import torch

from bigplan.content import Holds
from bigplan.errors import VerificationError, WorkerError
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.program import Action, Instruction, Lane, Op, Program, Ref, Repeat, expand
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.sharing import NodeSharing
from bigplan.verify import verify
from tests.examples import examples
from tests.runtime.harness import context_of, started
from tests.runtime.plans import plans
from tests.toys import ROOMY


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _is_nan_after(worker: NativeWorker, steps: int) -> bool:
    """Whether a NaN came through: to the loss, to gradients that skip a step, or to weights."""
    try:
        results = [worker.step() for _ in range(steps)]
    except WorkerError:  # not even clipping kept it from the weights
        return True
    if any(result.skipped for result in results):
        return True
    losses = [result.loss for result in results]
    worker.finish()
    weights = (flat for _, flat in worker.weights())
    return any(map(math.isnan, losses)) or any(bool(flat.isnan().any()) for flat in weights)


def _inserted(
    instructions: tuple[Instruction, ...], number: int, early: Action
) -> tuple[Instruction, ...]:
    """`early` before action `number` of the unrolled instructions."""
    actions = list(expand(instructions))
    return (*actions[:number], early, *actions[number:])


def _freed_early(program: Program, choose: Callable[[int], int]) -> Program:
    """A program whose first step frees something right before an action reads it."""
    reads = [
        (number, action, ref)
        for number, action in enumerate(expand(program.first))
        for ref in action.reads
        if _is_stored(program, action, ref)
    ]
    number, action, ref = reads[choose(len(reads))]
    early = Action(
        Op.FREE, Lane.COMPUTE, action.layer, frees=(ref,), micro_batch=action.micro_batch
    )
    return replace(program, first=_inserted(program.first, number, early))


def _is_stored(program: Program, action: Action, ref: Ref) -> bool:
    """Whether the entry lies in arena or slab and the action reads its numbers from there.

    Hidden states and activations on the GPU are torch's, the norm's and the clip's scalars are
    kept apart, NVMe is not filled, an update with state on the GPU or the host may own no rows, a
    batch filled so holds no tokens at all, and the embedding's backward looks at no table.
    """
    if (action.op, action.layer, ref.content.kind) == (Op.BACKWARD, 0, Holds.PARAMETERS):
        return False
    buffer = program.buffers[ref.buffer]
    if buffer.tier is Tier.NVME or buffer.nbytes <= 8 or action.op is Op.UPDATE:
        return False
    if ref.buffer == "data":
        return False
    if ref.content.kind is Holds.ACTIVATIONS and action.op is Op.READ:
        return False
    return not buffer.dynamic


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=examples(15), derandomize=True, deadline=None)
def test_reading_a_freed_slot_gives_nan(plan: Plan, random: Random) -> None:
    with started(plan) as worker:
        context = context_of(worker)
        broken = _freed_early(context.program, random.randrange)
        with pytest.raises(VerificationError):
            verify((broken,), context.graph, ROOMY, NodeSharing(1))
        worker._program = broken
        assert _is_nan_after(worker, 2)


@given(plans())
@settings(max_examples=examples(5), derandomize=True, deadline=None)
def test_a_whole_program_never_shows_nan(plan: Plan) -> None:
    with started(plan) as worker:
        assert not _is_nan_after(worker, 2)


def test_the_helper_unrolls_repeats() -> None:
    action = Action(Op.FREE, Lane.CPU, 0, micro_batch=0)
    early = Action(Op.FREE, Lane.CPU, 7)
    unrolled = _inserted((Repeat(2, 1, (action,)),), 1, early)
    assert [a.layer for a in expand(unrolled)] == [0, 7, 0]
    assert [a.micro_batch for a in expand(unrolled)] == [0, -1, 1]
