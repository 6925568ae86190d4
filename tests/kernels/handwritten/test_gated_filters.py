"""Kernels of the gated short convolution against plain torch, on a GPU or in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from bigplan.graph import convolution as priced
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.kernels.handwritten import gated_filters
from bigplan.runtime.mixers.convolution import _in_kernels, convolved
from bigplan.spec.step import StepOp
from tests.kernels.generated import DEVICE, error, random, with_gradients
from tests.runtime.plans import tiny_model, tiny_training

# A few roundings of fp32; in bf16 what is rounded once.
DTYPE, CLOSE = (torch.float32, 1e-6) if DEVICE == "cpu" else (torch.bfloat16, 2**-8)


@pytest.mark.parametrize(("taps", "bias"), [(1, False), (3, True)])
def test_the_kernels_are_the_convolution_with_its_gradients(taps: int, *, bias: bool) -> None:
    """Neither tokens nor channels fill whole programs."""
    shapes = [(2, 70, 72)] * 3 + [(72, taps)] + [(72,)] * bias
    inputs = [random(i, *shape, dtype=DTYPE) for i, shape in enumerate(shapes)]
    gradient = random(9, 2, 70, 72, dtype=DTYPE)

    def plain(*x: Tensor) -> Tensor:
        return convolved((x[0], x[1], x[2]), x[3], x[4] if bias else None)

    ours = with_gradients(_in_kernels, inputs, gradient)
    exact = with_gradients(plain, [x.double() for x in inputs], gradient.double())
    for mine, right in zip(ours, exact, strict=True):
        assert error(mine, right) < CLOSE


def test_kernels_move_what_the_planner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(convolution={"taps": 4}, max_sequence_length=512)
    training = tiny_training(2, sequence_length=320, precision="bf16")
    shape = RankShape(model, training, Strategy(dp=1, micro_batch=2), fused=True)
    (step,) = shape.steps(StepOp.CONVOLUTION)
    given: list[int] = []

    class Counting:
        """In place of a kernel."""

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *x, **_: given.append(sum(one.nbytes for one in set(x) if _tensor(one)))

    monkeypatch.setattr(gated_filters, "_convolved", Counting())
    monkeypatch.setattr(gated_filters, "_convolved_backward", Counting())
    vectors = gated_filters.Vectors(*(random(i, 2, 320, model.hidden).bfloat16() for i in range(3)))
    filters = random(3, model.hidden, 4).bfloat16()
    gated_filters.convolved(vectors, filters, None)
    gated_filters.convolved_backward(vectors, filters, None, vectors.value.clone(), asked=True)
    for stream, nbytes in zip(priced.convolved(shape, step), given, strict=True):
        assert stream.nbytes == pytest.approx(nbytes, rel=0.06)


def _tensor(x: object) -> bool:
    return isinstance(x, Tensor)
