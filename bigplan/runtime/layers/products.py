"""Products with weights whose gradients are added to fp32 sums inside the matrix product.

Autograd makes every micro-batch's gradient of a weight as a separate tensor in the weight's dtype.
So the gradient is rounded before it is added, and the addition costs 2 + 4 + 4 bytes of traffic an
element. Here the backward's product adds to the sum itself, so that bf16 and fp16 gradients are
never rounded to 16 bits. Megatron-LM's gradient accumulation fusion does the same with its own
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.attention.latent import Whole
from bigplan.runtime.experts.expert_parallel import ALL_HERE, ExpertParallel
from bigplan.runtime.experts.mixture import Mixture
from bigplan.runtime.generated import rows_of
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.linear.adapters import Adapters, adapted, below_each_other
from bigplan.runtime.linear.dropout import DroppedAdapters, Drops
from bigplan.runtime.linear.matrices import AS_STORED, Matrices, Opened
from bigplan.runtime.mixers.ways import PLAIN, Parameters, Ways
from bigplan.runtime.operators import GateKind, gated_backward
from bigplan.runtime.operators import gated as gated_activation
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.spec.layers import SHARED_GATE

if TYPE_CHECKING:
    from bigplan.kernels.library import Library

# What adds a weight's gradient, of the output's gradient and the input as `Matrices` give them.
Add = Callable[[Any, Any], None]
Beside = Adapters | DroppedAdapters


class Factor(NamedTuple):
    """A factor of x: weight [out, in] and bias, and where the weight's gradient goes.

    Without `add` autograd gets it, if it asks for it: of frozen weights nobody does. `add` takes
    what `matrices` make of the output's gradient and the input.
    """

    weight: Tensor
    bias: Tensor | None
    add: Add | None = None
    matrices: Matrices = AS_STORED


def _by_weight(
    matrices: Matrices, add: Add | None, factors: tuple[Any, Any], *, asked: bool
) -> Tensor | None:
    """The weight's gradient for autograd, where nobody else gets it and autograd asks for it."""
    if add is None:
        return matrices.by_weight(*factors) if asked else None
    add(*factors)
    return None


class _Linears(Function):
    """F.linear of one input by several weights, those of a matrix that ranks split by rows.

    The gradients by the input are added inside the products. Autograd would make each a tensor that
    one more kernel adds (0.56 of 51 ms of a block's backward on an H200). If ranks have parts of
    the input, each keeps only its part. The parts are gathered again beside the products by the
    input; the sum of those products goes on beside the products by weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ranks: TensorParallel,
        x: Tensor,
        adds: tuple[Sequence[Add | None], Beside | None, Sequence[Matrices]],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.adds, ctx.adapters, ctx.matrices = adds
        count = len(ctx.adds)
        weights, biases = parameters[:count], parameters[count:]
        ctx.asked = ctx.needs_input_grad[-2 * count :]
        read = any(ctx.adds) or any(ctx.asked[:count]) or ctx.adapters is not None
        ctx.save_for_backward(x if read else None, *weights)
        ctx.ranks, ctx.shape = ranks, x.shape
        whole = ranks.gather(x)()
        factor = ctx.matrices[0].read(whole)
        outputs = tuple(
            matrices.product(factor, w, b)
            for matrices, w, b in zip(ctx.matrices, weights, biases, strict=True)
            if w is not None
        )
        adapted(outputs, whole, ctx.adapters)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        again = None if x is None else ctx.ranks.gather(x)
        del x
        by_outputs = [by_output.flatten(0, -2) for by_output in gradients]
        given, by_input, by_narrow = [], None, None
        for matrices, gradient, weight in zip(ctx.matrices, by_outputs, weights, strict=True):
            given.append(matrices.given(gradient))
            by_input = matrices.by_input(given[-1], weight, by_input)
        assert by_input is not None
        if ctx.adapters is not None:
            by_narrow = ctx.adapters.by_narrow(by_outputs)
            ctx.adapters.add_by_input(by_input, by_narrow)
        summed = ctx.ranks.sum(by_input)
        rows = None if again is None else again().flatten(0, -2)
        found = list(_gradients(ctx, (by_outputs, given), rows))
        if by_narrow is not None:
            ctx.adapters.add_gradients(by_outputs, by_narrow, rows)
        return None, summed().view(ctx.shape), None, *found


def _gradients(
    ctx: Any, outputs: tuple[Sequence[Tensor], Sequence[Any]], rows: Tensor | None
) -> Iterator[Tensor | None]:
    """For autograd, by all weights and then all biases; `rows` None: nobody asks for weights'.

    `outputs`: their gradients, and what the matrices make of these.
    """
    by_outputs, given = outputs
    weights, biases = ctx.asked[: len(by_outputs)], ctx.asked[len(by_outputs) :]
    read = None if rows is None else ctx.matrices[0].read_again(rows)
    for matrices, add, gradient, asked in zip(ctx.matrices, ctx.adds, given, weights, strict=True):
        yield None if read is None else _by_weight(matrices, add, (gradient, read), asked=asked)
    for gradient, asked in zip(by_outputs, biases, strict=True):
        yield gradient.sum(0) if asked else None


def linears(
    x: Tensor,
    factors: Sequence[Factor],
    ranks: TensorParallel = ONE,
    adapters: Beside | None = None,
) -> tuple[Tensor, ...]:
    """F.linear of x [..., in] by each weight [out, in], and what `adapters` add.

    With `add` a weight gets no gradient from autograd: the backward calls it with the two factors.
    x is kept where a gradient is made of it: not by frozen weights alone. All factors read x alike.
    """
    weights, biases, adds, matrices = zip(*factors, strict=True)
    return _Linears.apply(ranks, x, (adds, adapters, matrices), *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


class _Closing(Function):
    """x + F.linear(inner, weight, bias), of a matrix that ranks split by columns: their sum.

    Without x the product alone. `factor`: a Factor's, and adapters. `unread`: for the backward
    alone, every element is one and the same.
    """

    @staticmethod
    def forward(
        ctx: Any, unread: bool, ranks: TensorParallel, x: Tensor | None, inner: Tensor, *factor: Any
    ) -> Tensor:
        weight, _, ctx.add, ctx.matrices, ctx.adapters = factor
        *_, ctx.asked, ctx.biased, _, _, _ = ctx.needs_input_grad
        read = ctx.add is not None or ctx.asked or ctx.adapters is not None
        ctx.save_for_backward(inner if read else None, weight)
        ctx.ranks, ctx.added, ctx.shape = ranks, x is not None, inner.shape
        if x is None:
            return _summed(ranks, inner, factor)
        return _nothing(x) if unread else x + _summed(ranks, inner, factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        inner, weight = ctx.saved_tensors
        (by_output,) = gradients
        gradient, by_weight = ctx.ranks.gather(by_output)().flatten(0, -2), None
        given = ctx.matrices.given(gradient)
        if inner is not None:
            rows = inner.flatten(0, -2)
            factors = given, ctx.matrices.read_again(rows)
            by_weight = _by_weight(ctx.matrices, ctx.add, factors, asked=ctx.asked)
            del factors
        by_inner = ctx.matrices.by_input(given, weight)
        if ctx.adapters is not None:
            by_narrow = ctx.adapters.by_narrow([gradient])
            ctx.adapters.add_by_input(by_inner, by_narrow)
            ctx.adapters.add_gradients([gradient], by_narrow, rows)
        by_bias = by_output.flatten(0, -2).sum(0) if ctx.biased else None
        by_x = by_output if ctx.added else None
        return None, None, by_x, by_inner.view(ctx.shape), by_weight, by_bias, None, None, None


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(()).expand_as(x)


def _summed(ranks: TensorParallel, inner: Tensor, factor: Sequence[Any]) -> Tensor:
    """The product of all ranks' columns as a hidden state; one of them adds the bias, for all."""
    weight, bias, _, matrices, adapters = factor
    output = matrices.product(matrices.read(inner), weight, bias if ranks.first else None)
    adapted([output], inner, adapters)
    return ranks.sum(output)()


class _Gated(Function):
    """x + F.linear(silu(gate) * up, weight, bias), whose activation is never kept.

    The pass that takes the gradients of gate and up also writes the activation again. Recomputing
    it before would take one more pass. Ranks, x, `factor` and `unread` as in _Closing.
    """

    @staticmethod
    def forward(
        ctx: Any, way: GatedWay, x: Tensor | None, gate: Tensor, up: Tensor, *factor: Any
    ) -> Tensor:
        weight, _, ctx.add, ctx.matrices, ctx.adapters = factor
        *_, ctx.asked, ctx.biased, _, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(gate, up, weight)
        ctx.ranks, ctx.way, ctx.added = way.products.ranks, way, x is not None
        if way.unread and x is not None:
            return _nothing(x)
        kernels, kind = way.products.kernels, way.kind
        inner = gated_activation(gate, up, kind) if kernels is None else (
            kernels.activation(kind, gate, up)
        )  # fmt: skip
        product = _summed(ctx.ranks, inner, factor)
        return product if x is None else x + product

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        (by_output,), kernels, kind = gradients, ctx.way.products.kernels, ctx.way.kind
        gradient, adapters = ctx.ranks.gather(by_output)().flatten(0, -2), ctx.adapters
        given = ctx.matrices.given(gradient)
        inner = ctx.matrices.by_input(given, weight)
        if adapters is not None:
            by_narrow = adapters.by_narrow([gradient])
            adapters.add_by_input(inner, by_narrow)
        inner = inner.view(gate.shape)
        if kernels is None:
            by_gate, by_up = gated_backward(gate, up, inner, out=inner, kind=kind)
        else:
            by_gate, by_up = kernels.activation_backward(kind, inner, gate, up, out=inner)
        del gate, up  # which may have been computed again, and are as large
        rows = inner.flatten(0, -2)
        factors = given, ctx.matrices.read_again(rows)
        by_weight = _by_weight(ctx.matrices, ctx.add, factors, asked=ctx.asked)
        if adapters is not None:
            adapters.add_gradients([gradient], by_narrow, rows)
        by_bias = by_output.flatten(0, -2).sum(0) if ctx.biased else None
        by_x = by_output if ctx.added else None
        return None, by_x, by_gate, by_up, by_weight, by_bias, None, None, None


class GatedWay(NamedTuple):
    """How a product with its gated activation runs."""

    products: Products
    kind: GateKind
    unread: bool


@dataclass(frozen=True, slots=True)
class Products:
    """A layer's products with weights: who shares them out, and who gets the weights' gradients.

    Without `sums` autograd gets them, for sums in 16 bits.
    """

    ranks: TensorParallel = ONE
    sums: Sums | None = None
    kernels: Library | None = None  # generated ones of what lies between products
    frozen: bool = False  # weights get no gradients: those of adapters go to `sums`
    scale: float = 0.0  # of adapters, where layers have some
    matrices: Matrices = AS_STORED
    spread: ExpertParallel = ALL_HERE
    drops: Drops | None = None  # of what adapters read; None: nothing

    @property
    def ways(self) -> Ways:
        """How a block runs its products."""
        usual = self.matrices is AS_STORED
        if usual and self.ranks.alone and self.sums is None and not self.frozen:
            ways = PLAIN._replace(kernels=self.kernels)
        else:
            ways = Ways(self.linears, closing=self.closing, kernels=self.kernels, alone=self.alone)
            ways = ways._replace(whole=self.whole)
        return ways._replace(experts=self.mixture, ranks=self.ranks)

    @property
    def whole(self) -> Whole:
        """Products with matrices that every rank has whole.

        Where all ranks have all tokens, one of them counts these matrices' gradients.
        """
        counts = self.ranks.first or self.ranks.parts > 1
        one = replace(self, ranks=ONE, sums=self.sums if counts else None)
        if self.drops is not None and self.ranks.parts > 1:
            one = replace(one, drops=self.drops._replace(part=self.ranks.group.place))
        return Whole(self.ranks, one.linears, one.closing)

    @property
    def mixture(self) -> Mixture:
        """How a block runs its experts."""
        rows = rows_of(self.kernels)
        mixture = Mixture(self.ranks, self.sums, rows=rows, frozen=self.frozen, scale=self.scale)
        return mixture._replace(grouped=self.matrices.grouped, spread=self.spread)

    def linears(self, p: Parameters, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        """As ways.plain_linears, of matrices that ranks split by rows."""
        factors = [self._factor(p, name) for name in names]
        return linears(x, factors, self.ranks, self.adapters(p, names))

    def closing(
        self, p: Parameters, name: str, x: Tensor, inner: Tensor, *, unread: bool = False
    ) -> Tensor:
        """Add to x the product of `inner` and `name`, which ranks split by columns.

        `unread`: the graph is the same, but its value is not computed. Recomputation needs the
        tensors that a block's operators save, and not the block's output.
        """
        factor = self._closing_factor(p, name)
        return _Closing.apply(unread, self.ranks, x, inner, *factor)  # type: ignore[no-any-return, no-untyped-call]

    def alone(self, p: Parameters, name: str, inner: Tensor) -> Tensor:
        """The product alone, for a kernel that adds it to x."""
        factor = self._closing_factor(p, name)
        return _Closing.apply(False, self.ranks, None, inner, *factor)  # type: ignore[no-any-return, no-untyped-call]

    def gated(
        self,
        p: Parameters,
        name: str,
        x: Tensor | None,
        inputs: tuple[Tensor, ...],
        kind: GateKind,
        *,
        unread: bool = False,
    ) -> Tensor:
        """Likewise of a gated activation of `inputs`, gate and up, which it keeps.

        Without x the product alone.
        """
        way, factor = GatedWay(self, kind, unread), self._closing_factor(p, name)
        return _Gated.apply(way, x, *inputs, *factor)  # type: ignore[no-any-return, no-untyped-call]

    def _closing_factor(self, p: Parameters, name: str) -> tuple[Any, ...]:
        """Of a matrix that ranks split by columns: a Factor's, and adapters."""
        return *self._factor(p, name), self.adapters(p, (name,), self.ranks.group.place)

    def _factor(self, p: Parameters, name: str) -> Factor:
        weight = f"{name}.weight"
        add = self._adding(weight) if self.sums and not self.frozen else None
        return Factor(p[weight], p.get(f"{name}.bias"), add, self.matrices_of(name))

    def matrices_of(self, name: str) -> Matrices:
        """How a product multiplies: a shared gate, of one row, is never in 4 bits."""
        in_dtype = f"{name}.weight" == SHARED_GATE and isinstance(self.matrices, Opened)
        return AS_STORED if in_dtype else self.matrices

    def _adding(self, weight: str) -> Add:
        """What adds to the weight's sum: the product itself, or what follows it."""
        assert self.sums is not None
        sums, matrices = self.sums, self.matrices
        if matrices.in_place:
            return partial(sums.add_product, weight)
        return lambda *factors: sums.add({weight: matrices.by_weight(*factors)})

    def adapters(self, p: Parameters, names: tuple[str, ...], place: int = 0) -> Beside | None:
        """Those of products of one input, where some of these have one.

        `place`: which of equal parts of its columns the input is.
        """
        targets = [name for name in names if f"{name}.lora_A" in p]
        if not targets:
            return None
        if self.drops is None:
            return self._adapters(p, names, targets)
        masks = (self.drops.mask(target, place) for target in targets)
        each = (self._adapters(p, names, [target]) for target in targets)
        return DroppedAdapters(tuple(zip(each, masks, strict=True)))

    def _adapters(self, p: Parameters, names: tuple[str, ...], targets: Sequence[str]) -> Adapters:
        scale = self.scale if self.drops is None else self.scale / (1.0 - self.drops.rate)
        downs = [f"{name}.lora_A" for name in targets]
        ups = {names.index(name): f"{name}.lora_B" for name in targets}
        down, up = below_each_other([p[name] for name in downs]), {n: p[ups[n]] for n in ups}
        if self.sums is None:
            return Adapters(scale, down, up)
        add_up = {n: partial(self.sums.add_product, name) for n, name in ups.items()}
        return Adapters(scale, down, up, partial(self.sums.add_products, downs), add_up)
