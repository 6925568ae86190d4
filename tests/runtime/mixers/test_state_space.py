"""The state space in chunks is the recurrence, and costs what the planner counts."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, starmap

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bigplan.graph import state_space as priced
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime.mixers.made_again import made_again
from bigplan.runtime.mixers.state_space import Norm, gated
from bigplan.spec.mixers import StateSpace
from tests.runtime.mixers.counted_bytes import Counted
from tests.runtime.plans import tiny_model, tiny_training

EPSILON = 1e-6
SPACE = StateSpace(heads=6, head_dim=5, groups=2, state=7, taps=3, least_step=0.1, most_step=0.9)


def _inputs(
    space: StateSpace, size: tuple[int, int], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(0)
    read = [(*size, n) for n in (*(space.width,) * 2, *(space.keys,) * 2, space.heads)]
    others = [(n,) for n in (*(space.heads,) * 3, *(space.width,) * space.norm)]
    channels = space.width, space.keys, space.keys
    filters = [(n, space.taps) for n in channels]
    biases = [(n,) for n in channels] if space.convolution_bias else []
    shapes = (*read, *others, *filters, *biases)
    made = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in made]


def _run(space: StateSpace, *inputs: Tensor, begins: Tensor | None = None) -> Tensor:
    return made_again(partial(gated, space, Norm(EPSILON), begins=begins), *inputs)


def _recurrent(space: StateSpace, *inputs: Tensor) -> Tensor:
    """Token by token, of heads side by side, as the paper writes it."""
    z, *of_heads, dt = space.scales or (1.0,) * 5
    gates, *vectors, steps, log_decay, offset, skip = inputs[:8]
    weights, others = inputs[8 : 8 + space.norm], inputs[8 + space.norm :]
    filters, biases = others[:3], others[3:] or (None,) * 3
    gates, steps = z * gates, dt * steps
    vectors = [scale * x for scale, x in zip(of_heads, vectors, strict=True)]

    def convolved(x: Tensor, own: Tensor, bias: Tensor | None) -> Tensor:
        padded = F.pad(x.mT, (space.taps - 1, 0))
        return F.silu(F.conv1d(padded, own[:, None], bias, groups=len(own))).mT

    x, b, c = starmap(convolved, zip(vectors, filters, biases, strict=True))
    x = torch.unflatten(x, -1, (space.heads, -1))
    b, c = (torch.unflatten(y, -1, (space.groups, -1)) for y in (b, c))
    b, c = (y.repeat_interleave(space.heads // space.groups, dim=2) for y in (b, c))
    steps = F.softplus(steps + offset).clamp(space.least_step, space.most_step)
    fades = (-log_decay.exp() * steps).exp()
    state, read = torch.zeros(1, dtype=x.dtype), []
    for t in range(x.shape[1]):
        added = steps[:, t, :, None, None] * b[:, t, :, :, None] * x[:, t, :, None]
        state = state * fades[:, t, :, None, None] + added
        read.append((c[:, t, :, :, None] * state).sum(-2) + skip[:, None] * x[:, t])
    whole = torch.stack(read, dim=1).flatten(2) * F.silu(gates)
    if not weights:
        return whole
    parts = torch.unflatten(whole, -1, (space.groups, -1))
    parts = parts / (parts.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return parts.flatten(2) * weights[0]


SCALES = (0.5, 2.0, 0.75, 1.5, 0.25)


@pytest.mark.parametrize("length", [1, 64, 150])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"convolution_bias": False},
        {"norm": False},
        {"scales": SCALES},
        {"norm": False, "scales": SCALES, "convolution_bias": False},
    ],
)
def test_chunks_are_the_recurrence_with_its_gradients(
    length: int, changes: dict[str, object]
) -> None:
    space = SPACE.model_copy(update=changes)
    inputs = _inputs(space, (2, length))
    ours, plain = _run(space, *inputs), _recurrent(space, *inputs)
    torch.testing.assert_close(ours, plain)
    gradient = torch.randn_like(plain)
    by_ours, by_plain = (torch.autograd.grad(y, inputs, gradient) for y in (ours, plain))
    torch.testing.assert_close(by_ours, by_plain)


def test_documents_are_kept_apart() -> None:
    """That begin at the edge of a chunk, end there, are a token long, or longer than chunks."""
    cuts, length = ([0, 5, 6, 64, 100, 230], [0, 63, 65, 192, 229, 230]), 230
    inputs = _inputs(SPACE, (2, length))
    begins = [[a for a, b in pairwise(own) for _ in range(a, b)] for own in cuts]
    ours = _run(SPACE, *inputs, begins=torch.tensor(begins, dtype=torch.int32))
    alone = torch.empty_like(ours)
    for sequence, own in enumerate(cuts):
        for a, b in pairwise(own):
            parts = (x[sequence : sequence + 1, a:b] if x.ndim == 3 else x for x in inputs)
            alone[sequence, a:b] = _recurrent(SPACE, *parts)[0]
    torch.testing.assert_close(ours, alone)
    gradient = torch.randn_like(alone)
    by_ours, by_alone = (torch.autograd.grad(y, inputs, gradient) for y in (ours, alone))
    torch.testing.assert_close(by_ours, by_alone)


def test_no_gradient_is_made_that_nobody_asks_for() -> None:
    inputs = _inputs(SPACE, (1, 5))
    for x in inputs[5:]:
        x.requires_grad_(False)
    torch.autograd.backward(_run(SPACE, *inputs).sum())
    assert all((x.grad is not None) == x.requires_grad for x in inputs)


def _shape(space: StateSpace, size: tuple[int, int], **changes: object) -> RankShape:
    model = tiny_model(layers=1, state_space=space.model_dump(), max_sequence_length=512)
    training = tiny_training(size[0], sequence_length=size[1], **changes)
    return RankShape(model, training, Strategy(dp=1, micro_batch=size[0]))


def _counted(operators: tuple[Operator, ...]) -> tuple[float, float, int]:
    """FLOPs of products, bytes of all else, and all launches."""
    gemms = [op for op in operators if isinstance(op, Gemm)]
    streams = [op for op in operators if isinstance(op, Stream)]
    launches = sum(op.launches for op in gemms) + sum(op.launches for op in streams)
    return sum(op.flops for op in gemms), sum(op.nbytes for op in streams), launches


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("space", "size", "precision"),
    [
        ({"heads": 12, "state": 64}, (1, 320), "bf16"),
        ({"heads": 8, "head_dim": 32, "groups": 2, "taps": 3}, (2, 150), "fp32"),
        ({"heads": 12, "state": 64, "norm": False}, (1, 320), "bf16"),
        ({"heads": 8, "head_dim": 32, "groups": 2, "taps": 3, "scales": SCALES}, (2, 150), "fp32"),
    ],
)
def test_it_moves_multiplies_and_holds_what_the_planner_counts(
    space: dict[str, object], size: tuple[int, int], precision: str, apart: bool
) -> None:
    spec = StateSpace.model_validate(space)
    shape = _shape(spec, size, precision=precision, isolate_documents=apart)
    begins = torch.zeros(size, dtype=torch.int32) if apart else None
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    inputs = [x.detach().requires_grad_() for x in _inputs(spec, size, dtype)]
    gradient = torch.randn(*size, spec.width, dtype=dtype)
    held = priced.forward_bytes(shape), priced.backward_bytes(shape)
    expected = priced.state_space(shape)
    with FlopCounterMode(display=False) as flops, Counted() as counted:
        output = _run(spec, *inputs, begins=begins)
    with FlopCounterMode(display=False) as flops_back, Counted() as back:
        torch.autograd.backward(output, gradient)
    for counter, run, most, operators in zip(
        (flops, flops_back), (counted, back), held, expected, strict=True
    ):
        products, nbytes, launches = _counted(operators)
        assert counter.get_total_flops() == products
        assert run.nbytes == pytest.approx(nbytes, rel=0.1)
        assert run.launches == pytest.approx(launches, rel=0.2)
        # Without a norm the planner takes as much, which its backward alone needs.
        assert run.peak < most < (1.5 if spec.norm else 1.6) * run.peak
