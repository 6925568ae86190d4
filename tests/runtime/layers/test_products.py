"""Weights' gradients that products add to fp32 sums, against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.add_product import add_product
from bigplan.runtime.layers.products import Factor, Products, linears
from bigplan.runtime.layers.sums import Sums

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PRECISIONS = [torch.bfloat16, torch.float16, torch.float32]
# Tokens, outputs, inputs: those of layers, and sizes of which kernels load no whole vectors.
SHAPES = [(256, 128, 64), (64, 96, 416), (1, 8, 24), (33, 17, 23), (257, 129, 65), (100, 2, 3)]
# Some hundred fp32 terms: unit roundoff 6e-8, times the root of their number where roundings are
# independent; tensor cores cut off instead of rounding. A gradient rounded to bf16 is off by 1e-3.
TOLERANCE = 1e-5
GUARD = 7.0  # before and behind the sum


@pytest.fixture(autouse=True, scope="module")
def _plain_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    yield
    torch.set_float32_matmul_precision(before)


def _random(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _apart(ours: Tensor, exact: Tensor) -> float:
    """Relative distance of whole tensors."""
    return float((ours.double() - exact).norm() / exact.norm())


def _product(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.double().T @ x.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0, 3, 4])
def test_a_sum_is_started_and_added_to(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], offset: int
) -> None:
    """Anywhere in a flat buffer, also where it is not aligned to a kernel's loads."""
    tokens, outputs, inputs = shape
    flat = torch.full((offset + outputs * inputs + 5,), GUARD, device=device)
    total = flat[offset:-5].view(outputs, inputs)
    total.fill_(torch.nan)  # a fresh sum's memory has held anything
    exact = torch.zeros(outputs, inputs, dtype=torch.float64, device=device)
    for number in range(3):
        gradient = _random(tokens + number, outputs, device=device, dtype=dtype)
        x = _random(tokens + number, inputs, device=device, dtype=dtype)
        add_product(total, gradient, x, fresh=number == 0)
        exact += _product(gradient, x)
        assert _apart(total, exact) < TOLERANCE
    assert bool((flat[:offset] == GUARD).all() and (flat[-5:] == GUARD).all())


@pytest.mark.parametrize("device", DEVICES)
def test_small_gradients_are_not_lost_in_a_large_sum(device: str) -> None:
    """1 + 2^-12 has no bf16: a sum that passes through 16 bits would stay at one."""
    total = torch.ones(16, 16, device=device)
    small = torch.full((1, 16), 2.0**-6, device=device, dtype=torch.bfloat16)
    for _ in range(8):
        add_product(total, small, small, fresh=False)
    assert torch.equal(total, torch.full_like(total, 1 + 8 * 2.0**-12))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fresh", [True, False])
def test_the_same_addition_gives_the_same_bits(
    device: str, dtype: torch.dtype, *, fresh: bool
) -> None:
    """Wherever the sum lies: plans put it into other buffers."""
    gradient = _random(512, 192, device=device, dtype=dtype)
    x = _random(512, 320, device=device, dtype=dtype)
    totals = [torch.ones(192, 320, device=device) for _ in range(3)]
    for total in totals:
        add_product(total, gradient, x, fresh=fresh)
    assert all(torch.equal(total, totals[0]) for total in totals)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_sum_is_added_to_in_place(dtype: torch.dtype, *, fresh: bool) -> None:
    """No temporary of the weight's size: the plan counts none."""
    total = torch.zeros(2048, 1024, device="cuda")
    gradient = _random(256, 2048, device="cuda", dtype=dtype)
    x = _random(256, 1024, device="cuda", dtype=dtype)
    add_product(total, gradient, x, fresh=fresh)  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product(total, gradient, x, fresh=fresh)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("fresh", [True, False])
def test_a_sum_is_added_to_on_the_stream_of_the_forward(dtype: torch.dtype, *, fresh: bool) -> None:
    """As a lane's thread asks for it: autograd's own thread must not run ahead of the stream."""
    late = _random(64, 48, device="cuda", dtype=dtype)
    gradient = _random(64, 32, device="cuda", dtype=dtype)
    p = {"a.weight": _random(32, 48, device="cuda", dtype=dtype)}
    total = torch.full((32, 48), torch.nan if fresh else 1.0, device="cuda")
    x, stream = torch.full_like(late, torch.nan), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

    def work() -> None:
        sums = Sums()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            x.copy_(late)
            leaf = x.requires_grad_()
            (output,) = Products(sums=sums).linears(p, ("a",), leaf)
            sums.open({"a.weight": total}, fresh=fresh)
            torch.autograd.grad(output, leaf, gradient)

    with ThreadPoolExecutor(1) as lane:
        lane.submit(work).result()
    stream.synchronize()
    assert _apart(total, _product(gradient, late) + (0.0 if fresh else 1.0)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_is_torchs_but_for_the_weights_gradient(
    device: str, dtype: torch.dtype, *, biased: bool
) -> None:
    x = _random(2, 24, 32, device=device, dtype=dtype).requires_grad_()
    weight = _random(48, 32, device=device, dtype=dtype)
    bias = _random(48, device=device, dtype=dtype).requires_grad_() if biased else None
    leaves = [x] if bias is None else [x, bias]
    gradient = _random(48, 2, 24, device=device, dtype=dtype).permute(1, 2, 0)  # not contiguous
    factors: list[tuple[Tensor, Tensor]] = []
    (ours,) = linears(x, [Factor(weight, bias, lambda *pair: factors.append(pair))])
    plain = F.linear(x, weight, bias)
    assert torch.equal(ours, plain)
    assert not factors
    pairs = (torch.autograd.grad(output, leaves, gradient) for output in (ours, plain))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs)  # products and sums in another order
    (by_output, by_weight) = factors[0]
    assert torch.equal(by_output, gradient.reshape(48, 48))
    assert torch.equal(by_weight, x.detach().reshape(48, 32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_by_a_common_input_are_added_up(device: str, dtype: torch.dtype) -> None:
    """Each in one product with the sum before it; 16 bits are rounded to once for each of them."""
    x = _random(2, 24, 32, device=device, dtype=dtype).requires_grad_()
    widths = (48, 16, 8)
    weights = [_random(width, 32, device=device, dtype=dtype) for width in widths]
    biases = [None, *(_random(w, device=device, dtype=dtype).requires_grad_() for w in widths[1:])]
    gradients = [_random(2, 24, width, device=device, dtype=dtype) for width in widths]
    got: list[tuple[Tensor, Tensor]] = []
    factors = [
        Factor(weight, bias, lambda *pair: got.append(pair))
        for weight, bias in zip(weights, biases, strict=True)
    ]
    outputs = linears(x, factors)
    leaves = [x, *(bias for bias in biases if bias is not None)]
    by_input, *by_bias = torch.autograd.grad(outputs, leaves, gradients)
    pairs = list(zip(gradients, weights, strict=True))
    exact = sum(gradient.double() @ weight.double() for gradient, weight in pairs)
    assert isinstance(exact, Tensor)
    assert _apart(by_input, exact) < (TOLERANCE if dtype == torch.float32 else 2.0**-8)
    for mine, gradient in zip(by_bias, gradients[1:], strict=True):
        assert _apart(mine, gradient.double().sum((0, 1))) < 2.0**-8
    assert all(
        torch.equal(pair[0], g.flatten(0, 1)) for pair, g in zip(got, gradients, strict=True)
    )


def test_a_weights_product_goes_to_its_own_sum() -> None:
    sums = Sums()
    p = {name: torch.randn(4, 6) for name in ("a.weight", "b.weight")}
    x = torch.randn(5, 6, requires_grad=True)
    a, b = Products(sums=sums).linears(p, ("a", "b"), x)
    output = a + 2 * b
    totals = {name: torch.full((4, 6), torch.nan) for name in ("a.weight", "b.weight", "c.weight")}
    sums.open(totals, fresh=True)
    torch.autograd.grad(output.sum(), x)
    once = x.detach().sum(0).expand(4, 6)
    torch.testing.assert_close(totals["a.weight"], once)
    torch.testing.assert_close(totals["b.weight"], 2 * once)
    assert totals["c.weight"].isnan().all()
    sums.close()
    assert not totals["c.weight"].any()


def test_sums_of_two_layers_start_apart() -> None:
    """The loss layer's own sum may be fresh when that of the table it shares is not."""
    own, table = torch.full((3,), torch.nan), torch.ones(3)
    sums = Sums()
    sums.open({"norm.weight": own}, fresh=True)
    sums.open({"embed_tokens.weight": table}, fresh=False)
    for _ in range(2):
        sums.add({"norm.weight": torch.ones(3), "embed_tokens.weight": torch.ones(3)})
    sums.close()
    assert own.tolist() == [2.0] * 3
    assert table.tolist() == [3.0] * 3
