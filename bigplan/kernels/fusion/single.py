"""The operators of a block, each as a graph that is one kernel: what the runtime calls one by one.

`families.py` has whole blocks, for covers of all their operators. The runtime decides by itself
what leaves the GPU and what is computed again. So it asks for one norm, activation or loss at a
time, and for the sums that a backward adds in the same pass. Nothing here needs torch, so that the
planner can price these kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bigplan.kernels.fusion.graph import (
    Arg,
    Argument,
    KernelGraph,
    KernelNode,
    KernelValue,
    dense,
    frozen,
)

# By weight, or by 1 + weight.
NormKind = Literal["rmsnorm", "rmsnorm_plus_one", "layernorm", "layernorm_plus_one"]
GateKind = Literal["swiglu", "geglu"]
ActivationKind = Literal[GateKind, "gelu", "gelu_tanh", "relu", "relu2"]
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh", "geglu": "tanh"}
TensorShape = tuple[int, ...]
Operands = Mapping[str, Argument]


@dataclass(frozen=True)
class Single:
    """A graph that is one kernel, and the values that it writes, in the order of its callers."""

    graph: KernelGraph
    wanted: tuple[str, ...]


@dataclass
class _Maker:
    """Collects inputs and nodes."""

    inputs: list[KernelValue] = field(default_factory=list)
    nodes: list[KernelNode] = field(default_factory=list)

    def given(
        self, name: str, shape: TensorShape, dtype: str, strides: TensorShape | None = None
    ) -> str:
        made = dense(name, shape, dtype)
        self.inputs.append(made if strides is None else KernelValue(name, shape, dtype, strides))
        return name

    def node(self, op: str, outputs: tuple[KernelValue, ...], /, **arguments: Argument) -> None:
        self.nodes.append(KernelNode(f"{op} {len(self.nodes)}", op, frozen(arguments), outputs))

    def one(self, op: str, output: KernelValue, /, **arguments: Argument) -> str:
        self.node(op, (output,), **arguments)
        return output.name

    def mul(
        self, name: str, a: Arg, b: Arg | float, shape: TensorShape, dtype: str = "fp32"
    ) -> Arg:
        return Arg(self.one("mul", dense(name, shape, dtype), self=a, other=b))

    def single(self, *wanted: str) -> Single:
        return Single(
            KernelGraph(tuple(self.inputs), tuple(self.nodes), wanted, len(wanted)), wanted
        )


def _weights(make: _Maker, kind: NormKind, columns: int, dtype: str, biased: bool) -> Operands:
    arguments: dict[str, Argument] = {"weight": Arg(make.given("weight", (columns,), dtype))}
    if centres(kind):
        arguments["bias"] = Arg(make.given("bias", (columns,), dtype)) if biased else None
    return {**arguments, **_plus_one(kind)}


def centres(kind: NormKind) -> bool:
    """Whether the norm takes the mean off: a layer norm, which keeps it and may have a bias."""
    return kind.startswith("layernorm")


def _plus_one(kind: NormKind) -> Operands:
    return {"plus_one": True} if kind.endswith("plus_one") else {}


def norm(
    kind: NormKind, rows: TensorShape, columns: int, dtype: str, epsilon: float, *,
    biased: bool = False, added: bool = False,
) -> Single:  # fmt: skip
    """The norm of x [*rows, columns], or with `added` of x + y: out, statistics and the sum.

    Statistics are fp32 [*rows, 1]: the mean of a layer norm, and the reciprocal deviation.
    """
    make, shape = _Maker(), (*rows, columns)
    x = make.given("x", shape, dtype)
    if added:
        y = make.given("y", shape, dtype)
        x = make.one("add", dense("sum", shape, dtype), self=Arg(x), other=Arg(y))
        # As torch has it: a norm reads the sum in its dtype.
        x = _rounded(make, x, shape, dtype)
    row = dense("rstd", (*rows, 1), "fp32")
    mean = (dense("mean", (*rows, 1), "fp32"),) if centres(kind) else ()
    op = "native_layer_norm" if centres(kind) else "_fused_rms_norm"
    make.node(
        op, (dense("out", shape, dtype), *mean, row), input=Arg(x), normalized_shape=(columns,),
        eps=epsilon, **_weights(make, kind, columns, dtype, biased),
    )  # fmt: skip
    statistics = (*(value.name for value in mean), "rstd")
    return make.single("out", *statistics, *(["sum"] if added else []))


def _rounded(make: _Maker, x: str, shape: TensorShape, dtype: str) -> str:
    if dtype == "fp32":
        return x
    return make.one("_to_copy", dense(f"rounded {x}", shape, dtype), self=Arg(x))


def norm_backward(
    kind: NormKind, rows: TensorShape, columns: int, dtype: str, *, biased: bool = False,
    frozen: bool = False, beside: bool = False,
) -> Single:  # fmt: skip
    """Gradients by x, weight and bias, or of a frozen norm by x alone.

    `beside` [*rows, columns] is added to that by x.
    """
    make, shape, layer = _Maker(), (*rows, columns), centres(kind)
    gradient, x = make.given("gradient", shape, dtype), make.given("x", shape, dtype)
    weight = make.given("weight", (columns,), dtype)
    names = ("mean", "rstd") if layer else ("rstd",)
    statistics = {name: Arg(make.given(name, (*rows, 1), "fp32")) for name in names}
    wanted = (not frozen, layer and biased and not frozen)
    vectors = [name for name, want in zip(("by_weight", "by_bias"), wanted, strict=True) if want]
    outputs = tuple(dense(name, (columns,), dtype) for name in vectors)
    mask = (True, *wanted) if layer else (True, not frozen)
    op = "native_layer_norm_backward" if layer else "_fused_rms_norm_backward"
    make.node(
        op, (dense("by_x", shape, dtype), *outputs), grad_out=Arg(gradient), input=Arg(x),
        normalized_shape=(columns,), weight=Arg(weight), output_mask=mask, **statistics,
        **_plus_one(kind),
    )  # fmt: skip
    if not beside:
        return make.single("by_x", *vectors)
    other = make.given("beside", shape, dtype)
    make.one("add", dense("total", shape, dtype), self=Arg("by_x"), other=Arg(other))
    return make.single("total", *vectors)


GATES: tuple[ActivationKind, ...] = ("swiglu", "geglu")


def _opened(make: _Maker, kind: ActivationKind, x: Arg, shape: TensorShape, dtype: str) -> Arg:
    """What a gate multiplies by."""
    op, more = ("silu", {}) if kind == "swiglu" else ("gelu", {"approximate": APPROXIMATE[kind]})
    return Arg(make.one(op, dense(op, shape, dtype), self=x, **more))


def activation(kind: ActivationKind, shape: TensorShape, dtype: str) -> Single:
    """The activation of x; a gated one is silu(x) * y, or gelu(x) * y."""
    make, out = _Maker(), dense("out", shape, dtype)
    x = Arg(make.given("x", shape, dtype))
    if kind in GATES:
        y = Arg(make.given("y", shape, dtype))
        make.one("mul", out, self=_opened(make, kind, x, shape, dtype), other=y)
    elif kind == "relu":
        make.one("relu", out, self=x)
    elif kind == "relu2":
        opened = Arg(make.one("relu", dense("relu", shape, dtype), self=x))
        make.one("mul", out, self=opened, other=opened)
    else:
        make.one("gelu", out, self=x, approximate=APPROXIMATE[kind])
    return make.single("out")


def activation_backward(
    kind: ActivationKind, shape: TensorShape, dtype: str, *, again: bool = False
) -> Single:
    """The gradient by x, of a gated activation that by y, and with `again` its output.

    A ReLU's x is its output, which has the same signs.
    """
    make, by_x = _Maker(), dense("by_x", shape, dtype)
    gradient, x = (
        Arg(make.given("gradient", shape, dtype)),
        Arg(make.given("x", shape, dtype)),
    )
    if kind == "relu":
        make.one("threshold_backward", by_x, grad_output=gradient, self=x, threshold=0)
        return make.single("by_x")
    if kind == "relu2":
        opened = Arg(make.one("relu", dense("relu", shape, dtype), self=x))
        slope = Arg(make.one("mul", dense("slope", shape, dtype), self=opened, other=2.0))
        make.one("mul", by_x, self=gradient, other=slope)
        return make.single("by_x")
    if kind not in GATES:
        approximate = APPROXIMATE[kind]
        make.one("gelu_backward", by_x, grad_output=gradient, self=x, approximate=approximate)
        return make.single("by_x")
    y = Arg(make.given("y", shape, dtype))
    inner = Arg(make.one("mul", dense("inner", shape, dtype), self=gradient, other=y))
    opened = _opened(make, kind, x, shape, dtype)
    if kind == "swiglu":
        make.one("silu_backward", by_x, grad_output=inner, self=x)
    else:
        approximate = APPROXIMATE[kind]
        make.one("gelu_backward", by_x, grad_output=inner, self=x, approximate=approximate)
    make.one("mul", dense("by_y", shape, dtype), self=gradient, other=opened)
    if not again:
        return make.single("by_x", "by_y")
    make.one("mul", dense("out", shape, dtype), self=opened, other=y)
    return make.single("by_x", "by_y", "out")


# Numbers of an xIELU (bigplan/spec/xielu.py), fp32 [1] each.
XIELU = ("positive", "negative", "slope", "edge")


def xielu(shape: TensorShape, dtype: str) -> Single:
    """XIELU of x, by numbers with the names in XIELU."""
    make = _Maker()
    x = Arg(make.given("x", shape, dtype))
    by = {name: Arg(make.given(name, (1,), "fp32")) for name in XIELU}
    above, opened = _xielu_parts(make, x, by["edge"], shape)
    high = make.mul("high", make.mul("square", x, x, shape), by["positive"], shape)
    rest = _made(make, "sub", "rest", shape, self=opened, other=x)
    low = make.mul("low", rest, by["negative"], shape)
    curve = _made(make, "where", "curve", shape, condition=above, self=high, other=low)
    line = make.mul("line", x, by["slope"], shape)
    make.one("add", dense("out", shape, dtype), self=curve, other=line)
    return make.single("out")


def xielu_backward(shape: TensorShape, dtype: str) -> Single:
    """The gradient by x, and of every row the sums of those by `positive` and `negative`.

    Sums are fp32 [*rows, 1].
    """
    make = _Maker()
    gradient, x = (Arg(make.given(name, shape, dtype)) for name in ("gradient", "x"))
    by = {name: Arg(make.given(name, (1,), "fp32")) for name in XIELU}
    above, opened = _xielu_parts(make, x, by["edge"], shape)
    left = Arg(make.one("lt", dense("left", shape, "bool"), self=x, other=by["edge"]))
    rising = _made(make, "where", "rising", shape, condition=left, self=opened, other=-1.0)
    high = make.mul("high", make.mul("twice", x, by["positive"], shape), 2.0, shape)
    low = make.mul("low", rising, by["negative"], shape)
    curve = _made(make, "where", "curve", shape, condition=above, self=high, other=low)
    slope = _made(make, "add", "steep", shape, self=curve, other=by["slope"])
    make.mul("by_x", gradient, slope, shape, dtype)
    rest = _made(make, "sub", "rest", shape, self=opened, other=x)
    square = make.mul("square", x, x, shape)
    sides: dict[str, tuple[Argument, Argument]] = {
        "by_positive": (square, 0.0),
        "by_negative": (0.0, rest),
    }
    for name, (one, other) in sides.items():
        side = _made(make, "where", f"side {name}", shape, condition=above, self=one, other=other)
        part = make.mul(f"part {name}", side, gradient, shape)
        row = dense(name, (*shape[:-1], 1), "fp32")
        make.one("sum", row, self=part, dim=(-1,), keepdim=True)
    return make.single("by_x", *sides)


def _xielu_parts(make: _Maker, x: Arg, edge: Arg, shape: TensorShape) -> tuple[Arg, Arg]:
    """Whether x is above 0, and e^m - 1 of what is at most the edge."""
    above = Arg(make.one("gt", dense("above", shape, "bool"), self=x, other=0.0))
    limited = _made(make, "minimum", "limited", shape, self=x, other=edge)
    power = _made(make, "exp", "power", shape, self=limited)
    return above, _made(make, "sub", "opened", shape, self=power, other=1.0)


def _made(make: _Maker, op: str, name: str, shape: TensorShape, /, **arguments: Argument) -> Arg:
    return Arg(make.one(op, dense(name, shape, "fp32"), **arguments))


def rotary(
    shape: TensorShape, strides: TensorShape, half: int, dtype: str, *, back: bool = False
) -> Single:
    """Heads [b, s, heads, d], the pairs (i, i + half) turned by cos and sin [s, 1, half].

    They are read in parts: first and second half of what turns, and the rest.
    """
    make, columns = _Maker(), shape[-1]
    cos, sin = (Arg(make.given(name, (shape[1], 1, half), dtype)) for name in ("cos", "sin"))
    piece = (*shape[:-1], half)
    first, second = (Arg(make.given(name, piece, dtype, strides)) for name in ("first", "second"))
    rest = (*shape[:-1], columns - 2 * half)
    others = (Arg(make.given("rest", rest, dtype, strides)),) if rest[-1] else ()

    def made(op: str, name: str, a: Arg, b: Arg) -> Arg:
        return Arg(make.one(op, dense(name, piece, "fp32"), self=a, other=b))

    turned, other = ("add", "sub") if back else ("sub", "add")
    low = made(turned, "low", made("mul", "a", first, cos), made("mul", "b", second, sin))
    high = made(other, "high", made("mul", "c", second, cos), made("mul", "d", first, sin))
    make.one("cat", dense("out", shape, dtype), tensors=(low, high, *others), dim=-1)
    return make.single("out")


def cross_entropy(rows: int, columns: int, dtype: str, cap: float | None = None) -> Single:
    """Losses fp32 [rows, 1] of logits, and their gradient times `scale` [1], dtype of the logits.

    With a cap the logits are cap * tanh(logit / cap).

    One pass takes the logarithm of the sum of exponentials. A second pass writes the gradient; it
    reads the row from the L2 cache if the row is still there.
    """
    make = _Maker()
    logits = Arg(make.given("logits", (rows, columns), dtype))
    targets = Arg(make.given("targets", (rows, 1), "int64"))
    scale = Arg(make.given("scale", (1,), "fp32"))
    outputs = dense("losses", (rows, 1), "fp32"), dense("by_logits", (rows, columns), dtype)
    make.node(
        "cross_entropy_and_gradient", outputs, self=logits, target=targets, scale=scale,
        cap=cap or 0.0,
    )  # fmt: skip
    return make.single("losses", "by_logits")


# What an AdamW step multiplies and divides by, in the order of runtime/optimizer/adamw.py's, the
# gradient's divisor last.
FACTORS = ("decay", "fresh", "square_kept", "square_fresh", "unbias", "epsilon", "step", "divisor")


def adamw(count: int, gradient: str, copy: str | None) -> Single:
    """AdamW on fp32 parameters and moments [count], which it gives anew, with a copy in `copy`.

    Factors are fp32 [1] by the names in FACTORS. Each position is read and written once.
    """
    make, shape = _Maker(), (count,)
    p, m, v = (Arg(make.given(name, shape, "fp32")) for name in ("p", "m", "v"))
    g = Arg(make.given("g", shape, gradient))
    by = {name: Arg(make.given(name, (1,), "fp32")) for name in FACTORS}
    numbers = iter(range(100))

    def made(op: str, a: Arg, b: Arg | None = None, name: str = "") -> Arg:
        output = dense(name or f"t{next(numbers)}", shape, "fp32")
        more = {} if b is None else {"other": b}
        return Arg(make.one(op, output, self=a, **more))

    g = made("div", g, by["divisor"])
    first = made("add", m, made("mul", made("sub", g, m), by["fresh"]), "new m")
    square = made("mul", made("mul", g, g), by["square_fresh"])
    second = made("add", made("mul", v, by["square_kept"]), square, "new v")
    deviation = made("add", made("div", made("sqrt", second), by["unbias"]), by["epsilon"])
    change = made("mul", made("div", first, deviation), by["step"])
    result = made("add", made("mul", p, by["decay"]), change, "new p")
    if copy is None:
        return make.single("new p", "new m", "new v")
    make.one("_to_copy", dense("copy", shape, copy), self=result)
    return make.single("new p", "new m", "new v", "copy")
