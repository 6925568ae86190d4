"""Kernels of the gated delta rule against plain torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from bigplan.graph import delta_rule as priced
from bigplan.graph.operators import Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.kernels.handwritten import delta_rule as kernels
from bigplan.kernels.handwritten import (
    delta_rule_backward,
    delta_rule_norms,
    delta_rule_programs,
    short_filters,
)
from bigplan.mechanics import rule_in_kernels
from bigplan.runtime.mixers.delta_rule import InKernels, in_torch
from bigplan.spec.mixers import GatedDeltaRule
from tests.kernels.counting import in_place_of
from tests.kernels.generated import DEVICE, error, random, with_gradients
from tests.runtime.mixers.counted_bytes import Counted
from tests.runtime.plans import tiny_model, tiny_training

EPSILON = 1e-6
BY_DECAYS = (10, 11)  # gradients by A_log and dt_bias, after the result and nine others
# Two value heads of a key head, keys wider than values, a last chunk that is not full.
RULE = GatedDeltaRule(key_heads=1, value_heads=2, key_dim=24, value_dim=64, taps=3, rate_scale=2)
QWEN = GatedDeltaRule(key_heads=2, value_heads=4)
NARROW = GatedDeltaRule(key_heads=1, value_heads=2, key_dim=64, value_dim=128, taps=3)
OLMO = GatedDeltaRule(key_heads=2, value_heads=2, key_dim=96, value_dim=192, rate_scale=2)


def _inputs(rule: GatedDeltaRule, size: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    heads = (keys, keys, values, values, rule.value_heads, rule.value_heads)
    shapes: list[tuple[int, ...]] = [(*size, n) for n in heads]
    shapes += [(n, rule.taps) for n in (keys, keys, values)]
    shapes += [(rule.value_heads,), (rule.value_heads,), (rule.value_dim,)]
    return [random(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def _both(
    rule: GatedDeltaRule, size: tuple[int, int], dtype: torch.dtype, *, apart: bool = False
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The result and all gradients: of the kernels, of plain torch, and exactly.

    `apart`: where tokens 10, 11 and 71 begin a document.
    """
    begins = None
    if apart:
        token = torch.arange(size[1], device=DEVICE)
        row = (token >= 10) * 10 + (token >= 11) + (token >= 71) * 60
        begins = row.int().expand(size).contiguous()
    inputs = _inputs(rule, size, dtype)
    gradient = random(99, *inputs[3].shape, dtype=dtype)
    ours, plain = (
        with_gradients(how, inputs, gradient)
        for how in (
            partial(InKernels.apply, rule, EPSILON, begins),
            partial(in_torch, rule, EPSILON, begins),
        )
    )
    exact = with_gradients(
        partial(in_torch, rule, EPSILON, begins), [x.double() for x in inputs], gradient.double()
    )
    return ours, plain, exact


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's products of fp32 are tf32")
@pytest.mark.parametrize(
    ("dtype", "batch", "apart"),
    [(torch.float32, 2, False), (torch.float16, 1, True)],
    ids=["fp32", "fp16, documents"],
)
def test_kernels_err_as_plain_torch(dtype: torch.dtype, batch: int, *, apart: bool) -> None:
    """The interpreter has no products of bf16. Both round equally often; in fp16 plain torch does
    for its convolution and norm, kernels for the factors of products. In fp32 kernels err up to 3.6
    times as much, of eight draws. The gradients by A_log and dt_bias are sums over all tokens,
    which cancel: there they err 3 to 6.5 times as much.
    """
    for place, each in enumerate(zip(*_both(RULE, (batch, 80), dtype, apart=apart), strict=True)):
        (mine, theirs, right), times = each, 8 if place in BY_DECAYS else 4
        assert error(mine, right) < times * max(error(theirs, right), torch.finfo(dtype).eps)


@pytest.mark.skipif(DEVICE != "cpu", reason="one case is enough, in the interpreter")
def test_no_gradient_is_made_that_nobody_asks_for() -> None:
    inputs = _inputs(RULE, (1, 5), torch.float32)
    asked = tuple(i < 6 for i in range(len(inputs)))
    how = kernels.How(RULE, EPSILON)
    found = kernels.backward(how, inputs[3], asked, *inputs)
    assert [x is not None for x in found] == list(asked)


def test_what_kernels_do_not_take_is_plain_torch() -> None:
    assert rule_in_kernels(2, (128, 64), 4)
    for size, widths, taps in ((4, (128, 128), 4), (2, (128, 32), 4), (2, (128, 128), 9)):
        assert not rule_in_kernels(size, widths, taps)


# What a kernel reads and then writes.
IN_PLACE = {
    ("walked", "own"),
    ("_normed_back", "by_x"),
    ("walked_back", "by_own"),
    ("unsolved", "by_k"),
    ("uninverted", "by_k"),
}
OF_EACH = {
    "delta rule's heads": [(short_filters, "_filtered")],
    "delta rule's system": [(delta_rule_programs, "solved")],
    "delta rule's states": [(delta_rule_programs, "walked")],
    "delta rule's reads": [(delta_rule_programs, "read")],
    "delta rule's norm and gate": [(delta_rule_norms, "_normed")],
    "delta rule's norm and gate back": [(delta_rule_norms, "_normed_back")],
    "delta rule's reads by both": [(delta_rule_backward, "unread")],
    "delta rule's states back": [(delta_rule_backward, "walked_back")],
    "delta rule's system back": [(delta_rule_backward, "unsolved")],
    "delta rule's inverse back": [(delta_rule_backward, "uninverted")],
    "delta rule's heads back": [
        (short_filters, name) for name in ("_by_sums", "_by_tokens", "_by_filters")
    ],
}


def test_kernels_are_given_and_hold_what_the_planner_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for a rate and a decay a head and token, and sums of filters' and norms' gradients.

    What the forward gives is saved, and counted as such.
    """
    rule = GatedDeltaRule(key_heads=2, value_heads=6, key_dim=64, value_dim=128)
    model = tiny_model(layers=1, delta_rule=rule.model_dump(), max_sequence_length=512)
    training = tiny_training(2, sequence_length=320, precision="bf16")
    shape = RankShape(model, training, Strategy(dp=1, micro_batch=2), fused=True)
    counting = in_place_of(OF_EACH, IN_PLACE, monkeypatch)
    inputs = _inputs(rule, (2, 320), torch.bfloat16)
    forward, backward = priced.delta_rule(shape)
    held = priced.forward_bytes(shape), priced.backward_bytes(shape)
    asked, gradient = (True,) * len(inputs), torch.empty_like(inputs[3])
    how = kernels.How(rule, EPSILON)

    for operators, most, run in (
        (forward, held[0] + gradient.nbytes, lambda: kernels.forward(how, *inputs)),
        (backward, held[1], lambda: kernels.backward(how, gradient, asked, *inputs)),
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
@pytest.mark.parametrize("rule", [QWEN, NARROW, OLMO], ids=["128", "64 and 128", "96 and 192"])
@pytest.mark.parametrize("length", [64, 1000])
@pytest.mark.parametrize("apart", [False, True], ids=["", "documents"])
def test_a_gpu_errs_as_plain_torch_in_bf16(
    rule: GatedDeltaRule, length: int, *, apart: bool
) -> None:
    every = _both(rule, (2, length), torch.bfloat16, apart=apart)
    for place, (mine, theirs, right) in enumerate(zip(*every, strict=True)):
        times = 8 if place in BY_DECAYS else 4  # as in the interpreter
        assert error(mine, right) < times * max(error(theirs, right), 2**-8)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_again() -> None:
    first, second = (_both(QWEN, (1, 300), torch.bfloat16)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
