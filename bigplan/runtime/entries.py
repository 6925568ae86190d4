"""Entries of a rank's buffers, and where a layer's elements lie in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bigplan.content import ADAPTERS, Content, Holds
from bigplan.graph.graph import Graph, LayerKind
from bigplan.program import Action, Buffer, Program, Ref, entry
from bigplan.runtime.memory.buffers import Key, Memory
from bigplan.runtime.memory.pieces import Box, LayerRows
from bigplan.runtime.parallel.group import RankGroup
from bigplan.runtime.parallel.groups import Groups


@dataclass(frozen=True, slots=True)
class Entries:
    """Those of one rank's program, the same for every step."""

    graph: Graph
    program: Program
    memory: Memory
    rows: Mapping[int, LayerRows]
    groups: Groups
    adapters: LayerKind  # the stage's; without tensors where all is trained

    def kind(self, layer: int) -> LayerKind:
        """The layer's kind."""
        return self.adapters if layer == ADAPTERS else self.graph.kinds[self.graph.layers[layer]]

    def key(self, ref: Ref, action: Action) -> Key:
        """The entry that `ref` names for the action's micro-batch."""
        return entry(ref, self.program.buffers, action.micro_batch)

    def home(self, content: Content) -> Key:
        """The entry where the content is at home."""
        return self._home(content).name, content.chunk

    def _home(self, content: Content) -> Buffer:
        home = self.program.home(content)
        assert home is not None, f"{content} has no home"
        return home

    def bytes_of(self, ref: Ref, action: Action) -> Tensor:
        """The entry's bytes."""
        return self.memory.place(self.key(ref, action))

    def flat(self, ref: Ref, action: Action, dtype: torch.dtype) -> Tensor:
        """A layer's flat parameters or gradients in the entry."""
        elements = self.kind(ref.content.layer).parameters
        return self.memory.view(self.key(ref, action), dtype, elements)

    def owned(
        self, ref: Ref, action: Action, dtype: torch.dtype, piece: slice | None = None
    ) -> list[Tensor]:
        """What this rank owns of a layer's parameters or gradients in the entry, with filling.

        It is a tensor for each of its ranges. `piece`: of its part, no more than that.
        """
        part, whole = self.rows[action.layer].part, self.program.buffers[ref.buffer].whole
        return [
            self.memory.view(
                self.key(ref, action),
                dtype,
                len(own),
                (own.start if whole else at) * dtype.itemsize,
            )
            for at, own in part.within(piece or slice(0, part.elements))
        ]

    def boxed(self, ref: Ref, action: Action, dtype: torch.dtype) -> Callable[[Box], Tensor]:
        """What finds the rank's own elements of a layer's parameters or gradients in the entry."""
        if self.program.buffers[ref.buffer].whole:
            flat = self.flat(ref, action, dtype)
            return lambda box: flat[box.in_layer]
        elements = self.rows[action.layer].part.elements
        part = self.memory.view(self.key(ref, action), dtype, elements)
        return lambda box: part[box.in_part]

    def has_whole(self, layer: int) -> bool:
        """Whether all of the layer's parameters are at home on this rank, not its part alone."""
        return self._home(Content(Holds.PARAMETERS, layer)).whole

    def held(self, layer: int) -> list[tuple[int, range]]:
        """Elements of the layer whose parameters this rank has at home, each range with its place.

        Places are elements of the home, too.
        """
        if self.has_whole(layer):
            return [(0, range(self.kind(layer).parameters))]
        part = self.rows[layer].part
        places = part.within(slice(0, part.elements))
        each = zip(places, part.ranges, strict=True)
        return [(place, own.tensors) for (place, _), own in each if own.real]

    def shared_out(
        self, ref: Ref, action: Action, dtype: torch.dtype
    ) -> list[tuple[RankGroup, Tensor]]:
        """The parts of all ranks, one behind the other, in an entry that holds them.

        They come with the ranks that share them: of experts those that have the same.
        """
        assert self.program.buffers[ref.buffer].whole, ref
        layer, groups = action.layer, self.groups
        kind, key = self.kind(layer), self.key(ref, action)
        elements = kind.padded(self.sharers(layer))
        apart = kind.whole_experts
        rest = self.memory.view(key, dtype, elements - apart, apart * dtype.itemsize)
        if not apart:
            return [(groups.shard, rest)]
        experts = self.memory.view(key, dtype, apart)
        return [(groups.expert_data, experts), (groups.shard, rest)]

    def sharers(self, layer: int) -> int:
        """Ranks that a layer is shared out to: of adapters each has all."""
        return 1 if layer == ADAPTERS else self.graph.strategy.zero_ranks
