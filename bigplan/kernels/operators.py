"""Operators of ATen as arithmetic: each entry of EXPAND says how a kernel computes one.

Arithmetic is fp32 inside, whatever dtype tensors have; a cast that the graph asks for rounds.
Formulas of gradients are those of torch's own derivatives (tools/autograd/derivatives.yaml).
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import Any

from bigplan.kernels.body import Builder, Unfusable, Val, Varies, bounds
from bigplan.kernels.graph import FLOATS, Arg, KernelNode

Expansion = Callable[[Builder, KernelNode], tuple[Val, ...]]
EXPAND: dict[str, Expansion] = {}


def _operator(*names: str) -> Callable[[Expansion], Expansion]:
    def enter(function: Expansion) -> Expansion:
        EXPAND.update(dict.fromkeys(names, function))
        return function

    return enter


def _plain(op: str, *names: str) -> Expansion:
    def expand(b: Builder, node: KernelNode) -> tuple[Val, ...]:
        return (b.apply(op, *(b.argument(node, name) for name in names)),)

    return expand


for _name in ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "abs", "neg"):
    EXPAND[_name] = _plain(_name, "self")
for _name in ("mul", "maximum", "minimum", "gt", "lt", "ge", "le", "eq", "ne"):
    EXPAND[_name] = _plain(_name, "self", "other")
EXPAND["where"] = _plain("where", "condition", "self", "other")
EXPAND["logical_not"] = EXPAND["bitwise_not"] = _plain("not", "self")
EXPAND["logical_and"] = EXPAND["bitwise_and"] = _plain("and", "self", "other")
EXPAND["clone"] = EXPAND["contiguous"] = lambda b, node: (b.argument(node, "self"),)
EXPAND["relu"] = lambda b, node: (_relu(b, b.argument(node, "self")),)


@_operator("add", "sub", "rsub")
def _sum(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, y = b.argument(node, "self"), b.argument(node, "other")
    if node.op == "rsub":
        x, y = y, x
    alpha = _number(node, "alpha", 1.0)
    if alpha != 1.0 and node.op == "rsub":
        raise Unfusable("it scales what it subtracts")
    if alpha != 1.0:
        y = b.apply("mul", y, alpha)
    return (b.apply("add" if node.op == "add" else "sub", x, y),)


@_operator("div")
def _div(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    if node.arguments.get("rounding_mode") is not None:
        raise Unfusable("its division rounds")
    x, other = b.argument(node, "self"), node.arguments["other"]
    if isinstance(other, bool | int | float) and other:
        return (b.apply("mul", x, 1.0 / other),)
    return (b.apply("div", x, b.argument(node, "other")),)


@_operator("pow")
def _pow(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, exponent = b.argument(node, "self"), node.arguments.get("exponent")
    if not isinstance(exponent, int | float):
        raise Unfusable("its exponent is a tensor")
    match float(exponent):
        case 1.0:
            return (x,)
        case 2.0:
            return (b.apply("mul", x, x),)
        case 3.0:
            return (b.apply("mul", b.apply("mul", x, x), x),)
        case 0.5:
            return (b.apply("sqrt", x),)
        case -0.5:
            return (b.apply("rsqrt", x),)
        case -1.0:
            return (b.apply("reciprocal", x),)
    raise Unfusable(f"it raises to the power {exponent}")


@_operator("square")
def _square(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x = b.argument(node, "self")
    return (b.apply("mul", x, x),)


@_operator("clamp", "clamp_min", "hardtanh")
def _clamp(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x = b.argument(node, "self")
    low, high = (node.arguments.get(n, node.arguments.get(f"{n}_val")) for n in ("min", "max"))
    if low is not None:
        least = b.operand(low, node.outputs[0].shape)
        x = b.apply("where", b.apply("lt", x, least), least, x)
    if high is not None:
        most = b.operand(high, node.outputs[0].shape)
        x = b.apply("where", b.apply("gt", x, most), most, x)
    return (x,)


@_operator("_to_copy", "convert_element_type", "to")
def _cast(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, dtype = b.argument(node, "self"), node.outputs[0].dtype
    if dtype in ("bf16", "fp16"):
        return (b.apply(f"round_{dtype}", x),)
    if dtype != "fp32":
        raise Unfusable(f"it casts to {dtype}")
    return (b.apply("widen", x),)


@_operator("masked_fill")
def _masked_fill(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, mask = b.argument(node, "self"), b.argument(node, "mask")
    return (b.apply("where", mask, b.argument(node, "value"), x),)


@_operator("full_like", "zeros_like", "ones_like", "full", "zeros", "ones")
def _constant(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    named = {"zeros": 0.0, "ones": 1.0}.get(node.op.removesuffix("_like"))
    return (b.number(_number(node, "fill_value", 0.0) if named is None else named),)


# --- Activations.


def _relu(b: Builder, x: Val) -> Val:
    return b.apply("where", b.apply("le", x, 0.0), 0.0, x)  # a NaN stays one


@_operator("threshold_backward")
def _relu_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, x = b.argument(node, "grad_output"), b.argument(node, "self")
    return (b.apply("where", b.apply("le", x, _number(node, "threshold", 0.0)), 0.0, d),)


@_operator("leaky_relu", "leaky_relu_backward")
def _leaky(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, slope = b.argument(node, "self"), _number(node, "negative_slope", 0.01)
    d = b.argument(node, "grad_output") if node.op.endswith("backward") else x
    return (b.apply("where", b.apply("gt", x, 0.0), d, b.apply("mul", d, slope)),)


@_operator("sigmoid_backward", "tanh_backward")
def _by_output(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, y = b.argument(node, "grad_output"), b.argument(node, "output")
    square = b.apply("mul", y, y)
    inner = b.apply("sub", y if node.op.startswith("sigmoid") else 1.0, square)
    return (b.apply("mul", d, inner),)


@_operator("silu", "silu_backward")
def _silu(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x = b.argument(node, "self")
    s = b.apply("sigmoid", x)
    if node.op == "silu":
        return (b.apply("mul", x, s),)
    # s (1 + x (1 - s))
    slope = b.apply("mul", s, b.apply("add", b.apply("mul", x, b.apply("sub", 1.0, s)), 1.0))
    return (b.apply("mul", b.argument(node, "grad_output"), slope),)


@_operator("gelu", "gelu_backward")
def _gelu(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, back = b.argument(node, "self"), node.op == "gelu_backward"
    square = b.apply("mul", x, x)
    if node.arguments.get("approximate", "none") == "tanh":
        scale, cubic = sqrt(2 / pi), 0.044715
        inner = b.apply("mul", x, b.apply("add", b.apply("mul", square, scale * cubic), scale))
        t = b.apply("tanh", inner)
        half = b.apply("mul", b.apply("add", t, 1.0), 0.5)
        by_inner = b.apply("add", b.apply("mul", square, 3 * scale * cubic), scale)
        steep = b.apply("mul", b.apply("sub", 1.0, b.apply("mul", t, t)), by_inner)
        density = b.apply("mul", steep, 0.5)
    else:
        half = b.apply(
            "mul", b.apply("add", b.apply("erf", b.apply("mul", x, sqrt(0.5))), 1.0), 0.5
        )
        density = b.apply("mul", b.apply("exp", b.apply("mul", square, -0.5)), 1 / sqrt(2 * pi))
    if not back:
        return (b.apply("mul", x, half),)
    slope = b.apply("add", half, b.apply("mul", x, density))
    return (b.apply("mul", b.argument(node, "grad_output"), slope),)


@_operator("native_dropout_backward")
def _dropout_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, mask = b.argument(node, "grad_output"), b.argument(node, "mask")
    return (b.apply("where", mask, b.apply("mul", d, _number(node, "scale", 1.0)), 0.0),)


@_operator("addcmul", "addcdiv")
def _addc(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, y, z = (b.argument(node, name) for name in ("self", "tensor1", "tensor2"))
    inner = b.apply("mul" if node.op == "addcmul" else "div", y, z)
    return (b.apply("add", x, b.apply("mul", inner, _number(node, "value", 1.0))),)


# --- Reductions and norms.


@_operator("sum", "mean", "amax")
def _reduce(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = _shape(b, node, "self")
    x, dims = b.argument(node, "self", shape), _dims(node, len(shape))
    wide = {i for i, n in enumerate(shape) if n > 1}
    dims &= wide
    last = len(shape) - 1
    if dims == {last}:
        result = b.over_row("max_row" if node.op == "amax" else "sum_row", x)
    elif dims and dims == wide - {last} and node.op != "amax" and last in wide:
        result = b.over_column(x)
        if node.op == "mean":
            raise Unfusable("it takes the mean over rows")
    else:
        raise Unfusable("it reduces some other dimensions than columns or all rows")
    if node.op == "mean":
        result = b.apply("mul", result, 1.0 / shape[-1])
    return (result._replace(shape=node.outputs[0].shape),)


def _mean(b: Builder, x: Val, columns: int) -> Val:
    return b.apply("mul", b.over_row("sum_row", x), 1.0 / columns)


@_operator("native_layer_norm")
def _layer_norm(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = _normed(b, node, "input")
    x = b.argument(node, "input", shape)
    mean = _mean(b, x, shape[-1])
    centred = b.apply("sub", x, mean)
    variance = _mean(b, b.apply("mul", centred, centred), shape[-1])
    rstd = b.apply("rsqrt", b.apply("add", variance, _number(node, "eps", 1e-5)))
    out = b.apply("mul", centred, rstd)
    if node.arguments.get("weight") is not None:
        out = b.apply("mul", out, b.argument(node, "weight", shape))
    if node.arguments.get("bias") is not None:
        out = b.apply("add", out, b.argument(node, "bias", shape))
    return out, mean, rstd


@_operator("native_layer_norm_backward")
def _layer_norm_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = _normed(b, node, "input")
    x, d = b.argument(node, "input", shape), b.argument(node, "grad_out", shape)
    rows = (*shape[:-1], 1)
    mean, rstd = b.argument(node, "mean", rows), b.argument(node, "rstd", rows)
    normed = b.apply("mul", b.apply("sub", x, mean), rstd)
    by_weight, by_bias = b.apply("mul", d, normed), d
    if node.arguments.get("weight") is not None:
        d = b.apply("mul", d, b.argument(node, "weight", shape))
    along = _mean(b, b.apply("mul", d, normed), shape[-1])
    centred = b.apply(
        "sub", b.apply("sub", d, _mean(b, d, shape[-1])), b.apply("mul", normed, along)
    )
    wanted = _mask(node)
    results = [b.apply("mul", centred, rstd)]
    results += [b.over_column(sums) for sums in (by_weight, by_bias)]
    return tuple(r for r, want in zip(results, wanted, strict=True) if want)


@_operator("_fused_rms_norm")
def _rms_norm(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = _normed(b, node, "input")
    x = b.argument(node, "input", shape)
    given = node.arguments.get("eps")
    epsilon = (
        float(given) if isinstance(given, int | float) else 2.0**-23
    )  # fp32's, as torch has it
    square = _mean(b, b.apply("mul", x, x), shape[-1])
    rstd = b.apply("rsqrt", b.apply("add", square, epsilon))
    out = b.apply("mul", x, rstd)
    if node.arguments.get("weight") is not None:
        out = b.apply("mul", out, b.argument(node, "weight", shape))
    return out, rstd


@_operator("_fused_rms_norm_backward")
def _rms_norm_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = _normed(b, node, "input")
    x, d = b.argument(node, "input", shape), b.argument(node, "grad_out", shape)
    rstd = b.argument(node, "rstd", (*shape[:-1], 1))
    normed = b.apply("mul", x, rstd)
    by_weight = b.apply("mul", d, normed)
    if node.arguments.get("weight") is not None:
        d = b.apply("mul", d, b.argument(node, "weight", shape))
    along = _mean(b, b.apply("mul", d, normed), shape[-1])
    by_x = b.apply("mul", b.apply("sub", d, b.apply("mul", normed, along)), rstd)
    results = (by_x, b.over_column(by_weight))
    return tuple(r for r, want in zip(results, _mask(node), strict=True) if want)


@_operator("norm_of_statistics")
def _norm_again(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    """A norm's output from what its forward kept; torch has no such operator, see `keep.py`."""
    shape = _normed(b, node, "input")
    x, rows = b.argument(node, "input", shape), (*shape[:-1], 1)
    if node.arguments.get("mean") is not None:
        x = b.apply("sub", x, b.argument(node, "mean", rows))
    out = b.apply("mul", x, b.argument(node, "rstd", rows))
    if node.arguments.get("weight") is not None:
        out = b.apply("mul", out, b.argument(node, "weight", shape))
    if node.arguments.get("bias") is not None:
        out = b.apply("add", out, b.argument(node, "bias", shape))
    return (out,)


@_operator("_softmax", "_log_softmax")
def _softmax(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x = b.argument(node, "self")
    _last_dimension(node)
    shifted = b.apply("sub", x, b.over_row("max_row", x))
    powers = b.apply("exp", shifted)
    total = b.over_row("sum_row", powers)
    if node.op == "_softmax":
        return (b.apply("div", powers, total),)
    return (b.apply("sub", shifted, b.apply("log", total)),)


@_operator("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, y = b.argument(node, "grad_output"), b.argument(node, "output")
    _last_dimension(node)
    if node.op == "_softmax_backward_data":
        product = b.apply("mul", d, y)
        return (b.apply("sub", product, b.apply("mul", y, b.over_row("sum_row", product))),)
    total = b.over_row("sum_row", d)
    return (b.apply("sub", d, b.apply("mul", b.apply("exp", y), total)),)


@_operator("cross_entropy_and_gradient")
def _cross_entropy(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    """Losses and their gradient by the logits; torch has no such operator, see `single.py`.

    A negative target counts nothing. A target beyond the columns is in another rank's logits, so
    the loss lacks the target's logit.
    """
    shape = _shape(b, node, "self")
    x, rows = b.argument(node, "self", shape), (*shape[:-1], 1)
    target = b.integers(node, "target", rows)
    picked = b.gathered(x, target)  # before its gradient takes the logit's place
    lse = b.over_row("lse_row", x)
    here = b.apply("eq", b.columns(), target)._replace(shape=shape)
    ignored = b.apply("lt", target, 0.0)
    loss = b.apply("where", ignored, 0.0, b.apply("sub", lse, picked))
    powers = b.apply("exp", b.apply("sub", x, lse))
    gradient = b.apply("sub", powers, b.apply("where", here, 1.0, 0.0))
    scale = b.apply("where", ignored, 0.0, b.argument(node, "scale", rows))
    return loss, b.apply("mul", gradient, scale)


# --- Columns put together and taken apart.


@_operator("cat")
def _cat(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape, tensors = node.outputs[0].shape, node.arguments["tensors"]
    assert isinstance(tensors, tuple)
    if _whole(node, "dim", 0) % len(shape) != len(shape) - 1 or b.flat:
        raise Unfusable("it joins rows")
    pieces: list[int] = []
    for tensor in tensors:
        assert isinstance(tensor, Arg)
        part = b.operand(tensor, b.graph.values[tensor.name].shape)
        many = b.graph.values[tensor.name].shape[-1] // b.width
        pieces += part.pieces if len(part.pieces) == many else part.pieces * many
    return (Val(shape, Varies.FULL, tuple(pieces)),)


@_operator("slice_backward")
def _slice_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = node.outputs[0].shape
    if _whole(node, "dim", 0) % len(shape) != len(shape) - 1 or b.flat:
        raise Unfusable("it puts rows among others")
    start, end = bounds(node, shape[-1])
    part = b.argument(node, "grad_output", (*shape[:-1], end - start))
    if _whole(node, "step", 1) != 1 or start % b.width or end % b.width:
        raise Unfusable("it puts columns among others that are no piece")
    zero, many = b.number(0.0).pieces, (end - start) // b.width
    inner = part.pieces if len(part.pieces) == many else part.pieces * many
    before, after = start // b.width, (shape[-1] - end) // b.width
    return (Val(shape, Varies.FULL, zero * before + inner + zero * after),)


def _number(node: KernelNode, name: str, default: float) -> float:
    given = node.arguments.get(name, default)
    if not isinstance(given, bool | int | float):
        raise Unfusable(f"its {name} is no number")
    return float(given)


def _whole(node: KernelNode, name: str, default: int) -> int:
    given = node.arguments.get(name, default)
    assert isinstance(given, int)
    return given


def _shape(b: Builder, node: KernelNode, name: str) -> tuple[int, ...]:
    ref = node.arguments[name]
    assert isinstance(ref, Arg)
    return b.graph.values[ref.name].shape


def _normed(b: Builder, node: KernelNode, name: str) -> tuple[int, ...]:
    """The shape of a norm's input, where it is over the last dimension alone."""
    over: Any = node.arguments["normalized_shape"]
    if len(over) != 1:
        raise Unfusable("it is a norm over several dimensions")
    return _shape(b, node, name)


def _dims(node: KernelNode, count: int) -> set[int]:
    given = node.arguments.get("dim")
    if given is None or given == ():
        return set(range(count))
    dims = given if isinstance(given, tuple) else (given,)
    return {dim % count for dim in dims if isinstance(dim, int)}


def _last_dimension(node: KernelNode) -> None:
    if _whole(node, "dim", -1) % len(node.outputs[0].shape) != len(node.outputs[0].shape) - 1:
        raise Unfusable("it normalises over another dimension than the last")


def _mask(node: KernelNode) -> tuple[bool, ...]:
    mask: Any = node.arguments["output_mask"]
    return tuple(bool(want) for want in mask)


def why_not(node: KernelNode) -> str:
    """Why no kernel is generated for an operator, by itself; empty where one can be."""
    if node.refused:
        return node.refused
    if node.op not in EXPAND:
        return "no generated kernel computes it"
    strange = {value.dtype for value in node.outputs} - {*FLOATS, "bool"}
    return f"it gives {', '.join(sorted(strange))}" if strange else ""
