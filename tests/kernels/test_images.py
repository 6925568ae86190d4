"""Convolutions in 16 bits run channels last, whatever order their images and weights have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigplan.kernels.fusion.fuse import tiles_of
from bigplan.kernels.fusion.graph import KernelGraph
from bigplan.kernels.fusion.keep import KeepPlan
from bigplan.kernels.optimised import optimise
from tests.kernels.generated import DEVICE, ResidualBlock, error, every_operator_generated, random

LAST: Any = torch.channels_last
BF16 = 2**-8  # a rounding


def _images(*shape: int) -> Tensor:
    return random(0, *(shape or (2, 4, 5, 3))).bfloat16()


def _results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    wanted = leaves
    if isinstance(function, nn.Module):
        wanted = [*leaves, *function.parameters()]
    # A copy, as functions may write into what they are given.
    result = function(*(leaf.clone() for leaf in leaves))
    gradient = random(1, *result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, wanted, gradient)]


def _same(function: Any, *inputs: Tensor) -> KeepPlan:
    """Compares values with fp64 and orders with torch's; returns the plan of the optimised one."""
    exact = copy.deepcopy(function).double() if isinstance(function, nn.Module) else function
    plain = _results(copy.deepcopy(function), *inputs)
    right = _results(exact, *(tensor.double() for tensor in inputs))
    with every_operator_generated():
        ours = optimise(function)
        found = _results(ours, *inputs)
    for one, usual, wide in zip(found, plain, right, strict=True):
        assert error(one, wide) < 4 * BF16 + 2 * error(usual, wide)
        assert one.stride() == usual.stride()
    plan: KeepPlan = ours.kernels.plans[0]
    return plan


def _read(graph: KernelGraph, op: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and strides of images and weights that operators called so read."""
    for node in graph.nodes:
        if node.op == op:
            for name in node.refs():
                if len(graph.values[name].shape) == 4:
                    yield name, graph.values[name].strides


def _turns(plan: KeepPlan) -> int:
    return sum(node.op == "clone" and not node.backward for node in plan.graph.nodes)


def test_a_residual_block_has_its_images_turned_once() -> None:
    torch.manual_seed(0)
    plan = _same(ResidualBlock().to(DEVICE, torch.bfloat16), _images())
    graph = plan.graph
    for op in ("convolution", "convolution_backward"):
        read = list(_read(graph, op))
        assert len(read) == (4 if op == "convolution" else 6)
        assert all(strides[1] == 1 for _, strides in read)
    assert _turns(plan) == 4, "the images, two weights and the result"


def test_only_the_copy_of_images_is_read_and_kept() -> None:
    torch.manual_seed(0)
    graph = _same(ResidualBlock().to(DEVICE, torch.bfloat16), _images()).graph
    images = next(value.name for value in graph.inputs if value.shape == (2, 4, 5, 3))
    assert [node.op for node in graph.readers[images]] == ["clone"]


def test_two_convolutions_of_the_same_images_turn_them_once() -> None:
    def both(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return F.conv2d(x, one) * F.conv2d(x, other)

    assert _turns(_same(both, _images(), _images(4, 4, 3, 3), _images(4, 4, 3, 3))) == 4


def test_images_that_change_between_convolutions_are_turned_again() -> None:
    def changed(x: Tensor, weight: Tensor) -> Tensor:
        first = F.conv2d(x, weight)
        x.mul_(2)
        return first + F.conv2d(x, weight)

    inputs = _images(), _images(4, 4, 3, 3)
    expected = changed(*(tensor.double() for tensor in inputs))
    with torch.no_grad():
        assert error(optimise(changed)(*inputs), expected) < 4 * BF16


def test_views_that_other_orders_do_not_allow_are_copies() -> None:
    def flat(x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, weight)).view(len(x), -1) @ table

    _same(flat, _images(), _images(4, 4, 3, 3), _images(12, 6))


def test_a_view_that_torch_refuses_is_refused() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"[vV]iew"):
        optimise(lambda x: x.view(-1))(random(0, 4, 6).t())


@pytest.mark.parametrize("case", ["fp32", "channels last", "grouped"])
def test_others_stay_as_they_are(case: str) -> None:
    groups = 2 if case == "grouped" else 1
    x, weight = _images(), _images(4, 4 // groups, 3, 3)
    if case == "channels last":
        x, weight = x.contiguous(memory_format=LAST), weight.contiguous(memory_format=LAST)
    if case == "fp32":
        x, weight = x.float(), weight.float()
    plan = _same(lambda x, weight: F.conv2d(x, weight, groups=groups), x, weight)
    assert _turns(plan) == 0


def test_tiles_of_kernels_that_turn_span_a_line_of_the_cache_both_ways() -> None:
    with every_operator_generated():
        turned = optimise(lambda x: x.contiguous(memory_format=LAST))
        turned(_images(2, 256, 16, 16).to(DEVICE))
    body = turned.kernels.kernels[0].body
    tiles = tiles_of(body, 132)
    assert tiles
    assert all(tile.rows >= 64 and tile.columns >= 64 for tile in tiles)
