"""Operators that work element by element: arithmetic, casts, activations, dropout, joined columns.

Arithmetic is fp32 inside, whatever dtype tensors have; a cast that the graph asks for rounds.
Formulas of gradients are those of torch's own derivatives (tools/autograd/derivatives.yaml).
"""

from __future__ import annotations

from math import pi, sqrt

from bigplan.kernels.fusion.body import Val, Varies
from bigplan.kernels.fusion.builder import Builder
from bigplan.kernels.fusion.expansion import Expansions, number_of, whole_of
from bigplan.kernels.fusion.graph import Arg, KernelNode
from bigplan.kernels.fusion.strides import Unfusable, bounds

ARITHMETIC = Expansions()

for _name in ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "abs", "neg"):
    ARITHMETIC.plain(_name, "self")
for _name in ("mul", "maximum", "minimum", "gt", "lt", "ge", "le", "eq", "ne"):
    ARITHMETIC.plain(_name, "self", "other")
ARITHMETIC.plain("where", "condition", "self", "other")
ARITHMETIC.plain("not", "self", names=("logical_not", "bitwise_not"))
ARITHMETIC.plain("and", "self", "other", names=("logical_and", "bitwise_and"))
ARITHMETIC["clone"] = ARITHMETIC["contiguous"] = lambda b, node: (b.argument(node, "self"),)
ARITHMETIC["relu"] = lambda b, node: (_relu(b, b.argument(node, "self")),)


@ARITHMETIC.of("add", "sub", "rsub")
def _sum(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, y = b.argument(node, "self"), b.argument(node, "other")
    if node.op == "rsub":
        x, y = y, x
    alpha = number_of(node, "alpha", 1.0)
    if alpha != 1.0 and node.op == "rsub":
        raise Unfusable("it scales what it subtracts")
    if alpha != 1.0:
        y = b.apply("mul", y, alpha)
    return (b.apply("add" if node.op == "add" else "sub", x, y),)


@ARITHMETIC.of("div")
def _div(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    if node.arguments.get("rounding_mode") is not None:
        raise Unfusable("its division rounds")
    x, other = b.argument(node, "self"), node.arguments["other"]
    if isinstance(other, bool | int | float) and other:
        return (b.apply("mul", x, 1.0 / other),)
    return (b.apply("div", x, b.argument(node, "other")),)


@ARITHMETIC.of("pow")
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


@ARITHMETIC.of("square")
def _square(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x = b.argument(node, "self")
    return (b.apply("mul", x, x),)


@ARITHMETIC.of("clamp", "clamp_min", "hardtanh")
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


@ARITHMETIC.of("_to_copy", "convert_element_type", "to")
def _cast(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, dtype = b.argument(node, "self"), node.outputs[0].dtype
    if dtype in ("bf16", "fp16"):
        return (b.apply(f"round_{dtype}", x),)
    if dtype != "fp32":
        raise Unfusable(f"it casts to {dtype}")
    return (b.apply("widen", x),)


@ARITHMETIC.of("masked_fill")
def _masked_fill(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, mask = b.argument(node, "self"), b.argument(node, "mask")
    return (b.apply("where", mask, b.argument(node, "value"), x),)


@ARITHMETIC.of("full_like", "zeros_like", "ones_like", "full", "zeros", "ones")
def _constant(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    named = {"zeros": 0.0, "ones": 1.0}.get(node.op.removesuffix("_like"))
    return (b.number(number_of(node, "fill_value", 0.0) if named is None else named),)


# --- Activations.


def _relu(b: Builder, x: Val) -> Val:
    return b.apply("where", b.apply("le", x, 0.0), 0.0, x)  # a NaN stays one


@ARITHMETIC.of("threshold_backward")
def _relu_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, x = b.argument(node, "grad_output"), b.argument(node, "self")
    return (b.apply("where", b.apply("le", x, number_of(node, "threshold", 0.0)), 0.0, d),)


@ARITHMETIC.of("leaky_relu", "leaky_relu_backward")
def _leaky(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, slope = b.argument(node, "self"), number_of(node, "negative_slope", 0.01)
    d = b.argument(node, "grad_output") if node.op.endswith("backward") else x
    return (b.apply("where", b.apply("gt", x, 0.0), d, b.apply("mul", d, slope)),)


@ARITHMETIC.of("sigmoid_backward", "tanh_backward")
def _by_output(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, y = b.argument(node, "grad_output"), b.argument(node, "output")
    square = b.apply("mul", y, y)
    inner = b.apply("sub", y if node.op.startswith("sigmoid") else 1.0, square)
    return (b.apply("mul", d, inner),)


@ARITHMETIC.of("silu", "silu_backward")
def _silu(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x = b.argument(node, "self")
    s = b.apply("sigmoid", x)
    if node.op == "silu":
        return (b.apply("mul", x, s),)
    # s (1 + x (1 - s))
    slope = b.apply("mul", s, b.apply("add", b.apply("mul", x, b.apply("sub", 1.0, s)), 1.0))
    return (b.apply("mul", b.argument(node, "grad_output"), slope),)


@ARITHMETIC.of("gelu", "gelu_backward")
def _gelu(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, back = b.argument(node, "self"), node.op == "gelu_backward"
    square = b.apply("mul", x, x)
    if node.arguments.get("approximate", "none") == "tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2u), with the derivative sigmoid (1 - sigmoid) by 2u. By tanh
        # the backward has a third more instructions (42 for 33 on compute capability 9.0).
        scale, cubic = 2 * sqrt(2 / pi), 0.044715
        inner = b.apply("mul", x, b.apply("add", b.apply("mul", square, scale * cubic), scale))
        half = b.apply("sigmoid", inner)
        by_inner = b.apply("add", b.apply("mul", square, 3 * scale * cubic), scale)
        steep = b.apply("mul", half, b.apply("sub", 1.0, half))
        density = b.apply("mul", steep, by_inner)
    else:
        half = b.apply(
            "mul", b.apply("add", b.apply("erf", b.apply("mul", x, sqrt(0.5))), 1.0), 0.5
        )
        density = b.apply("mul", b.apply("exp", b.apply("mul", square, -0.5)), 1 / sqrt(2 * pi))
    if not back:
        return (b.apply("mul", x, half),)
    slope = b.apply("add", half, b.apply("mul", x, density))
    return (b.apply("mul", b.argument(node, "grad_output"), slope),)


@ARITHMETIC.of("native_dropout_backward")
def _dropout_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, mask = b.argument(node, "grad_output"), b.argument(node, "mask")
    return (b.apply("where", mask, b.apply("mul", d, number_of(node, "scale", 1.0)), 0.0),)


@ARITHMETIC.of("addcmul", "addcdiv")
def _addc(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x, y, z = (b.argument(node, name) for name in ("self", "tensor1", "tensor2"))
    inner = b.apply("mul" if node.op == "addcmul" else "div", y, z)
    return (b.apply("add", x, b.apply("mul", inner, number_of(node, "value", 1.0))),)


# --- Columns put together and taken apart.


@ARITHMETIC.of("cat")
def _cat(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape, tensors = node.outputs[0].shape, node.arguments["tensors"]
    assert isinstance(tensors, tuple)
    if whole_of(node, "dim", 0) % len(shape) != len(shape) - 1 or b.flat:
        raise Unfusable("it joins rows")
    pieces: list[int] = []
    for tensor in tensors:
        assert isinstance(tensor, Arg)
        part = b.operand(tensor, b.graph.values[tensor.name].shape)
        many = b.graph.values[tensor.name].shape[-1] // b.width
        pieces += part.pieces if len(part.pieces) == many else part.pieces * many
    return (Val(shape, Varies.FULL, tuple(pieces)),)


@ARITHMETIC.of("slice_backward")
def _slice_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = node.outputs[0].shape
    if whole_of(node, "dim", 0) % len(shape) != len(shape) - 1 or b.flat:
        raise Unfusable("it puts rows among others")
    start, end = bounds(node, shape[-1])
    part = b.argument(node, "grad_output", (*shape[:-1], end - start))
    if whole_of(node, "step", 1) != 1 or start % b.width or end % b.width:
        raise Unfusable("it puts columns among others that are no piece")
    zero, many = b.number(0.0).pieces, (end - start) // b.width
    inner = part.pieces if len(part.pieces) == many else part.pieces * many
    before, after = start // b.width, (shape[-1] - end) // b.width
    return (Val(shape, Varies.FULL, zero * before + inner + zero * after),)
