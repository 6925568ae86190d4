"""AdamW on moments in bf16 and 8 bits: the kernel against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.kernels.handwritten import moments as kernel
from bigplan.runtime.memory.moments import StoredState, bytes_view
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.narrow_adamw import NarrowPiece, Run, reference
from bigplan.spec.moments import Moments, blocks, places
from bigplan.spec.optimizer import Optimizer
from tests.examples import examples

runs = settings(max_examples=examples(6), derandomize=True, deadline=None)
formats = pytest.mark.parametrize("moments", ["bf16", "int8"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 3
# Code and scales of both are made of values that differ by the rounding of a multiplication and an
# addition, here one and there two: an element at the border of two levels may go to either.
BORDERS = 0.01


def _piece(moments: Moments, count: int, copy: torch.dtype | None) -> NarrowPiece:
    optimizer = Optimizer(moments=moments)
    stored = torch.zeros(places(count, moments, 2, master=True).end, dtype=torch.uint8)
    state = StoredState.of(bytes_view(stored.to(DEVICE)), count, optimizer, master=True)
    assert state.master is not None
    made = None if copy is None else torch.zeros(count, dtype=copy, device=DEVICE)
    state.master.copy_(torch.randn(count, generator=torch.Generator().manual_seed(count)))
    return NarrowPiece(state.master, state.master, state.moments, state.scales, made)


def _constants(moments: Moments, step: int, decay: float, rate: float) -> tuple[float, ...]:
    return adamw_kernel(Optimizer(moments=moments), step, rate, decay).native.constants


def _steps(
    moments: Moments, count: int, starts: list[int], gradients: torch.dtype, *, by_kernel: bool
) -> NarrowPiece:
    piece = _piece(moments, count, torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    for step in range(1, STEPS + 1):
        spread = torch.randn(count, generator=generator).mul(2).exp()
        gradient = torch.randn(count, generator=generator) * spread
        gradient[: count // 5] = 0.0
        now = piece._replace(gradient=gradient.to(DEVICE, gradients))
        each = [
            _constants(moments, step, 0.1 * (i % 2), 1e-3 * (i + 1)) for i in range(len(starts))
        ]
        if not by_kernel:
            table = [Run(start, one) for start, one in zip(starts, each, strict=True)]
            reference(now, table, (2.0, step))
            continue
        factors = torch.tensor([[*one, float(step), 2.0] for one in each], device=DEVICE)
        begins = torch.tensor(starts, device=DEVICE)
        pair = now.parameter, now.gradient
        kernel.step(pair, now.moments, now.scales, now.copy, (begins, factors))
    return piece


def _alike(
    moments: Moments, count: int, starts: list[int], gradients: torch.dtype = torch.float32
) -> None:
    ours = _steps(moments, count, starts, gradients, by_kernel=True)
    theirs = _steps(moments, count, starts, gradients, by_kernel=False)
    for one, other in zip(ours.moments, theirs.moments, strict=True):
        assert (one.float() != other.float()).float().mean() <= max(BORDERS, 1.5 / count)
    for one, other in zip(ours.scales, theirs.scales, strict=True):
        # A root that went another way may be the largest of its block in the next step.
        apart = ((one - other).abs() > 1e-5 * other.abs()).float().mean()
        assert apart <= BORDERS
    # Where a code went another way, the next step's change differs by a level.
    far = (ours.parameter - theirs.parameter).abs() > 1e-5
    assert far.float().mean() <= max(BORDERS, 1.5 / count)
    assert ours.copy is not None
    if DEVICE == "cuda":
        assert torch.equal(ours.copy, ours.parameter.bfloat16())
    else:  # Triton's interpreter cuts off
        torch.testing.assert_close(ours.copy.float(), ours.parameter, rtol=2**-7, atol=0.0)


@formats
@given(st.integers(1, 3000), st.lists(st.integers(1, 2999), max_size=5, unique=True))
@runs
def test_a_pass_is_plain_torch_s(moments: Moments, count: int, cuts: list[int]) -> None:
    """Of any length, with runs of tensors that begin anywhere."""
    _alike(moments, count, [0, *sorted(cut for cut in cuts if cut < count)])


@formats
def test_gradients_of_16_bits_are_widened(moments: Moments) -> None:
    _alike(moments, 700, [0], torch.bfloat16)


@formats
def test_rows_that_begin_nowhere_else_have_scales_of_their_own(moments: Moments) -> None:
    piece = _steps(moments, 300, [0], torch.float32, by_kernel=True)
    assert [len(each) for each in piece.scales] == [blocks(300)] * 2 * (moments == "int8")


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("count", [1, 255, 256, 5000, 3_000_001])
def test_a_gpu_updates_as_plain_torch_does(moments: Moments, count: int) -> None:
    _alike(moments, count, [0, *(cut for cut in (100, 2048, 40_000) if cut < count)])
