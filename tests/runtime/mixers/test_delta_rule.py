"""The gated delta rule in chunks is the recurrence, and costs what the planner counts."""

from __future__ import annotations

from itertools import pairwise, starmap

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bigplan.graph import delta_rule as priced
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime.mixers.delta_rule import gated, in_torch
from bigplan.spec.mixers import GatedDeltaRule
from tests.runtime.mixers.counted_bytes import Counted
from tests.runtime.plans import tiny_model, tiny_training

EPSILON = 1e-6
RULE = GatedDeltaRule(key_heads=2, value_heads=4, key_dim=6, value_dim=5, taps=3)


def _inputs(
    rule: GatedDeltaRule, size: tuple[int, int], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(0)
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    heads = [(*size, n) for n in (keys, keys, values, values, *(rule.value_heads,) * 2)]
    filters = [(n, rule.taps) for n in (keys, keys, values)]
    others = [(n,) for n in (rule.value_heads, rule.value_heads, rule.value_dim)]
    made = (torch.randn(shape, dtype=torch.float64) for shape in (*heads, *filters, *others))
    return [x.to(dtype).requires_grad_() for x in made]


def _recurrent(rule: GatedDeltaRule, *inputs: Tensor) -> Tensor:
    """Token by token, of heads side by side, as the paper writes it."""
    q, k, v, gates, rates, decays, *filters, log_decay, offset, weight = inputs
    length = v.shape[1]

    def convolved(x: Tensor, own: Tensor) -> Tensor:
        padded = F.pad(x.mT, (rule.taps - 1, 0))
        return F.silu(F.conv1d(padded, own[:, None], groups=len(own))).mT

    q, k, v = starmap(convolved, zip((q, k, v), filters, strict=True))
    q, k = (torch.unflatten(x, -1, (rule.key_heads, -1)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(rule.value_heads_per_key, dim=2) for x in (q, k))
    v, gates = (torch.unflatten(x, -1, (rule.value_heads, -1)) for x in (v, gates))
    fades = (-log_decay.exp() * F.softplus(decays + offset)).exp()
    state, read = torch.zeros(1, dtype=v.dtype), []
    for t in range(length):
        rate, key = rates[:, t].sigmoid()[..., None, None], k[:, t, :, :, None]
        state = state * fades[:, t, :, None, None]
        known = (key * state).sum(-2, keepdim=True)
        state = state + rate * key * (v[:, t, :, None] - known)
        read.append((q[:, t, :, :, None] * state).sum(-2) * rule.key_dim**-0.5)
    whole = torch.stack(read, dim=1)
    normed = whole / (whole.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return (weight * normed * F.silu(gates)).flatten(2)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_chunks_are_the_recurrence_with_its_gradients(length: int) -> None:
    inputs = _inputs(RULE, (2, length))
    ours, plain = in_torch(RULE, EPSILON, None, *inputs), _recurrent(RULE, *inputs)
    torch.testing.assert_close(ours, plain)
    gradient = torch.randn_like(plain)
    by_ours, by_plain = (torch.autograd.grad(y, inputs, gradient) for y in (ours, plain))
    torch.testing.assert_close(by_ours, by_plain)


def test_documents_are_kept_apart() -> None:
    """That begin at the edge of a chunk, end there, are a token long, or longer than chunks."""
    cuts, length = ([0, 5, 6, 64, 100, 230], [0, 63, 65, 192, 229, 230]), 230
    inputs = _inputs(RULE, (2, length))
    begins = [[a for a, b in pairwise(own) for _ in range(a, b)] for own in cuts]
    places = torch.tensor(begins, dtype=torch.int32)
    ours = in_torch(RULE, EPSILON, places, *inputs)
    alone = torch.empty_like(ours)
    for sequence, own in enumerate(cuts):
        for a, b in pairwise(own):
            heads = (x[sequence : sequence + 1, a:b] for x in inputs[:6])
            alone[sequence, a:b] = _recurrent(RULE, *heads, *inputs[6:])[0]
    torch.testing.assert_close(ours, alone)
    gradient = torch.randn_like(alone)
    by_ours, by_alone = (torch.autograd.grad(y, inputs, gradient) for y in (ours, alone))
    torch.testing.assert_close(by_ours, by_alone)


def test_no_gradient_is_made_that_nobody_asks_for() -> None:
    inputs = _inputs(RULE, (1, 5))
    for x in inputs[6:]:
        x.requires_grad_(False)
    output = in_torch(RULE, EPSILON, None, *inputs)
    torch.autograd.backward(output.sum())
    assert all((x.grad is not None) == x.requires_grad for x in inputs)


def _shape(rule: GatedDeltaRule, size: tuple[int, int], **changes: object) -> RankShape:
    model = tiny_model(layers=1, delta_rule=rule.model_dump(), max_sequence_length=512)
    training = tiny_training(size[0], sequence_length=size[1], **changes)
    return RankShape(model, training, Strategy(dp=1, micro_batch=size[0]))


def _counted(operators: tuple[Operator, ...]) -> tuple[float, float, int]:
    """FLOPs of batched products, bytes of all else, and all launches."""
    gemms = [op for op in operators if isinstance(op, Gemm)]
    streams = [op for op in operators if isinstance(op, Stream)]
    flops = sum(op.flops for op in gemms if not op.name.startswith(priced.SYSTEM))
    launches = sum(op.launches for op in gemms) + sum(op.launches for op in streams)
    return flops, sum(op.nbytes for op in streams), launches


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("rule", "size", "precision"),
    [
        ({"key_heads": 2, "value_heads": 4, "key_dim": 32, "value_dim": 48}, (1, 320), "bf16"),
        ({"key_heads": 1, "value_heads": 3, "key_dim": 64, "value_dim": 32}, (2, 150), "fp32"),
    ],
)
def test_it_moves_multiplies_and_holds_what_the_planner_counts(
    rule: dict[str, int], size: tuple[int, int], precision: str, apart: bool
) -> None:
    spec = GatedDeltaRule.model_validate(rule)
    shape = _shape(spec, size, precision=precision, isolate_documents=apart)
    begins = torch.zeros(size, dtype=torch.int32) if apart else None
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    inputs = _inputs(spec, size, dtype)
    output = gated(spec, EPSILON, begins, *inputs)
    gradient = torch.randn_like(output)
    held = priced.forward_bytes(shape), priced.backward_bytes(shape)
    expected = priced.delta_rule(shape)
    with FlopCounterMode(display=False) as flops, Counted() as counted:
        output = in_torch(spec, EPSILON, begins, *inputs)
    with FlopCounterMode(display=False) as flops_back, Counted() as back:
        torch.autograd.backward(output, gradient)
    for counter, run, most, operators in zip(
        (flops, flops_back), (counted, back), held, expected, strict=True
    ):
        products, nbytes, launches = _counted(operators)
        assert counter.get_total_flops() == products
        assert run.nbytes == pytest.approx(nbytes, rel=0.15)
        assert run.launches == pytest.approx(launches, rel=0.2)
        assert run.peak < most < 1.5 * run.peak
