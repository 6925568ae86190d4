"""`optimise`: modules compute the same, and everything around them sees what it saw before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bigplan.kernels
from bigplan.errors import InputError
from bigplan.kernels import optimised as optimising
from bigplan.kernels.benchmark.cases import GptBlock
from bigplan.kernels.fusion.graph import LAYOUT
from bigplan.kernels.here import runs_kernels
from bigplan.kernels.optimised import optimise
from tests.kernels.generated import (
    DEVICE,
    LlamaBlock,
    ResidualBlock,
    both_ways,
    error,
    every_operator_generated,
    random,
    tables,
)

# fp32 sums of some hundred terms in another order, through a dozen operators.
FP32 = 1e-5


@pytest.fixture(params=["generated", "torch"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By generated kernels, and by torch's operators as where there is no Triton."""
    if request.param == "generated":
        if not runs_kernels({DEVICE}):
            pytest.skip("needs Triton")
        with every_operator_generated():
            yield "generated"
    else:
        monkeypatch.setattr(optimising, "runs_kernels", lambda devices: False)
        yield "torch"


def _compare(ours: nn.Module, plain: nn.Module, *inputs: Tensor) -> None:
    x = inputs[0].detach().requires_grad_()
    gradient = random(7, *plain(*inputs).shape)
    results = []
    for module in (ours, plain):
        result = module(x, *inputs[1:])
        wanted = [x, *module.parameters()]
        results.append([result.detach(), *torch.autograd.grad(result, wanted, gradient)])
    for one, other in zip(*results, strict=True):
        assert error(one, other.double()) < FP32


def test_a_gpt_block(way: str) -> None:
    block = GptBlock(32, 4).to(DEVICE)
    fused = optimise(block)
    _compare(fused, block, random(0, 2, 7, 32))
    (plan,) = fused.kernels.plans
    assert bool(fused.kernels.kernels) == (way == "generated")
    assert any(unit.fused for unit in plan.cover.units)


def test_a_llama_block(way: str) -> None:
    block = LlamaBlock().to(DEVICE)
    fused = optimise(block)
    _compare(fused, block, random(0, 2, 6, 32), *tables(6, 8))
    forward = [u for u in fused.kernels.plans[0].cover.units if not u.members[0].backward]
    assert any("cat" in unit.name and "mul" in unit.name for unit in forward if unit.fused)


def test_buffers_change_as_they_would(way: str) -> None:
    del way
    torch.manual_seed(0)
    block, twin = ResidualBlock().to(DEVICE), ResidualBlock().to(DEVICE)
    twin.load_state_dict(block.state_dict())
    fused = optimise(block)
    x = random(0, 3, 4, 5, 5)
    for _ in range(2):
        a, b = fused(x), twin(x)
        assert error(a.detach(), b.detach().double()) < FP32
    for one, other in zip(fused.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(one.double(), other.double(), atol=1e-6)
    assert twin.norm_1.num_batches_tracked == 2
    fused.eval()
    twin.eval()
    with torch.no_grad():
        assert error(fused(x), twin(x).double()) < FP32


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the views that are made."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func.overloadpacket.__name__ in LAYOUT
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not runs_kernels({DEVICE}), reason="needs Triton")
def test_kernels_take_tensors_without_views_of_them() -> None:
    block = ResidualBlock().to(DEVICE)
    with every_operator_generated():
        fused = optimise(block)
        with torch.no_grad():
            fused(random(0, 3, 4, 5, 5))
    with torch.no_grad(), _Views() as views:  # type: ignore[no-untyped-call]
        fused(random(0, 3, 4, 5, 5))
    assert views.made == 4, "the new means and variances of two norms, which the module gets"


@pytest.mark.parametrize("first", [0, 1])
def test_kernels_begin_where_a_part_of_a_tensor_does(first: int) -> None:
    def parts(x: Tensor) -> Tensor:
        early, late = x.chunk(2, -1)
        return F.gelu(early) * late.sigmoid() + x[:, 2:6].expand(2, -1, -1)

    for ours, expected in both_ways(parts, random(0, 4, 8)[first:]):
        assert error(ours, expected) < FP32


def test_a_parameter_that_is_another_one_later() -> None:
    block = GptBlock(32, 4).to(DEVICE)
    fused, x = optimise(block), random(0, 1, 3, 32)
    fused(x)
    name, layer = next((n, m) for n, m in block.named_modules() if isinstance(m, nn.Linear))
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    assert error(fused(x).detach(), block(x).detach().double()) < FP32, name
    layer.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    result = fused(x)
    assert error(result.detach(), block(x).detach().double()) < FP32
    result.sum().backward()
    assert layer.weight.grad is None


def test_it_is_a_module_like_the_one_before() -> None:
    block = GptBlock(32, 4).to(DEVICE)
    fused = optimise(block)
    assert isinstance(fused, GptBlock)
    assert list(fused.state_dict()) == list(block.state_dict())
    assert all(a is b for a, b in zip(fused.parameters(), block.parameters(), strict=True))
    x = random(0, 1, 3, 32)
    before = fused(x)
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)
    fused(x).square().sum().backward()
    optimizer.step()
    after = fused(x)
    assert not torch.equal(before, after)
    assert error(after.detach(), block(x).detach().double()) < FP32
    assert bigplan.kernels.optimise is optimise


def test_other_shapes_are_planned_when_they_come() -> None:
    block = GptBlock(32, 4).to(DEVICE)
    fused = optimise(block)
    for length in (3, 5, 3):
        x = random(length, 1, length, 32)
        assert error(fused(x).detach(), block(x).detach().double()) < FP32
    assert len(fused.kernels.plans) == 2


def test_torch_compile_around_it() -> None:
    block = GptBlock(32, 4).to(DEVICE)
    model = nn.Sequential(nn.Linear(32, 32).to(DEVICE), optimise(block))
    x = random(0, 1, 4, 32)
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    result = compiled(x)
    assert error(result.detach(), expected.detach().double()) < FP32
    result.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_examples_are_planned_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.device("meta"):
        block = GptBlock(1600, 25).bfloat16()
    fused = optimise(block, [((8, 1024, 1600), torch.bfloat16)], gpu="a100-sxm4-80gb")
    (plan,) = fused.kernels.plans
    sides = {unit.members[0].backward for unit in plan.cover.units if unit.fused}
    assert sides == {False, True}
    assert plan.kept_bytes > 8 * 1024 * 1600 * 2


def test_what_no_kernel_can_do_stays_torchs(way: str) -> None:
    del way

    def function(x: Tensor, index: Tensor) -> Tensor:
        return F.dropout(torch.cumsum(x, 0), 0.0)[index].double().exp().float() + x.sort(-1)[0][:1]

    x, index = random(0, 6, 8), torch.tensor([1, 3], device=DEVICE)
    leaf = x.detach().requires_grad_()
    ours, plain = optimise(function)(leaf, index), function(x, index)
    assert error(ours.detach(), plain.double()) < FP32
    ours.sum().backward()
    assert leaf.grad is not None


def test_two_backwards_of_one_forward() -> None:
    x = random(0, 4, 8).requires_grad_()
    result = optimise(lambda y: F.silu(y) * y)(x)
    first = torch.autograd.grad(result.sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(result.sum(), x)[0])


def test_errors_say_what_to_do() -> None:
    outside = random(0, 4)
    with pytest.raises(InputError, match="register it as a buffer"):
        optimise(lambda x: x * outside)(random(1, 4).requires_grad_())
    with pytest.raises(InputError, match="shipped:"):
        optimise(F.relu, gpu="voodoo")
