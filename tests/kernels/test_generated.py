"""Generated kernels give what plain torch gives in fp64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.cost.kernel import Shape, Tile
from bigplan.kernels.fusion.body import Body, Varies
from bigplan.kernels.fusion.fuse import body_of, levels, tiles_of
from bigplan.kernels.fusion.graph import Arg, KernelGraph, KernelNode, KernelValue, dense, frozen
from bigplan.kernels.fusion.source import source
from bigplan.kernels.launch import LaunchedKernel
from bigplan.kernels.optimised import optimise
from tests.kernels.generated import (
    DEVICE,
    both_ways,
    error,
    every_operator_generated,
    random,
    rotated,
    tables,
)

# A rounding (6e-8) an operation and approximate exponentials and roots (2e-7 on a GPU), as in
# test_kernels.py. Results in half precisions are rounded once, and Triton's interpreter cuts a bf16
# off where hardware rounds it: 2^-7 at most, half of that on average.
FP32 = 3e-6
ROUNDED = {torch.float32: FP32, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def _added_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    total = x + y
    return F.layer_norm(total, (x.shape[-1],), w, b) + total


def _geglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.gelu(a) * b


def _smooth(x: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x + b) * torch.sigmoid(x) + torch.exp(-x * x) / (1 + x.abs())


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[int, int], list[tuple[int, ...]]]]] = {
    "swiglu": (_swiglu, lambda r, c: [(r, c), (r, c)]),
    "layer norm": (_layer_norm, lambda r, c: [(r, c), (c,), (c,)]),
    "rms norm": (_rms_norm, lambda r, c: [(r, c), (c,)]),
    "added norm": (_added_norm, lambda r, c: [(r, c), (r, c), (c,), (c,)]),
    "geglu": (_geglu, lambda r, c: [(r, 2 * c)]),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), lambda r, c: [(2, r, c)]),
    "smooth": (_smooth, lambda r, c: [(r, c), (c,)]),
    "softmax": (lambda x: F.softmax(x, -1), lambda r, c: [(2, r, c)]),
    "log softmax": (lambda x: F.log_softmax(x, -1), lambda r, c: [(r, c)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(i, *shape) for i, shape in enumerate(shapes(7, 33))]
    for ours, expected in both_ways(function, *inputs):
        # Gradients of a norm of few columns cancel: they are measured beside a gradient of 1.
        scale = max(1.0, float(expected.norm()))
        assert float((ours.double() - expected).norm()) < FP32 * scale * 10
        assert ours.shape == expected.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["swiglu", "added norm"])
def test_half_precisions(name: str, dtype: torch.dtype) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(i, *shape, dtype=dtype) for i, shape in enumerate(shapes(9, 40))]
    for ours, expected in both_ways(function, *inputs):
        assert ours.dtype == dtype
        assert error(ours, expected) < ROUNDED[dtype]


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_and_columns(rows: int) -> None:
    for ours, expected in both_ways(_swiglu, random(0, rows, 3), random(1, rows, 3)):
        assert error(ours, expected) < FP32
    for ours, expected in both_ways(_layer_norm, random(0, rows, 3), random(1, 3), random(2, 3)):
        assert float((ours.double() - expected).norm()) < FP32 * 10


def test_rotary_is_one_kernel_over_two_halves_and_any_strides() -> None:
    x = random(0, 2, 5, 3, 16).transpose(1, 2)
    cos, sin = tables(5, 16)
    for ours, expected in both_ways(rotated, x, cos, sin)[:2]:
        assert error(ours, expected) < FP32
    with every_operator_generated():
        turned = optimise(rotated)
        turned(x, cos, sin)
    (kernel,) = turned.kernels.kernels
    assert kernel.body.width == 8
    assert sum(m.op == "load" and m.source == "arg1_1" for m in kernel.body.micros) == 2
    assert len(kernel.body.inputs) == 3  # its halves are read with it, not once more


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x[:1],  # a part of the rows
        lambda x: x * 2 + torch.cat((x[:, 8:], x[:, :8]), -1),
        lambda x: x.exp() + torch.cat((x[:, 5:], x[:, :5]), -1),  # no halves
    ],
)
def test_parts_of_what_is_read_whole(function: Callable[[Tensor], Tensor]) -> None:
    for ours, expected in both_ways(function, random(0, 5, 16)):
        assert error(ours, expected) < FP32


def test_a_norm_of_heads_turned_in_the_same_kernel() -> None:
    def function(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(F.rms_norm(x, (16,), w, 1e-5), cos, sin)

    cos, sin = tables(5, 16)
    inputs = random(0, 2, 3, 5, 16), random(1, 16), cos, sin
    assert all(error(ours, expected) < FP32 * 3 for ours, expected in both_ways(function, *inputs))
    with every_operator_generated():
        turned = optimise(function)
        turned(*inputs)
    assert len(turned.kernels.kernels) == 1


def test_masks_and_comparisons() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        mask = y > 0
        chosen = torch.where(mask, x, y * 2).masked_fill(~mask & (x > 1), 0.5)
        return F.relu(chosen).clamp(0.1, 1.5) + F.leaky_relu(x - y)

    for ours, expected in both_ways(function, random(0, 7, 30), random(1, 7, 30)):
        assert error(ours, expected) < FP32


def test_not_a_number_stays_one() -> None:
    with every_operator_generated():
        result = optimise(F.relu)(torch.tensor([float("nan"), -1.0, 2.0], device=DEVICE))
    assert result.isnan().tolist() == [True, False, False]
    assert result[1:].tolist() == [0.0, 2.0]


def _graph(rows: int, columns: int) -> KernelGraph:
    """A layer norm and its backward."""
    shape, row = (rows, columns), (rows, 1)
    inputs = tuple(dense(n, shape if n in "xd" else (columns,), "fp32") for n in "xwbd")
    norm: dict[str, Any] = {
        "normalized_shape": (columns,),
        "weight": Arg("w"),
        "bias": Arg("b"),
    }
    ahead = KernelNode(
        "norm", "native_layer_norm", frozen({"input": Arg("x"), "eps": 1e-5, **norm}),
        (dense("y", shape, "fp32"), dense("mean", row, "fp32"), dense("rstd", row, "fp32")),
    )  # fmt: skip
    back = KernelNode(
        "back", "native_layer_norm_backward",
        frozen({"grad_out": Arg("d"), "input": Arg("x"), "mean": Arg("mean"), "rstd": Arg("rstd"),
                "output_mask": (True, True, True), **norm}),
        (dense("dx", shape, "fp32"), dense("dw", (columns,), "fp32"),
         dense("db", (columns,), "fp32")), True,
    )  # fmt: skip
    return KernelGraph(inputs, (ahead, back), ("y", "dx", "dw", "db"), 1)


@pytest.mark.parametrize(
    "tile",
    [
        Tile(Shape.ROW, 1, 1024, 4),
        Tile(Shape.ROW, 8, 1024, 8),
        Tile(Shape.LOOPED, 1, 256, 4),
        Tile(Shape.LOOPED, 4, 512, 4),
    ],
)
def test_every_way_to_walk_over_rows(tile: Tile) -> None:
    graph = _graph(11, 600)
    body = body_of(graph, graph.nodes[:1], {"y", "mean", "rstd"})
    x, w, b = random(0, 11, 600), random(1, 600), random(2, 600)
    expected = torch.native_layer_norm(x.double(), (600,), w.double(), b.double(), 1e-5)
    for ours, right in zip(LaunchedKernel(body, [(tile, None)])(x, w, b), expected, strict=True):  # type: ignore[list-item]
        assert error(ours, right) < FP32


@pytest.mark.parametrize("programs", [1, 3, 11])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("shape", "stages"), [(Shape.STRIP, 1), (Shape.TWICE, 1), (Shape.TWICE, 2)]
)
def test_every_strip_adds_up_the_same_gradients(
    shape: Shape, stages: int, rows: int, programs: int
) -> None:
    graph = _graph(11, 100)
    body = body_of(graph, graph.nodes[1:], {"dx", "dw", "db"})
    x, d, w = random(0, 11, 100), random(3, 11, 100), random(1, 100)
    mean, rstd = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
    known = {"x": x, "d": d, "w": w, "mean": mean, "rstd": rstd}
    wide = [t.double().requires_grad_() for t in (x, w, torch.zeros_like(w))]
    right = F.layer_norm(wide[0], (100,), wide[1], wide[2])
    expected = torch.autograd.grad(right, wide, d.double())
    tile = Tile(shape, rows, 128, 1, programs, stages)
    kernel = LaunchedKernel(body, [(tile, None)])  # type: ignore[list-item]
    inputs = [known[value.name] for value in body.inputs]
    first = kernel(*inputs)
    for ours, gradient in zip(first, expected, strict=True):
        assert error(ours, gradient) < FP32 * 3
    assert all(torch.equal(a, b) for a, b in zip(first, kernel(*inputs), strict=True))


def test_a_row_is_read_twice_through_several_reductions() -> None:
    """Each depends on the one before, and a sum over columns on both."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.softmax(F.softmax(x, -1) * y, -1).sum(0)

    given = [torch.empty(7, 33), torch.empty(7, 33)]
    with every_operator_generated():
        plan = optimise(function, given).kernels.plans[0]
    (unit,) = (u for u in plan.cover.units if u.fused is not None and len(u.members) > 3)
    assert unit.fused is not None
    body, tile = unit.fused.body, Tile(Shape.TWICE, 2, 64, 1, 2)
    assert max(levels(body)) > 1
    x, y = random(0, 7, 33), random(1, 7, 33)
    results = LaunchedKernel(body, [(tile, None)])(x, y)  # type: ignore[list-item]
    by_name = dict(zip((value.name for value in body.outputs), results, strict=True))
    expected = function(x.double(), y.double())
    assert error(by_name["sum_1"], expected) < FP32


def test_a_sum_over_rows_alone_cuts_its_columns() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2 + 1).sum((0, 1))

    (result, by_x) = both_ways(function, random(0, 3, 5, 200))
    assert error(*result) < FP32
    assert torch.equal(by_x[0].double(), by_x[1])


def _sigmoids_beside() -> Body:
    """x [10, 70] times the sigmoid of w [70], and the sigmoids."""
    x, w = dense("x", (10, 70), "fp32"), dense("w", (70,), "fp32")
    nodes = [
        KernelNode("s", "sigmoid", frozen({"self": Arg("w")}), (dense("s", (70,), "fp32"),)),
        KernelNode("y", "mul", frozen({"self": Arg("x"), "other": Arg("s")}),
                   (dense("y", (10, 70), "fp32"),)),
    ]  # fmt: skip
    return body_of(KernelGraph((x, w), tuple(nodes), ("y", "s"), 2), nodes, {"y", "s"})


@pytest.mark.parametrize(
    "tile",
    [
        Tile(Shape.FLAT, 1, 128, 1),
        Tile(Shape.FLAT, 4, 64, 1),
        Tile(Shape.STRIP, 2, 128, 1, 1),
        Tile(Shape.STRIP, 2, 128, 1, 3),
    ],
)
def test_a_value_of_a_column_is_written_by_one_program(tile: Tile) -> None:
    body = _sigmoids_beside()
    x, w = random(0, 10, 70), random(1, 70)
    s, y = LaunchedKernel(body, [(tile, None)])(w, x)  # type: ignore[list-item]
    expected = torch.sigmoid(w.double())
    assert error(s, expected) < FP32
    assert error(y, x.double() * expected) < FP32
    stored = next(line for line in source(body, tile).splitlines() if "store(out0" in line)
    assert "(down == 0)" in stored or "(down + turn == 0)" in stored


def test_offsets_are_64_bits_wide_where_a_tensor_is_that_large() -> None:
    def text(rows: int) -> str:
        value, weight = dense("x", (rows, 4096), "bf16"), dense("w", (4096,), "bf16")
        node = KernelNode("y", "mul", frozen({"self": Arg("x"), "other": Arg("w")}),
                    (dense("y", (rows, 4096), "bf16"),))  # fmt: skip
        body = body_of(KernelGraph((value, weight), (node,), ("y",), 1), [node], {"y"})
        return source(body, Tile(Shape.FLAT, 1, 1024, 4))

    assert "int64" not in text(2**17)
    assert "int64" in text(2**20)
    strided = KernelValue("x", (8, 64), "bf16", (2**29, 1))  # few elements, far apart
    node = KernelNode("y", "neg", frozen({"self": Arg("x")}), (dense("y", (8, 64), "bf16"),))
    body = body_of(KernelGraph((strided,), (node,), ("y",), 1), [node], {"y"})
    assert "int64" in source(body, Tile(Shape.FLAT, 1, 64, 1))


def test_every_candidate_covers_all_rows_and_columns() -> None:
    graph = _graph(37, 100)
    for nodes, wanted in ((graph.nodes[:1], {"y"}), (graph.nodes[1:], {"dx", "dw", "db"})):
        body = body_of(graph, nodes, wanted)
        assert any(m.varies is Varies.ROW for m in body.micros)
        tiles = tiles_of(body, 132)
        assert tiles
        for tile in tiles:
            assert tile.columns >= 100
            if tile.programs:
                assert tile.programs * tile.rows <= 37 + tile.rows


def test_gelu_far_from_zero() -> None:
    """Where its sigmoid is all but 0 or 1."""

    def function(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    far = torch.tensor([-1e4, -30.0, -8.0, -4.0, -1e-6, 0.0, 1e-6, 4.0, 8.0, 30.0, 1e4])
    for ours, expected in both_ways(function, far.to(DEVICE)):
        assert torch.allclose(ours.double(), expected, rtol=FP32, atol=FP32)
