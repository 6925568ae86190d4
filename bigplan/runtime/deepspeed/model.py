"""bigplan's layers as torch modules, which DeepSpeed wants its parameters in.

The functions are those of the native runtime (runtime/layers/blocks.py), so both compute the same
from equal weights. Each layer is one module whose parameters are its own: ZeRO-3 gathers by module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from bigplan.runtime.layers import blocks
from bigplan.runtime.mixers.positions import Positions, position_tables
from bigplan.spec.layers import TABLE
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import BlockAttention
from bigplan.spec.step import Parameter

# Of a kind, layer and parameter: its first value in its shape, fp32 on the CPU.
Values = Callable[[str, int, Parameter], Tensor]
Described = Sequence[tuple[Parameter, nn.Parameter]]


class LayerModule(nn.Module):
    """One layer of the model; attribute `a__b` is its parameter "a.b"."""

    def __init__(
        self,
        model: ModelSpec,
        layer: int,
        values: Values,
        dtype: torch.dtype,
        only: Collection[str] | None = None,
    ) -> None:
        """`only`: the parameters that it has; None: all of its kind."""
        super().__init__()
        self.layer, self._model = layer, model
        self.kinds = model.layer_sequence()
        self.kind = self.kinds[layer]
        every = model.kinds()[self.kind]
        self.described = tuple(one for one in every if only is None or one.name in only)
        for parameter in self.described:
            value = values(self.kind, layer, parameter).to(dtype)
            self.register_parameter(attribute(parameter.name), nn.Parameter(value))

    def share(self, other: LayerModule) -> None:
        """Read the other layer's token table as its own."""
        self.register_parameter(attribute(TABLE), getattr(other, attribute(TABLE)))

    def named(self) -> dict[str, Tensor]:
        """All parameters that it reads, by the names of the model's description."""
        return {name.replace("__", "."): value for name, value in self.named_parameters()}


class EmbeddingModule(LayerModule):
    """Rows of tables: int64 tokens [b, s] to [b, s, h]."""

    def forward(self, tokens: Tensor) -> Tensor:
        parameters = self.named()
        x = blocks.embedding(parameters, tokens, self._model)
        return blocks.embedding_norm(parameters, x, self._model)


class BlockModule(LayerModule):
    """Attention and MLP: [b, s, h] to the same."""

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        """`tables`: those of position_tables for this block's attention."""
        return blocks.block(self.named(), x, self._model, Positions(tables, self.attends))

    @property
    def attends(self) -> BlockAttention:
        """The block's attention."""
        return self._model.attentions[self.layer - 1]


class HeadModule(LayerModule):
    """Final norm, scores and loss, `chunk` tokens at a time."""

    chunk = 1

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum of the targets' losses, fp32: x [b, s, h], targets int64 [b, s]."""
        parameters = self.named()
        flat, wanted = x.flatten(0, 1), targets.flatten()
        if not torch.is_grad_enabled():
            pieces = [slice(i, i + self.chunk) for i in range(0, len(flat), self.chunk)]
            losses = [self._loss(parameters, flat[here], wanted[here]) for here in pieces]
            return torch.stack(losses).sum()
        names = tuple(parameters)
        values = tuple(parameters[name] for name in names)
        loss: Tensor = _ChunkedLoss.apply(self, names, flat, wanted, *values)  # type: ignore[no-untyped-call]
        return loss

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
        return blocks.head_loss(parameters, x[None], targets[None], self._model)


class _ChunkedLoss(Function):
    """The loss with its gradients, computed in the forward: the logits of a chunk exist at a time.

    The gradients of chunks are summed in fp32 and given in the parameters' own precision, once.
    """

    @staticmethod
    def forward(
        ctx: object,
        head: HeadModule,
        names: tuple[str, ...],
        x: Tensor,
        targets: Tensor,
        *values: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        by_x = torch.empty_like(x)
        sums = [torch.zeros(value.shape, device=value.device) for value in values]
        for start in range(0, len(x), head.chunk):
            here = slice(start, start + head.chunk)
            piece = x[here].detach().requires_grad_()
            leaves = [value.detach().requires_grad_() for value in values]
            with torch.enable_grad():
                loss = head._loss(dict(zip(names, leaves, strict=True)), piece, targets[here])
            found = torch.autograd.grad(loss, [piece, *leaves], allow_unused=True)
            by_x[here] = found[0]
            for gradient, into in zip(found[1:], sums, strict=True):
                if gradient is not None:
                    into.add_(gradient)
            total += loss.detach()
        gradients = [one.to(value.dtype) for one, value in zip(sums, values, strict=True)]
        ctx.save_for_backward(by_x, *gradients)  # type: ignore[attr-defined]
        return total

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale, saved = gradients[0], ctx.saved_tensors  # type: ignore[attr-defined]
        scaled = [one.mul_(scale.to(one.dtype)) for one in saved]
        return (None, None, scaled[0], None, *scaled[1:])


KINDS: dict[str, type[LayerModule]] = {
    "embedding": EmbeddingModule,
    "block": BlockModule,
    "head": HeadModule,
}


class Model(nn.Module):
    """The whole model: tokens and targets to the sum of the losses."""

    def __init__(
        self, model: ModelSpec, values: Values, dtype: torch.dtype, *, recompute: bool, chunk: int
    ) -> None:
        """`recompute`: blocks keep their inputs alone; `chunk`: tokens whose logits exist."""
        super().__init__()
        self._recompute = recompute
        self.layers = nn.ModuleList()
        for layer, kind in enumerate(model.layer_sequence()):
            self.layers.append(KINDS[kind](model, layer, values, dtype))
        first, head = self.layers[0], self.layers[-1]
        assert isinstance(first, LayerModule)
        assert isinstance(head, HeadModule)
        head.chunk = chunk
        if model.tied_embeddings:
            head.share(first)
        self._positions: dict[BlockAttention, Positions] = {}
        self._spec, self._dtype = model, dtype

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses, fp32: int64 [b, s] each; targets of -100 count nothing."""
        first, *middle, head = self.layers
        x = first(tokens)
        for block in middle:
            assert isinstance(block, BlockModule)
            tables = self._tables(block.attends, tokens)
            if self._recompute and torch.is_grad_enabled():
                # The older way: without autograd's hooks on saved tensors, under which ZeRO-3's
                # parameters have no size.
                x = checkpoint(block, x, *tables, use_reentrant=True)
            else:
                x = block(x, *tables)
        loss: Tensor = head(x, targets)
        return loss

    def _tables(self, attends: BlockAttention, tokens: Tensor) -> tuple[Tensor, ...]:
        if attends not in self._positions:
            self._positions[attends] = position_tables(
                self._spec, tokens.shape[1], tokens.device, self._dtype, attends=attends
            )
        return self._positions[attends].tables

    def stored(self) -> Iterator[LayerModule]:
        """Every layer, first to last."""
        for layer in self.layers:
            assert isinstance(layer, LayerModule)
            yield layer

    def held(self) -> Iterator[LayerModule]:
        """The same: there are no copies."""
        return self.stored()


def with_parameters(layers: Iterable[LayerModule]) -> Iterator[tuple[LayerModule, Described]]:
    """Layers with their parameters in the order of the model's description, each once."""
    for layer in layers:
        yield layer, [(one, getattr(layer, attribute(one.name))) for one in layer.described]


def attribute(name: str) -> str:
    """A parameter's name as a module has it."""
    return name.replace(".", "__")
