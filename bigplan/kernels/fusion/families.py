"""The graph of a shipped model's block, forward and backward, as autograd would record it.

Written from the steps of bigplan/spec/layers.py without torch, so that the planner half can say
which kernels a block would have. Products that share an input are one, as in the native runtime.
"""

from __future__ import annotations

from dataclasses import replace

from bigplan.kernels.fusion.graph import (
    Arg,
    Argument,
    KernelGraph,
    KernelNode,
    KernelValue,
    dense,
    dense_strides,
    frozen,
)
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import LayerStep, StepOp
from bigplan.spec.step import StepValue as Named

APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def block_graph(model: ModelSpec, batch: int, length: int, dtype: str) -> KernelGraph:
    """One block on so many sequences of so many tokens, and its gradients."""
    return _BlockGraph(model, batch, length, dtype).graph()


class _BlockGraph:
    def __init__(self, model: ModelSpec, batch: int, length: int, dtype: str) -> None:
        self.model, self.batch, self.length, self.dtype = model, batch, length, dtype
        # Of attention, beyond torch's own arguments; blocks may differ in the window.
        first = model.attentions[0].window
        self.window = first if first is not None and first < length else None
        self.scores = {"scale": model.scale_of_scores, "cap": model.score_cap}
        self.nodes: list[KernelNode] = []
        self.values: dict[str, KernelValue] = {}
        self.inputs: list[KernelValue] = []
        self.where: dict[str, str] = {}  # of a step's values, what they are called here
        self.gradients: dict[str, str] = {}
        self.by_parameter: list[str] = []
        self.kept: dict[str, tuple[str, ...]] = {}  # of a step, what its backward reads
        self.back = False

    def graph(self) -> KernelGraph:
        """Forward, then each step's backward in reverse order."""
        steps = self.model.steps("block")
        self.where[steps[0].reads[0].name] = self.given("x", (*self.rows, self.model.hidden))
        for step in steps:
            self._forward(step)
        output = steps[-1].gives[0].name
        tangent = self.given("tangents_1", (*self.rows, self.model.hidden))
        self.gradients[output] = tangent
        self.back = True
        for step in reversed(steps):
            self._backward(step)
        by_input = self.gradients[steps[0].reads[0].name]
        outputs = (self.where[output], by_input, *self.by_parameter)
        return KernelGraph(tuple(self.inputs), tuple(self.nodes), outputs, 1)

    # --- Nodes.

    @property
    def rows(self) -> tuple[int, int]:
        return self.batch, self.length

    def given(self, name: str, shape: tuple[int, ...], dtype: str = "") -> str:
        value = dense(name, shape, dtype or self.dtype)
        self.inputs.append(value)
        self.values[name] = value
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def node(
        self, op: str, outputs: list[KernelValue], /, **arguments: Argument
    ) -> tuple[str, ...]:
        name = f"{op}_{len(self.nodes)}"
        many = len(outputs) > 1
        named = tuple(
            replace(value, name=f"{name}.{value.name}" if many else name) for value in outputs
        )
        self.values.update({value.name: value for value in named})
        self.nodes.append(KernelNode(name, op, frozen(arguments), named, self.back))
        return tuple(value.name for value in named)

    def like(self, name: str) -> KernelValue:
        return dense("", self.shape(name), self.values[name].dtype)

    def one(self, op: str, value: KernelValue, /, **arguments: Argument) -> str:
        return self.node(op, [value], **arguments)[0]

    def add(self, a: str, b: str) -> str:
        return self.one("add", self.like(a), self=Arg(a), other=Arg(b))

    def mul(self, a: str, b: str) -> str:
        return self.one("mul", self.like(a), self=Arg(a), other=Arg(b))

    def view(self, name: str, shape: tuple[int, ...]) -> str:
        if self.shape(name) == shape:
            return name
        before = self.values[name]
        strides = dense_strides(shape) if before.contiguous else _split(before, shape)
        return self.one("view", KernelValue("", shape, before.dtype, strides), self=Arg(name))

    def columns(self, name: str, start: int, end: int) -> str:
        before = self.values[name]
        value = replace(before, name="", shape=(*before.shape[:-1], end - start))
        return self.one("slice", value, self=Arg(name), dim=-1, start=start, end=end)

    def cat(self, names: list[str]) -> str:
        if len(names) == 1:
            return names[0]
        shape = self.shape(names[0])
        wide = (*shape[:-1], sum(self.shape(name)[-1] for name in names))
        tensors = tuple(Arg(name) for name in names)
        return self.one("cat", dense("", wide, self.dtype), tensors=tensors, dim=-1)

    def turned(self, name: str, order: tuple[int, ...]) -> str:
        before = self.values[name]
        shape = tuple(before.shape[i] for i in order)
        strides = tuple(before.strides[i] for i in order)
        value = KernelValue("", shape, before.dtype, strides)
        return self.one("permute", value, self=Arg(name), dims=order)

    # --- Steps.

    def _forward(self, step: LayerStep) -> None:
        read = [self.where[value.name] for value in step.reads]
        match step.op:
            case StepOp.NORM:
                self._norm(step, read[0])
            case StepOp.PRODUCT:
                self._product(step, read[0])
            case StepOp.ROTARY:
                for value, given in zip(step.reads, step.gives, strict=True):
                    heads = self._heads(self.where[value.name], value)
                    self.where[given.name] = self._rotated(heads, back=False)
            case StepOp.ATTENTION:
                self._attention(step)
            case StepOp.ACTIVATION:
                self._activation(step, read)
            case StepOp.SCALE:
                self.where[step.gives[0].name] = self._scaled(step, read[0])
            case StepOp.SUM:
                self.where[step.gives[0].name] = self.add(read[0], read[1])
            case _:
                raise AssertionError(f"a block has no {step.op}")

    def _backward(self, step: LayerStep) -> None:
        match step.op:
            case StepOp.NORM:
                self._norm_back(step)
            case StepOp.PRODUCT:
                self._product_back(step)
            case StepOp.ROTARY:
                for value, given in zip(step.reads, step.gives, strict=True):
                    heads = self._heads(self.gradients[given.name], value)
                    self._gives(value, self._rotated(heads, back=True))
            case StepOp.ATTENTION:
                self._attention_back(step)
            case StepOp.ACTIVATION:
                self._activation_back(step)
            case StepOp.SCALE:
                self._gives(step.reads[0], self._scaled(step, self.gradients[step.gives[0].name]))
            case _:
                for value in step.reads:
                    self._gives(value, self.gradients[step.gives[0].name])

    def _gives(self, value: Named, gradient: str) -> None:
        """Adds to the gradient of what a step reads."""
        gradient = self.view(gradient, self.shape(self.where[value.name]))
        before = self.gradients.get(value.name)
        self.gradients[value.name] = gradient if before is None else self.add(before, gradient)

    def _heads(self, name: str, value: Named) -> str:
        return self.view(name, (*self.rows, value.parts, value.each))

    def _parameters(self, step: LayerStep) -> dict[str, str]:
        return {p.name.rsplit(".", 1)[-1]: self.given(p.name, p.shape) for p in step.parameters}

    def _norm(self, step: LayerStep, x: str) -> None:
        of_heads = step.reads[0].split
        if of_heads and not self.model.qk_norm_whole:
            x = self._heads(x, step.reads[0])
        weights = self._parameters(step)
        columns = self.shape(x)[-1]
        row = dense("", (*self.shape(x)[:-1], 1), "fp32")
        arguments: dict[str, Argument] = {
            "input": Arg(x), "normalized_shape": (columns,), "weight": Arg(weights["weight"]),
            "eps": self.model.norm_epsilon, **self._plus_one(),
        }  # fmt: skip
        if self.model.norm == "rmsnorm" or of_heads:
            outputs = [replace(self.like(x), name="0"), replace(row, name="1")]
            made = self.node("_fused_rms_norm", outputs, **arguments)
        else:
            arguments["bias"] = Arg(weights["bias"]) if "bias" in weights else None
            outputs = [
                replace(self.like(x), name="0"), replace(row, name="1"), replace(row, name="2")
            ]  # fmt: skip
            made = self.node("native_layer_norm", outputs, **arguments)
        self.where[step.gives[0].name] = made[0]
        self.kept[step.name] = (x, *made[1:], *weights.values())

    def _scaled(self, step: LayerStep, x: str) -> str:
        """Times the factor of an MLP's gate, or of what a part adds to the residual stream."""
        part = step.name.removesuffix(" scale")
        factor = self.model.gate_scale if part == "gate" else self.model.scale_of(part)
        return self.one("mul", self.like(x), self=Arg(x), other=factor)

    def _plus_one(self) -> dict[str, Argument]:
        """Of a norm that multiplies by 1 + weight, as `single.py` has it."""
        return {"plus_one": True} if self.model.norm_plus_one else {}

    def _norm_back(self, step: LayerStep) -> None:
        x, *rest = self.kept[step.name]
        rms = self.model.norm == "rmsnorm" or step.reads[0].split
        statistics, weights = (rest[:1], rest[1:]) if rms else (rest[:2], rest[2:])
        gradient = self.view(self.gradients[step.gives[0].name], self.shape(x))
        vector = dense("", (self.shape(x)[-1],), self.dtype)
        mask: tuple[bool, ...] = (True, True) if rms else (True, True, len(weights) > 1)
        outputs = [replace(self.like(x), name="0")]
        outputs += [replace(vector, name=str(i)) for i, want in enumerate(mask) if i and want]
        names = ("rstd",) if rms else ("mean", "rstd")
        arguments: dict[str, Argument] = {
            "grad_out": Arg(gradient), "input": Arg(x), "normalized_shape": (self.shape(x)[-1],)
        }  # fmt: skip
        arguments |= {name: Arg(value) for name, value in zip(names, statistics, strict=True)}
        arguments |= {"weight": Arg(weights[0]), "output_mask": mask, **self._plus_one()}
        op = "_fused_rms_norm_backward" if rms else "native_layer_norm_backward"
        made = self.node(op, outputs, **arguments)
        self.by_parameter += made[1:]
        self._gives(step.reads[0], made[0])

    def _product(self, step: LayerStep, x: str) -> None:
        widths = [value.columns() for value in step.gives]
        flat = self.view(x, (self.batch * self.length, step.reads[0].columns()))
        weight = self.given(f"{step.name} weight", (self.shape(flat)[-1], sum(widths)))
        made = dense("", (self.shape(flat)[0], sum(widths)), self.dtype)
        bias = ""
        if step.biased:
            bias = self.given(f"{step.name} bias", (sum(widths),))
            product = self.one("addmm", made, self=Arg(bias), mat1=Arg(flat), mat2=Arg(weight))
        else:
            product = self.one("mm", made, self=Arg(flat), mat2=Arg(weight))
        whole, start = self.view(product, (*self.rows, sum(widths))), 0
        for value, width in zip(step.gives, widths, strict=True):
            part = whole if len(widths) == 1 else self.columns(whole, start, start + width)
            self.where[value.name], start = part, start + width
        self.kept[step.name] = (flat, weight, bias)

    def _product_back(self, step: LayerStep) -> None:
        x, weight, bias = self.kept[step.name]
        parts = [
            self.view(self.gradients[value.name], (*self.rows, value.columns()))
            for value in step.gives
        ]
        flat = self.view(self.cat(parts), (self.shape(x)[0], self.shape(weight)[1]))
        other = self.turned(weight, (1, 0))
        by_x = self.one("mm", self.like(x), self=Arg(flat), mat2=Arg(other))
        across = self.turned(flat, (1, 0))
        by_weight = self.one(
            "mm",
            dense("", self.shape(weight)[::-1], self.dtype),
            self=Arg(across),
            mat2=Arg(x),
        )
        self.by_parameter.append(by_weight)
        if bias:
            vector = dense("", self.shape(bias), self.dtype)
            self.by_parameter.append(self.one("sum", vector, self=Arg(flat), dim=(0,)))
        self._gives(step.reads[0], by_x)

    def _rotated(self, x: str, *, back: bool) -> str:
        """X turned by the tables' angles, or back: a rotation's transpose."""
        width, half = self.model.rotary_width, self.model.rotary_width // 2
        columns = self.shape(x)[-1]
        tables = ("cos", "sin")
        if not any(value.name == "cos" for value in self.inputs):
            for table in tables:
                self.given(table, (self.length, 1, width))
        part = x if width == columns else self.columns(x, 0, width)
        if back:
            inner = self.mul(part, "sin")
            low, high = self.columns(inner, 0, half), self.columns(inner, half, width)
            other = self.cat([high, self.one("neg", self.like(low), self=Arg(low))])
        else:
            low, high = self.columns(part, 0, half), self.columns(part, half, width)
            swapped = self.cat([self.one("neg", self.like(high), self=Arg(high)), low])
            other = self.mul(swapped, "sin")
        turned = self.add(self.mul(part, "cos"), other)
        return turned if width == columns else self.cat([turned, self.columns(x, width, columns)])

    def _attention(self, step: LayerStep) -> None:
        heads = [self._heads(self.where[value.name], value) for value in step.reads]
        query, key, value = (self.turned(name, (0, 2, 1, 3)) for name in heads)
        made = replace(self.values[query], name="0", strides=self._strides(heads[0]))
        sums = dense("1", self.shape(query)[:-1], "fp32")
        out, lse = self.node(
            "scaled_dot_product_attention", [made, sums],
            query=Arg(query), key=Arg(key), value=Arg(value), is_causal=True, window=self.window,
            **self.scores,
        )  # fmt: skip
        mixed = self.turned(out, (0, 2, 1, 3))
        self.where[step.gives[0].name] = self.view(mixed, (*self.rows, step.gives[0].columns()))
        self.kept[step.name] = (query, key, value, out, lse)

    def _strides(self, heads: str) -> tuple[int, ...]:
        batch, tokens, head, column = dense_strides(self.shape(heads))
        return batch, head, tokens, column

    def _attention_back(self, step: LayerStep) -> None:
        query, key, value, out, lse = self.kept[step.name]
        given = step.gives[0]
        gradient = self.turned(self._heads(self.gradients[given.name], given), (0, 2, 1, 3))
        outputs = [
            replace(self.values[name], name=str(i), strides=_attended(self.values[name]))
            for i, name in enumerate((query, key, value))
        ]
        made = self.node(
            "scaled_dot_product_attention_backward", outputs, grad_out=Arg(gradient),
            query=Arg(query), key=Arg(key), value=Arg(value), out=Arg(out), logsumexp=Arg(lse),
            is_causal=True, window=self.window,
            **self.scores,
        )  # fmt: skip
        for read, name in zip(step.reads, made, strict=True):
            self._gives(read, self.turned(name, (0, 2, 1, 3)))

    def _activation(self, step: LayerStep, read: list[str]) -> None:
        x, mlp = Arg(read[0]), self.model.mlp
        if self.model.gated:
            op, more = self._gate()
            opened = self.one(op, self.like(read[0]), self=x, **more)
            made = self.mul(opened, read[1])
            self.kept[step.name] = (opened,)
        elif mlp == "relu":
            made = self.one("relu", self.like(read[0]), self=x)
        elif mlp == "relu2":
            opened = self.one("relu", self.like(read[0]), self=x)
            made = self.mul(opened, opened)
            self.kept[step.name] = (opened,)
        else:
            made = self.one("gelu", self.like(read[0]), self=x, approximate=APPROXIMATE[mlp])
        self.where[step.gives[0].name] = made

    def _gate(self) -> tuple[str, dict[str, Argument]]:
        """What a gate's operator is."""
        geglu: dict[str, Argument] = {"approximate": "tanh"}
        return ("silu", {}) if self.model.mlp == "swiglu" else ("gelu", geglu)

    def _activation_back(self, step: LayerStep) -> None:
        mlp, read = self.model.mlp, [self.where[value.name] for value in step.reads]
        d = self.view(self.gradients[step.gives[0].name], self.shape(read[0]))
        value = self.like(read[0])
        if self.model.gated:
            (op, more), inner = self._gate(), self.mul(d, read[1])
            by_gate = self.one(
                f"{op}_backward", value, grad_output=Arg(inner), self=Arg(read[0]), **more
            )
            self._gives(step.reads[1], self.mul(d, self.kept[step.name][0]))
            self._gives(step.reads[0], by_gate)
            return
        if mlp == "relu2":
            slope = self.one("mul", value, self=Arg(self.kept[step.name][0]), other=2.0)
            self._gives(step.reads[0], self.mul(d, slope))
            return
        if mlp == "relu":
            output = Arg(self.where[step.gives[0].name])
            by_x = self.one(
                "threshold_backward", value, grad_output=Arg(d), self=output, threshold=0
            )
        else:
            by_x = self.one(
                "gelu_backward", value, grad_output=Arg(d), self=Arg(read[0]),
                approximate=APPROXIMATE[mlp],
            )  # fmt: skip
        self._gives(step.reads[0], by_x)


def _attended(value: KernelValue) -> tuple[int, ...]:
    """Strides of [b, heads, s, d] that lies as [b, s, heads, d]."""
    _, heads, length, columns = value.shape
    return heads * length * columns, columns, heads * columns, 1


def _split(value: KernelValue, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a view that takes the last dimension apart, or puts two together."""
    if len(shape) > len(value.shape):
        return (*value.strides[:-1], shape[-1], 1)
    if len(shape) < len(value.shape) and value.shape[-1] != shape[-1]:
        return (*value.strides[: len(shape) - 1], 1)
    return (*value.strides[: len(shape) - 2], value.strides[-2], 1)
