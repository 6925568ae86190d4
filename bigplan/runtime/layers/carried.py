"""What passes from block to block beside the residual stream, of the micro-batches under way.

It is on the GPU from the embedding's forward to its backward, so nobody sends or moves it. A block
finds it as it finds parameters, by name. The gradient by a block's own input takes the place of the
input, which nobody reads after the block's backward. Gradients by kept keys and values are added up
in fp32 before the block that made them takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.layers.leaves import leaf_of
from bigplan.spec.carried import KEYS, OWN_INPUT, VALUES, keepers
from bigplan.spec.model import ModelSpec


@dataclass(slots=True)
class Carried:
    """Of one micro-batch."""

    tokens: Tensor  # int64 [b, s]
    inputs: Tensor | None  # [blocks, b, s, width]
    # By whether blocks are local, [b, s, heads, head_dim] each.
    kept: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sums: dict[tuple[bool, str], Tensor] = field(default_factory=dict)  # fp32, as these

    def gradient_by_inputs(self) -> Tensor:
        """[blocks, b, s, width], once all blocks have run backward."""
        assert self.inputs is not None
        return self.inputs


class _HandedOn(Function):
    """Keys and values that later blocks read, too; the backward adds what these have left."""

    @staticmethod
    def forward(ctx: Any, turn: Turn, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert turn.carried is not None
        if turn.local not in turn.carried.kept:  # what runs again before its backward is the same
            turn.carried.kept[turn.local] = keys.clone(), values.clone()
        ctx.turn = turn
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        turn: Turn = ctx.turn
        names = zip(gradients, (KEYS, VALUES), strict=True)
        return None, *(turn.with_sum(gradient, name) for gradient, name in names)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a block finds for a micro-batch beside its parameters and the residual stream."""

    bounds: Tensor | None = None  # of documents that are kept apart, int32 [b, 2, s]
    carried: Carried | None = None  # None: blocks of this model hand on nothing
    number: int = 0  # the block's
    local: bool = False  # it does not see all tokens
    keeps: bool = False  # later blocks read its keys and values
    reads: tuple[str, ...] = ()  # what it finds by name
    trained: bool = True  # its own input is of trained tables

    def found(self) -> dict[str, Tensor]:
        """What it reads, by name."""
        if self.carried is None:
            return {}
        pair = self.carried.kept.get(self.local, ()) if KEYS in self.reads else ()
        found = dict(zip((KEYS, VALUES), pair, strict=False))
        if OWN_INPUT in self.reads:
            assert self.carried.inputs is not None
            found[OWN_INPUT] = self.carried.inputs[self.number]
        return found

    def leaves(self) -> dict[str, Tensor]:
        """The same, for autograd to differentiate by where a gradient is asked for."""
        return {
            name: leaf_of(tensor) if self.trained or name != OWN_INPUT else tensor
            for name, tensor in self.found().items()
        }

    def storages(self) -> frozenset[int]:
        """Those of what it reads, which are not its own to keep or to move."""
        return frozenset(t.untyped_storage().data_ptr() for t in self.found().values())

    def hand_on(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The same keys and values [b, s, heads, head_dim], which later blocks find."""
        return _HandedOn.apply(self, keys, values)  # type: ignore[no-any-return, no-untyped-call]

    def with_sum(self, gradient: Tensor, name: str) -> Tensor:
        """The gradient of what the block kept, with those of the blocks that read it."""
        assert self.carried is not None
        total = self.carried.sums.pop((self.local, name), None)
        return gradient if total is None else total.add_(gradient).to(gradient.dtype)

    def leave(self, gradients: Mapping[str, Tensor]) -> None:
        """Leave the gradients by what it read."""
        for name, gradient in gradients.items():
            assert self.carried is not None
            if name == OWN_INPUT:
                assert self.carried.inputs is not None
                self.carried.inputs[self.number].copy_(gradient)
            elif (key := (self.local, name)) in self.carried.sums:
                self.carried.sums[key].add_(gradient)
            else:
                self.carried.sums[key] = gradient.float()


NOTHING = Turn()


@dataclass(slots=True)
class UnderWay:
    """What is carried of all micro-batches under way, by their numbers."""

    model: ModelSpec
    trained: bool  # all of the model is; else adapters alone
    carried: dict[int, Carried] = field(default_factory=dict)

    def turn(self, number: int, micro_batch: int, bounds: Tensor | None) -> Turn:
        """Block `number`'s on a micro-batch."""
        model = self.model
        if not model.carries:
            return Turn(bounds)
        seen = model.seen_by(model.block_kinds[number])
        own = (OWN_INPUT,) if model.block_inputs is not None else ()
        return Turn(
            bounds,
            self.carried[micro_batch],
            number,
            local=model.local_blocks[number] if model.local_blocks else False,
            keeps=number in keepers(model),
            reads=(*own, *((KEYS, VALUES) if seen.keys_given else ())),
            trained=self.trained,
        )
