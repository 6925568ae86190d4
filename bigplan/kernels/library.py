"""A library of generated kernels for a block's operators, made at a shape's first use and kept.

Each is one of `single.py`'s, with the tile that the model picks for the GPU. Functions take and
give tensors without autograd, which is around them in `runtime/generated.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigplan.errors import InputError
from bigplan.kernels.fusion import single
from bigplan.kernels.fusion.price import Fused, Pricer
from bigplan.kernels.fusion.single import ActivationKind, NormKind, Single
from bigplan.kernels.launch import NOTHING, Into, LaunchedKernel

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class _LibraryKernel:
    """A kernel that takes its inputs by name and gives its outputs as `single.py` orders them."""

    def __init__(self, made: Single, fused: Fused) -> None:
        self.kernel = LaunchedKernel(fused.body, fused.choices)
        self.inputs = tuple(value.name for value in fused.body.inputs)
        names = [value.name for value in fused.body.outputs]
        self.order = tuple(names.index(name) for name in made.wanted)

    def __call__(self, named: Mapping[str, Tensor], into: Into = NOTHING) -> tuple[Tensor, ...]:
        found = self.kernel(*(named[name] for name in self.inputs), into=into)
        return tuple(found[i] for i in self.order)


class Library:
    """All kernels of a process, for one GPU."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._entries: dict[Any, _LibraryKernel] = {}

    def _entry(self, key: Any, make: Callable[[], Single]) -> _LibraryKernel:
        if key not in self._entries:
            self._entries[key] = self._made(make())
        return self._entries[key]

    def _made(self, made: Single) -> _LibraryKernel:
        nodes = [node for node in made.graph.nodes if not node.layout]
        fused = self.pricer.fused(made.graph, nodes, frozenset(made.wanted))
        if isinstance(fused, str):
            shape = made.graph.inputs[0].shape
            raise InputError(
                f"no kernel is generated for {nodes[-1].op} of {shape}: {fused}; use torch's "
                "operators (`kernels: torch`)"
            )
        return _LibraryKernel(made, fused)

    # --- Norms over the last dimension.

    def norm(
        self, kind: NormKind, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, ...]:
        """Normed x in its dtype, and its statistics, fp32 [..., 1]."""
        return self._norm(kind, {"x": x.contiguous(), "weight": weight}, bias, epsilon)

    def added_norm(
        self, kind: NormKind, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The same of x + y, and then x + y itself, which takes the place of y."""
        named = {"x": x.contiguous(), "y": y.contiguous(), "weight": weight}
        return self._norm(kind, named, bias, epsilon, {"sum": named["y"]})

    def _norm(
        self, kind: NormKind, named: dict[str, Tensor], bias: Tensor | None, epsilon: float,
        into: Into = NOTHING,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x, biased, added = named["x"], bias is not None, "y" in named
        if bias is not None:
            named["bias"] = bias
        entry = self._entry(
            ("norm", kind, x.shape, x.dtype, epsilon, biased, added),
            lambda: single.norm(
                kind, tuple(x.shape[:-1]), x.shape[-1], NAMES[x.dtype], epsilon, biased=biased,
                added=added,
            ),
        )  # fmt: skip
        return entry(named, into)

    def norm_backward(
        self,
        kind: NormKind,
        named: Mapping[str, Tensor],
        beside: Tensor | None = None,
        *,
        biased: bool = False,
        frozen: bool = False,
        over: bool = False,
    ) -> tuple[Tensor, ...]:
        """Gradients by x, weight and bias, of `gradient`, x, weight, (mean,) rstd by these names.

        `frozen`: that by x alone. `beside`, like x, is added to the gradient by x, and with
        `over` overwritten by it.
        """
        named = {name: tensor.contiguous() for name, tensor in named.items()}
        into = NOTHING
        if beside is not None:
            named["beside"] = beside.contiguous()
            into = {"total": named["beside"]} if over else NOTHING
        x, added = named["x"], beside is not None
        entry = self._entry(
            ("norm backward", kind, x.shape, x.dtype, biased, frozen, added),
            lambda: single.norm_backward(
                kind, tuple(x.shape[:-1]), x.shape[-1], NAMES[x.dtype],
                biased=biased, frozen=frozen, beside=added,
            ),
        )  # fmt: skip
        return entry(named, into)

    # --- Activations.

    def activation(self, kind: ActivationKind, *inputs: Tensor) -> Tensor:
        """The activation of x, or of a gate and up."""
        x = inputs[0]
        entry = self._entry(
            ("activation", kind, x.shape, x.dtype),
            lambda: single.activation(kind, tuple(x.shape), NAMES[x.dtype]),
        )
        (out,) = entry(dict(zip("xy", (one.contiguous() for one in inputs), strict=False)))
        return out

    def activation_backward(
        self, kind: ActivationKind, gradient: Tensor, *inputs: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Gradients by the inputs (of a ReLU its output stands for its input).

        A gated activation's output goes to `out`, which may be `gradient` itself, contiguous.
        """
        x, again = inputs[0], out is not None
        entry = self._entry(
            ("activation backward", kind, x.shape, x.dtype, again),
            lambda: single.activation_backward(kind, tuple(x.shape), NAMES[x.dtype], again=again),
        )
        named = dict(zip("xy", (one.contiguous() for one in inputs), strict=False))
        found = entry(
            named | {"gradient": gradient.contiguous()}, NOTHING if out is None else {"out": out}
        )
        return found[: len(inputs)]

    def xielu(self, x: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """XIELU of x, by numbers fp32 [1] in the order of single.XIELU."""
        entry = self._entry(
            ("xielu", x.shape, x.dtype), lambda: single.xielu(tuple(x.shape), NAMES[x.dtype])
        )
        named = dict(zip(single.XIELU, numbers, strict=True))
        (out,) = entry(named | {"x": x.contiguous()})
        return out

    def xielu_backward(
        self, x: Tensor, numbers: Sequence[Tensor], gradient: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients by x and by the first two numbers."""
        entry = self._entry(
            ("xielu backward", x.shape, x.dtype),
            lambda: single.xielu_backward(tuple(x.shape), NAMES[x.dtype]),
        )
        named = dict(zip(single.XIELU, numbers, strict=True))
        named |= {"x": x.contiguous(), "gradient": gradient.contiguous()}
        by_x, *sums = entry(named)
        return by_x, *(one.sum().view(1) for one in sums)

    # --- Positions and the loss.

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
        """Heads x [b, s, heads, d] of any strides, turned by cos and sin [s, r / 2]; contiguous."""
        half, key = cos.shape[-1], (x.shape, x.stride(), x.dtype, back)
        entry = self._entry(
            ("rotary", half, key),
            lambda: single.rotary(
                tuple(x.shape), tuple(x.stride()), half, NAMES[x.dtype], back=back
            ),
        )
        named = {
            "first": x[..., :half],
            "second": x[..., half : 2 * half],
            "rest": x[..., 2 * half :],
        }
        (out,) = entry(named | {"cos": cos.unsqueeze(1), "sin": sin.unsqueeze(1)})
        return out

    def cross_entropy_(
        self, logits: Tensor, targets: Tensor, scale: Tensor, cap: float | None = None
    ) -> Tensor:
        """Losses fp32 [n] of contiguous logits [n, V], which their gradient times `scale` replaces.

        Targets int64 [n]: a negative one counts nothing. `scale`: one fp32 element. `cap`: logits
        are cap * tanh(logit / cap).
        """
        assert logits.is_contiguous()
        rows, columns = logits.shape
        entry = self._entry(
            ("loss", rows, columns, logits.dtype, cap),
            lambda: single.cross_entropy(rows, columns, NAMES[logits.dtype], cap),
        )
        named = {"logits": logits, "targets": targets.view(-1, 1), "scale": scale.view(1)}
        losses, _ = entry(named, {"by_logits": logits})
        return losses.view(-1)
