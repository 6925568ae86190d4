"""Products in 8 bits: what is lost, on every device, and that runs with them train."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import cache

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.capabilities.native import gpu_refusal, native_refusal
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import LEAST_LARGEST
from bigplan.placement import Tier
from bigplan.runtime.layers.products import Products
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.linear.eight_bits import GRADIENTS, VALUES, EightBits, cast
from bigplan.spec.catalog import find_cluster
from tests.examples import examples
from tests.runtime.linear.eight_bits_ranks import (
    EXPERTS,
    LAYOUTS,
    OF_EXPERTS,
    losses,
    plan,
    run_rank,
)
from tests.runtime.plans import tiny_model, tiny_training
from tests.runtime.processes import start
from tests.runtime.rounding import BF16_LOSS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
runs = settings(max_examples=examples(20), derandomize=True, deadline=None)
# Half of a unit in the last place: E4M3 has three bits of mantissa, E5M2 two.
EIGHT_BIT_LOSS = 0.03  # 3% to 6% a rounding, averaged over the tokens of a batch
LOST = {VALUES: 2**-4, GRADIENTS: 2**-3}


@cache
def _alone(*, experts: bool = False, low: bool = True) -> list[float]:
    """Losses of one process that keeps all on its device: what every other run is held against."""
    return losses(plan(Strategy(dp=1), of=EXPERTS if experts else {}, fp8_gemms=low))


def _random(seed: int, *shape: int, device: str = "cpu") -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device, torch.bfloat16)


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS], ids=["e4m3", "e5m2"])
@given(st.integers(0, 9), st.sampled_from([1e-20, 1e-3, 1.0, 1e5]))
@runs
def test_a_cast_loses_no_more_than_its_mantissa_lacks(
    dtype: torch.dtype, seed: int, size: float
) -> None:
    x = _random(seed, 20, 30) * size
    rows, columns, scale = cast(x, dtype, rows=True, columns=True)
    assert rows is not None
    assert columns is not None
    assert torch.equal(columns.float(), rows.float().T)
    found, largest = rows.float() * scale, x.float().abs().max()
    smallest = largest * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).max
    lost = (found - x.float()).abs()
    assert bool((lost <= LOST[dtype] * x.float().abs().clamp_min(smallest) * (1 + 1e-6)).all())


def test_zeros_are_cast_by_a_finite_factor() -> None:
    rows, _, scale = cast(torch.zeros(4, 8), VALUES, rows=True, columns=False)
    assert rows is not None
    assert not rows.float().any()
    assert float(scale) == pytest.approx(LEAST_LARGEST / torch.finfo(VALUES).max)


def _by_hand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What 8 bits keep of x, in fp64."""
    rows, _, scale = cast(x.flatten(0, -2), dtype, rows=True, columns=False)
    assert rows is not None
    return (rows.double() * scale.double()).view(x.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("summed", [True, False])
def test_every_product_is_of_cast_factors(device: str, *, summed: bool) -> None:
    """A product, its input's and its weights' gradients, of two weights with one input."""
    x = _random(0, 2, 16, 32, device=device).requires_grad_()
    p = {
        "a.weight": _random(1, 48, 32, device=device),
        "b.weight": _random(2, 16, 32, device=device),
        "b.bias": _random(3, 16, device=device),
    }
    gradients = _random(4, 2, 16, 48, device=device), _random(5, 2, 16, 16, device=device)
    sums = Sums() if summed else None
    totals = {name: torch.ones(*p[name].shape, device=device) for name in ("a.weight", "b.weight")}
    leaves = p if summed else {name: t.clone().requires_grad_() for name, t in p.items()}
    outputs = Products(sums=sums, matrices=EightBits()).linears(leaves, ("a", "b"), x)
    small, weights = _by_hand(x.detach(), VALUES), [_by_hand(p[n], VALUES) for n in totals]
    exact = [F.linear(small, w) for w in weights]
    exact[1] += p["b.bias"].double()
    for output, value in zip(outputs, exact, strict=True):
        torch.testing.assert_close(output.double(), value, rtol=2**-7, atol=0.02)
    by = [_by_hand(gradient, GRADIENTS).flatten(0, 1) for gradient in gradients]
    asked = [x] if summed else [x, leaves["a.weight"], leaves["b.weight"]]
    if sums is not None:
        sums.open(totals, fresh=False)
    by_x, *by_weights = torch.autograd.grad(outputs, asked, gradients)
    expected = sum(g @ w for g, w in zip(by, weights, strict=True))
    torch.testing.assert_close(by_x.double().flatten(0, 1), expected, rtol=2**-6, atol=0.1)
    found = [totals[name] - 1 for name in totals] if summed else by_weights
    for total, gradient in zip(found, by, strict=True):
        value = gradient.T @ small.flatten(0, 1)
        torch.testing.assert_close(total.double(), value, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_run_in_eight_bits_is_near_one_in_sixteen(*, experts: bool) -> None:
    low, plain = _alone(experts=experts), _alone(experts=experts, low=False)
    assert low != plain
    assert low == pytest.approx(plain, rel=EIGHT_BIT_LOSS)
    assert low[-1] < low[0]


@pytest.mark.parametrize(
    ("recompute", "tier"),
    [*((each, Tier.HOST) for each in Recompute), (Recompute.NONE, Tier.NVME)],
)
def test_neither_tiers_nor_recomputation_change_a_bit(recompute: Recompute, tier: Tier) -> None:
    assert losses(plan(Strategy(dp=1), recompute, tier)) == _alone()


@pytest.mark.parametrize("recompute", list(Recompute))
def test_nor_do_they_with_experts(recompute: Recompute) -> None:
    one = losses(plan(Strategy(dp=1), recompute, Tier.HOST, of=EXPERTS))
    assert one == _alone(experts=True)


@pytest.mark.gpu
@pytest.mark.parametrize("of", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("kernels", ["generated", "torch"])
def test_a_gpu_casts_as_a_cpu_does(kernels: str, of: Mapping[str, object]) -> None:
    ours = plan(Strategy(dp=1), device="cuda", of=of, kernels=kernels)
    assert losses(ours) == pytest.approx(_alone(experts=bool(of)), rel=BF16_LOSS)


@pytest.mark.gpu
@pytest.mark.parametrize("of", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("recompute", list(Recompute))
def test_graphs_and_recomputation_change_no_bit_on_a_gpu(
    recompute: Recompute, of: Mapping[str, object]
) -> None:
    """Deterministic attention, as the same bits are asked for."""
    one, again = (
        plan(Strategy(dp=1), each, device="cuda", of=of, deterministic=True)
        for each in (Recompute.NONE, recompute)
    )
    captured = again.placement.model_copy(update={"captured": True})
    for each in (again, again.model_copy(update={"placement": captured})):
        assert losses(each) == losses(one)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of every layout of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    start(run_rank, folder, 2)
    every = [pickle.loads((folder / f"losses.{rank}").read_bytes()) for rank in range(2)]
    assert every[0] == every[1]
    return every[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_are_as_one(ranks: dict[str, list[float]], layout: str) -> None:
    """Tensor-parallel ranks have scales of their own parts; others cast what one rank casts."""
    near = EIGHT_BIT_LOSS if layout == "tp2" else BF16_LOSS
    assert ranks[layout] == pytest.approx(_alone(), rel=near)


@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_so_they_are_with_experts(ranks: dict[str, list[float]], layout: str) -> None:
    near = EIGHT_BIT_LOSS if layout.endswith("tp2") else BF16_LOSS
    assert ranks[layout] == pytest.approx(_alone(experts=True), rel=near)


def test_sides_that_tensor_cores_do_not_take_are_refused() -> None:
    training = tiny_training(1, precision="bf16", fp8_gemms=True)
    assert native_refusal(tiny_model(), training, Strategy(dp=1)) is None
    told = native_refusal(tiny_model(ffn=72), training, Strategy(dp=1))
    assert told is not None
    assert "products in fp8 have sides that divide by 16, and ffn / tp 1 is 72" in told
    told = native_refusal(tiny_model(ffn=48), training, Strategy(dp=1, tp=2))
    assert told is not None
    assert "ffn / tp 2 is 24, kv_heads x head_dim / tp 2 is 8" in told


def test_experts_in_8_bits_that_do_not_run_are_refused() -> None:
    training = tiny_training(1, precision="bf16", fp8_gemms=True)
    assert native_refusal(tiny_model(**EXPERTS), training, Strategy(dp=1)) is None
    half = training.model_copy(update={"precision": "fp16"})
    told = native_refusal(tiny_model(**EXPERTS), half, Strategy(dp=1))
    assert told is not None
    assert "give bf16, and precision is fp16: use precision bf16" in told
    gated = tiny_model(**EXPERTS, shared_gate=True)
    told = native_refusal(gated, training, Strategy(dp=1))
    assert told is not None
    assert "the score of shared_gate is 1" in told
    told = native_refusal(tiny_model(**{**EXPERTS, "shared_ffn": 40}), training, Strategy(dp=1))
    assert told is not None
    assert "shared_ffn / tp 1 is 40" in told
    gpus = {name: find_cluster(name).group.gpu for name in ("h200-1x", "hgx-b200", "dgx-a100-80g")}
    for name, gpu in gpus.items():
        told = gpu_refusal(gpu, gated, training)
        assert (told is None) == (name == "h200-1x")
        assert told is None or "run on compute capability 9 alone (H100, H200" in told
        assert gpu_refusal(gpu, tiny_model(), training) is None
