"""Kernels of a state space against plain torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from bigplan.graph import state_space as priced
from bigplan.graph.operators import Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.kernels.handwritten import (
    gated_norm,
    short_filters,
    state_space_backward,
    state_space_programs,
)
from bigplan.mechanics import space_in_kernels
from bigplan.runtime.generated import _library
from bigplan.runtime.mixers.made_again import made_again
from bigplan.runtime.mixers.state_space import (
    GatedNorm,
    InKernels,
    Norm,
    _gated_and_normed,
    gated,
    in_torch,
)
from bigplan.spec.mixers import StateSpace
from tests.kernels.counting import in_place_of
from tests.kernels.generated import DEVICE, error, random, with_gradients
from tests.runtime.mixers.counted_bytes import Counted
from tests.runtime.plans import tiny_model, tiny_training

EPSILON = 1e-5
# Two groups of heads, limits of time steps, a last chunk that is not full.
SPACE = StateSpace(heads=6, head_dim=16, groups=2, state=32, taps=3, least_step=0.1, most_step=1.5)
GRANITE = StateSpace(heads=16)
WIDE = StateSpace(heads=16, head_dim=128, groups=2)
DEEP = StateSpace(heads=16, state=256)
GROUPS = StateSpace(heads=24, head_dim=128, groups=2, state=64, taps=3, convolution_bias=False)


def _inputs(space: StateSpace, size: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    channels = space.width, space.keys, space.keys
    shapes: list[tuple[int, ...]] = [(*size, n) for n in (*channels, space.heads)]
    shapes += [(space.heads,)] * 3
    shapes += [(n, space.taps) for n in channels]
    shapes += [(n,) for n in channels] if space.convolution_bias else []
    return [random(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def _both(
    space: StateSpace, size: tuple[int, int], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The result and all gradients: of the kernels, of plain torch, and exactly."""
    inputs = _inputs(space, size, dtype)
    gradient = random(99, *inputs[0].shape, dtype=dtype)
    ours, plain = (
        with_gradients(partial(how, space), inputs, gradient) for how in (InKernels.apply, in_torch)
    )
    exact = with_gradients(
        partial(in_torch, space), [x.double() for x in inputs], gradient.double()
    )
    return ours, plain, exact


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's products of fp32 are tf32")
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, (1, 70)), (torch.float16, (2, 5))], ids=str
)
def test_kernels_err_as_plain_torch(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """The interpreter has no products of bf16."""
    for mine, theirs, right in zip(*_both(SPACE, size, dtype), strict=True):
        assert error(mine, right) < 4 * max(error(theirs, right), torch.finfo(dtype).eps)


def test_what_kernels_do_not_take_is_plain_torch() -> None:
    assert space_in_kernels(2, (128, 64), 4)
    assert space_in_kernels(2, (256, 64), 4)
    assert not space_in_kernels(2, (256, 128), 4)
    for size, widths, taps in ((4, (128, 64), 4), (2, (128, 32), 4), (2, (128, 64), 9)):
        assert not space_in_kernels(size, widths, taps)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_norm_errs_as_plain_torch(groups: int) -> None:
    """Rows fill neither programs nor blocks of columns."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    space = StateSpace(heads=4, head_dim=20, groups=groups)
    shapes = [(2, 9, 80), (2, 9, 80), (80,)]
    inputs = [random(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    gradient = random(9, *shapes[0], dtype=dtype)

    def plain(x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        return _gated_and_normed(space, Norm(EPSILON), gates, x, weight)

    ours = with_gradients(partial(GatedNorm.apply, groups, EPSILON), inputs, gradient)
    theirs = with_gradients(plain, inputs, gradient)
    exact = with_gradients(plain, [x.double() for x in inputs], gradient.double())
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        assert error(mine, right) < 2 * max(error(other, right), torch.finfo(dtype).eps)


# What a kernel reads and then writes.
IN_PLACE = {("unasked", "by_q"), ("unasked", "by_reach")}
OF_EACH = {
    "state space's heads": [(short_filters, "_filtered")],
    "state space's steps": [(state_space_programs, "stepped")],
    "state space's states": [(state_space_programs, "walked")],
    "state space's reads": [(state_space_programs, "read")],
    "state space's norm": [(gated_norm, "_forward")],
    "state space's norm back": [(gated_norm, "_backward")],
    "state space's states back": [(state_space_backward, "walked_back")],
    "state space's updates back": [(state_space_backward, "ungiven")],
    "state space's reads back": [(state_space_backward, "unasked")],
    "state space's steps back": [(state_space_backward, "unstepped")],
    "state space's heads back": [
        (short_filters, name) for name in ("_by_sums", "_by_tokens", "_by_filters")
    ],
}


def test_kernels_are_given_and_hold_what_the_planner_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch reads sums of gradients by filters and by the norm's weight once more. What the forward
    gives is saved, and counted as such.
    """
    space = StateSpace(heads=24, groups=2)
    model = tiny_model(layers=1, state_space=space.model_dump(), max_sequence_length=512)
    training = tiny_training(2, sequence_length=320, precision="bf16")
    shape = RankShape(model, training, Strategy(dp=1, micro_batch=2), fused=True)
    counting = in_place_of(OF_EACH, IN_PLACE, monkeypatch)
    values, *others = _inputs(space, (2, 320), torch.bfloat16)
    weight = random(7, space.width, dtype=torch.bfloat16)
    inputs = [values.clone(), values, *others[:6], weight, *others[6:]]
    norm = Norm(EPSILON, kernels=_library())
    leaves = [x.requires_grad_() for x in inputs]
    forward, backward = priced.state_space(shape)
    held = priced.forward_bytes(shape), priced.backward_bytes(shape)
    made, gradient = list[Tensor](), torch.empty_like(values)

    for operators, most, run in (
        (
            forward,
            held[0] + gradient.nbytes,
            lambda: made.append(made_again(partial(gated, space, norm), *leaves)),
        ),
        (backward, held[1], lambda: torch.autograd.grad(made.pop(), leaves, gradient)),
    ):
        with Counted() as counted:
            run()
        assert most == pytest.approx(counted.peak, rel=0.06)
        for stream in (op for op in operators if isinstance(op, Stream)):
            stand_ins = counting[stream.name]
            nbytes = sum(sum(one.nbytes) for one in stand_ins)
            assert nbytes == pytest.approx(stream.nbytes, rel=0.06), stream.name
            for one in stand_ins:
                one.nbytes.clear()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "space", [GRANITE, GROUPS, WIDE, DEEP], ids=["64", "128 and 64", "128", "256"]
)
@pytest.mark.parametrize("length", [64, 1000])
def test_a_gpu_errs_as_plain_torch_in_bf16(space: StateSpace, length: int) -> None:
    for mine, theirs, right in zip(*_both(space, (2, length), torch.bfloat16), strict=True):
        assert error(mine, right) < 4 * max(error(theirs, right), 2**-8)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_again() -> None:
    first, second = (_both(GRANITE, (1, 300), torch.bfloat16)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
