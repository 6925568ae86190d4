"""What passes from block to block beside the residual stream, of the micro-batches under way.

It is on the GPU from the embedding's forward to its backward, and on no other tier; stages of a
pipeline send it along with hidden states. A block finds it as it finds parameters, by name. The
gradient by a block's own input takes the place of the input, which nobody reads after the block's
backward. Gradients by kept keys and values are added up in fp32 before the block that made them
takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.layers.leaves import leaf_of
from bigplan.runtime.linear.dropout import Drops
from bigplan.spec.carried import KEYS, OWN_INPUT, VALUES, handed_width, inputs_width, keepers
from bigplan.spec.model import ModelSpec


@dataclass(slots=True)
class Carried:
    """Of one micro-batch."""

    tokens: Tensor | None  # int64 [b, s]; None: another stage has the embedding
    inputs: Tensor | None  # [blocks, b, s, width]
    # By whether blocks are local, [b, s, heads, head_dim] each.
    kept: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sums: dict[tuple[bool, str], Tensor] = field(default_factory=dict)  # fp32, as these

    def own(self) -> Tensor:
        """Blocks' inputs [blocks, b, s, width]; gradients by those of blocks that ran backward."""
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
    drops: Drops | None = None  # of what adapters read; None: nothing
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
            found[OWN_INPUT] = self.carried.own()[self.number]
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
                self.carried.own()[self.number].copy_(gradient)
            elif (key := (self.local, name)) in self.carried.sums:
                self.carried.sums[key].add_(gradient)
            else:
                self.carried.sums[key] = gradient.float()


NOTHING = Turn()


def message_width(model: ModelSpec) -> int:
    """Columns of a token in a message between stages: of its hidden state and what is carried."""
    return model.hidden + handed_width(model)


@dataclass(slots=True)
class UnderWay:
    """What is carried of all micro-batches under way, by their numbers.

    Stages of a pipeline send all of it along with hidden states, as columns of one message
    [b, s, message_width]: hidden states, blocks' own inputs block by block, then keys and values of
    each block that keeps them, zeros before it has. Gradients come back in the same columns.
    """

    model: ModelSpec
    trained: bool  # all of the model is; else adapters alone
    carried: dict[int, Carried] = field(default_factory=dict)
    keepers: frozenset[int] = field(init=False)  # asked at every pass of a block

    def __post_init__(self) -> None:
        self.keepers = keepers(self.model)

    def message(self, hidden: Tensor, micro_batch: int) -> Tensor:
        """Hidden states [b, s, h] with what later stages read beside them."""
        return self._together(hidden, micro_batch, self.carried[micro_batch].kept)

    def message_back(self, by_hidden: Tensor, micro_batch: int) -> Tensor:
        """The gradient by hidden states [b, s, h], with those by what came beside them."""
        sums = self.carried[micro_batch].sums
        found = {
            local: (sums[local, KEYS], sums[local, VALUES]) for local, name in sums if name == KEYS
        }
        return self._together(by_hidden, micro_batch, found)

    def _together(
        self, hidden: Tensor, micro_batch: int, pairs: Mapping[bool, tuple[Tensor, Tensor]]
    ) -> Tensor:
        batch, length, _ = hidden.shape
        message = hidden.new_zeros(batch, length, message_width(self.model))
        first, inputs, kept = self._columns(message)
        first.copy_(hidden)
        if inputs is not None:
            inputs.copy_(self.carried[micro_batch].own())
        for local, pair in pairs.items():
            for into, one in zip(kept[local], pair, strict=True):
                into.copy_(one)
        return message

    def _columns(
        self, message: Tensor
    ) -> tuple[Tensor, Tensor | None, dict[bool, tuple[Tensor, Tensor]]]:
        """Its parts as they are elsewhere: hidden states, inputs, and pairs of keys and values."""
        model, own = self.model, inputs_width(self.model)
        widths = [model.hidden, own, handed_width(model) - own]
        hidden, inputs, rest = torch.split(message, widths, dim=-1)
        by_block = (
            torch.unflatten(inputs, -1, (model.layers, -1)).permute(2, 0, 1, 3) if own else None
        )
        kept = {}
        for number in sorted(self.keepers):
            seen = model.seen_by(model.block_kinds[number])
            width = 2 * seen.kv_width
            both, rest = torch.split(rest, [width, rest.shape[-1] - width], dim=-1)
            keys, values = torch.unflatten(both, -1, (2, seen.kv_heads, seen.head_dim)).unbind(2)
            kept[model.local_blocks[number]] = keys, values
        return hidden, by_block, kept

    def receive(self, message: Tensor, micro_batch: int, first: int) -> Tensor:
        """Take a message of the stage before; `first`: the first block here. Hidden states."""
        hidden, inputs, kept = self._columns(message)
        own = None if inputs is None else inputs.contiguous()
        found = Carried(None, own)
        for number in self.keepers:
            if number < first:
                keys, values = kept[self.model.local_blocks[number]]
                found.kept[self.model.local_blocks[number]] = keys.contiguous(), values.contiguous()
        self.carried[micro_batch] = found
        return hidden.contiguous()

    def receive_back(self, message: Tensor, micro_batch: int, last: int) -> Tensor:
        """Take gradients of the stage after; `last`: the last block here. By hidden states."""
        hidden, inputs, kept = self._columns(message)
        carried = self.carried[micro_batch]
        if inputs is not None:
            carried.own()[last + 1 :].copy_(inputs[last + 1 :])
        for number in self.keepers:
            local = self.model.local_blocks[number]
            if number <= last:
                for name, one in zip((KEYS, VALUES), kept[local], strict=True):
                    carried.sums[local, name] = one.float()
        return hidden.contiguous()

    def turn(
        self, number: int, micro_batch: int, bounds: Tensor | None, drops: Drops | None
    ) -> Turn:
        """Block `number`'s on a micro-batch."""
        model = self.model
        seen = model.seen_by(model.block_kinds[number])
        own = (OWN_INPUT,) if model.block_inputs is not None else ()
        return Turn(
            bounds,
            drops,
            self.carried[micro_batch],
            number,
            local=model.local_blocks[number] if model.local_blocks else False,
            keeps=number in self.keepers,
            reads=(*own, *((KEYS, VALUES) if seen.keys_given else ())),
            trained=self.trained,
        )
