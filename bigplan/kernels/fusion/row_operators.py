"""Operators that look at a whole row or column: reductions, norms, softmax, cross-entropy.

Arithmetic is fp32 inside; gradients are torch's own derivatives, as in `arithmetic.py`.
"""

from __future__ import annotations

from bigplan.kernels.fusion.body import Val
from bigplan.kernels.fusion.builder import Builder
from bigplan.kernels.fusion.expansion import (
    Expansions,
    dims_of,
    mask_of,
    normed_shape,
    number_of,
    require_last_dimension,
    shape_of,
)
from bigplan.kernels.fusion.graph import KernelNode
from bigplan.kernels.fusion.strides import Unfusable

ROWS = Expansions()


@ROWS.of("sum", "mean", "amax")
def _reduce(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = shape_of(b, node, "self")
    x, dims = b.argument(node, "self", shape), dims_of(node, len(shape))
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


@ROWS.of("native_layer_norm")
def _layer_norm(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = normed_shape(b, node, "input")
    x = b.argument(node, "input", shape)
    mean = _mean(b, x, shape[-1])
    centred = b.apply("sub", x, mean)
    variance = _mean(b, b.apply("mul", centred, centred), shape[-1])
    rstd = b.apply("rsqrt", b.apply("add", variance, number_of(node, "eps", 1e-5)))
    out = b.apply("mul", centred, rstd)
    if node.arguments.get("weight") is not None:
        out = b.apply("mul", out, _factor(b, node))
    if node.arguments.get("bias") is not None:
        out = b.apply("add", out, b.argument(node, "bias", shape))
    return out, mean, rstd


@ROWS.of("native_layer_norm_backward")
def _layer_norm_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = normed_shape(b, node, "input")
    x, d = b.argument(node, "input", shape), b.argument(node, "grad_out", shape)
    rows = (*shape[:-1], 1)
    mean, rstd = b.argument(node, "mean", rows), b.argument(node, "rstd", rows)
    normed = b.apply("mul", b.apply("sub", x, mean), rstd)
    by_weight, by_bias = b.apply("mul", d, normed), d
    if node.arguments.get("weight") is not None:
        d = b.apply("mul", d, _factor(b, node))
    along = _mean(b, b.apply("mul", d, normed), shape[-1])
    centred = b.apply(
        "sub", b.apply("sub", d, _mean(b, d, shape[-1])), b.apply("mul", normed, along)
    )
    wanted = mask_of(node)
    results = [b.apply("mul", centred, rstd)]
    results += [b.over_column(sums) for sums in (by_weight, by_bias)]
    return tuple(r for r, want in zip(results, wanted, strict=True) if want)


def _factor(b: Builder, node: KernelNode) -> Val:
    """What a norm multiplies by: its weight, or 1 + weight (`single.py`; not of torch's)."""
    weight = b.argument(node, "weight", normed_shape(b, node, "input"))
    return b.apply("add", weight, 1.0) if node.arguments.get("plus_one") else weight


@ROWS.of("_fused_rms_norm")
def _rms_norm(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = normed_shape(b, node, "input")
    x = b.argument(node, "input", shape)
    given = node.arguments.get("eps")
    epsilon = (
        float(given) if isinstance(given, int | float) else 2.0**-23
    )  # fp32's, as torch has it
    square = _mean(b, b.apply("mul", x, x), shape[-1])
    rstd = b.apply("rsqrt", b.apply("add", square, epsilon))
    out = b.apply("mul", x, rstd)
    if node.arguments.get("weight") is not None:
        out = b.apply("mul", out, _factor(b, node))
    return out, rstd


@ROWS.of("_fused_rms_norm_backward")
def _rms_norm_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = normed_shape(b, node, "input")
    x, d = b.argument(node, "input", shape), b.argument(node, "grad_out", shape)
    rstd = b.argument(node, "rstd", (*shape[:-1], 1))
    normed = b.apply("mul", x, rstd)
    by_weight = b.apply("mul", d, normed)
    if node.arguments.get("weight") is not None:
        d = b.apply("mul", d, _factor(b, node))
    along = _mean(b, b.apply("mul", d, normed), shape[-1])
    by_x = b.apply("mul", b.apply("sub", d, b.apply("mul", normed, along)), rstd)
    results = (by_x, b.over_column(by_weight))
    return tuple(r for r, want in zip(results, mask_of(node), strict=True) if want)


@ROWS.of("norm_of_statistics")
def _norm_again(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    """A norm's output from what its forward kept; torch has no such operator, see `keep.py`."""
    shape = normed_shape(b, node, "input")
    x, rows = b.argument(node, "input", shape), (*shape[:-1], 1)
    if node.arguments.get("mean") is not None:
        x = b.apply("sub", x, b.argument(node, "mean", rows))
    out = b.apply("mul", x, b.argument(node, "rstd", rows))
    if node.arguments.get("weight") is not None:
        out = b.apply("mul", out, b.argument(node, "weight", shape))
    if node.arguments.get("bias") is not None:
        out = b.apply("add", out, b.argument(node, "bias", shape))
    return (out,)


@ROWS.of("_softmax", "_log_softmax")
def _softmax(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    x = b.argument(node, "self")
    require_last_dimension(node)
    shifted = b.apply("sub", x, b.over_row("max_row", x))
    powers = b.apply("exp", shifted)
    total = b.over_row("sum_row", powers)
    if node.op == "_softmax":
        return (b.apply("div", powers, total),)
    return (b.apply("sub", shifted, b.apply("log", total)),)


@ROWS.of("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    d, y = b.argument(node, "grad_output"), b.argument(node, "output")
    require_last_dimension(node)
    if node.op == "_softmax_backward_data":
        product = b.apply("mul", d, y)
        return (b.apply("sub", product, b.apply("mul", y, b.over_row("sum_row", product))),)
    total = b.over_row("sum_row", d)
    return (b.apply("sub", d, b.apply("mul", b.apply("exp", y), total)),)


@ROWS.of("cross_entropy_rows")
def _cross_entropy_rows(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    """Losses and logarithms of sums of exponentials; see `rewritten.py`."""
    shape = shape_of(b, node, "self")
    x, target = b.argument(node, "self", shape), b.integers(node, "target", (*shape[:-1], 1))
    lse = b.over_row("lse_row", x)
    ignored = b.apply("eq", target, number_of(node, "ignored", 0.0))
    loss = b.apply("where", ignored, 0.0, b.apply("sub", lse, b.gathered(x, target)))
    return loss, lse


@ROWS.of("cross_entropy_rows_backward")
def _cross_entropy_rows_backward(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    shape = shape_of(b, node, "self")
    x, rows = b.argument(node, "self", shape), (*shape[:-1], 1)
    target = b.integers(node, "target", rows)
    ignored = b.apply("eq", target, number_of(node, "ignored", 0.0))
    scale = b.apply("where", ignored, 0.0, b.argument(node, "gradient", rows))
    here = b.apply("eq", b.columns(), target)._replace(shape=shape)
    powers = b.apply("exp", b.apply("sub", x, b.argument(node, "lse", rows)))
    return (b.apply("mul", b.apply("sub", powers, b.apply("where", here, 1.0, 0.0)), scale),)


@ROWS.of("cross_entropy_and_gradient")
def _cross_entropy(b: Builder, node: KernelNode) -> tuple[Val, ...]:
    """Losses and their gradient by the logits; torch has no such operator, see `single.py`.

    A negative target counts nothing. A target beyond the columns is in another rank's logits, so
    the loss lacks the target's logit. With a `cap` logits are cap * tanh(logit / cap).
    """
    shape, cap = shape_of(b, node, "self"), number_of(node, "cap", 0.0)
    x, rows = b.argument(node, "self", shape), (*shape[:-1], 1)
    target = b.integers(node, "target", rows)
    picked = b.gathered(x, target)  # before its gradient takes the logit's place
    bent = b.apply("tanh", b.apply("div", x, cap)) if cap else x
    if cap:
        x = b.apply("mul", bent, cap)
        picked = b.apply("mul", b.apply("tanh", b.apply("div", picked, cap)), cap)
    lse = b.over_row("lse_row", x)
    here = b.apply("eq", b.columns(), target)._replace(shape=shape)
    ignored = b.apply("lt", target, 0.0)
    loss = b.apply("where", ignored, 0.0, b.apply("sub", lse, picked))
    powers = b.apply("exp", b.apply("sub", x, lse))
    gradient = b.apply("sub", powers, b.apply("where", here, 1.0, 0.0))
    if cap:
        gradient = b.apply("mul", gradient, b.apply("sub", 1.0, b.apply("mul", bent, bent)))
    scale = b.apply("where", ignored, 0.0, b.argument(node, "scale", rows))
    return loss, b.apply("mul", gradient, scale)
