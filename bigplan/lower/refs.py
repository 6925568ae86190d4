"""Where compute finds a layer's parameters, gradient sums and activations.

References that do not depend on the layout are cached, because a search lowers many programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from bigplan.content import ADAPTERS, Content, Holds
from bigplan.lower.layout import StageLayout
from bigplan.placement import Share, Tier
from bigplan.program import Ref

BATCH = Ref("data", Content(Holds.BATCH), moving=True)  # a micro-batch's tokens and targets
CLIP = Ref("clip", Content(Holds.CLIP))
ADAPTER_WEIGHTS = Ref("w.adapters", Content(Holds.PARAMETERS, ADAPTERS))
ADAPTER_GRADIENTS = Ref("g.adapters", Content(Holds.GRADIENTS, ADAPTERS))
ADAPTER_STATE = Ref("o.adapters", Content(Holds.STATE, ADAPTERS, Share.GPU))
ADAPTER_SQUARES = Ref("n.adapters", Content(Holds.SQUARES, ADAPTERS))


@dataclass(frozen=True, slots=True)
class Refs:
    """Buffer entries of one stage's layers."""

    layout: StageLayout
    _weights: dict[int, Ref] = field(default_factory=dict)  # what was asked before
    _sums: dict[int, Ref] = field(default_factory=dict)

    def weights(self, layer: int) -> Ref:
        """The layer's parameters: at home, or in the slot they visit."""
        if layer not in self._weights:
            self._weights[layer] = self._weights_of(layer)
        return self._weights[layer]

    def _weights_of(self, layer: int) -> Ref:
        if not self.layout.visits(layer):
            return parameter_home(layer)
        name, turn = self.layout.graph.layers[layer], self.layout.turns["slot"][layer]
        ring = self.layout.rings.shared(name)
        content = parameter_home(layer).content
        return Ref(f"slot.{ring}", content, turn % self.layout.rings.slots_of(name))

    def tables(self, layer: int) -> Iterator[Ref]:
        """All parameters the layer reads: its own, and the first layer's where they are tied."""
        yield self.weights(layer)
        if self._reads_table(layer):
            yield parameter_home(0)
        if self.layout.kind(layer).adapters:
            yield ADAPTER_WEIGHTS

    def sums(self, layer: int) -> Iterator[Ref]:
        """All gradient sums the layer's backward adds to."""
        kind = self.layout.kind(layer)
        if kind.frozen:
            yield from (ADAPTER_GRADIENTS,) if kind.adapters else ()
            return
        yield self.gradient_sum(layer)
        if self._reads_table(layer):
            yield borrowed_gradients() if self.layout.position.borrows else gradient_home(0)

    def gradient_sum(self, layer: int) -> Ref:
        """Where the unit's gradients of the layer are summed."""
        if layer not in self._sums:
            self._sums[layer] = self._sum_of(layer)
        return self._sums[layer]

    def _sum_of(self, layer: int) -> Ref:
        if not self.layout.sums_apart(layer):
            return gradient_home(layer)
        name, turn = self.layout.graph.layers[layer], self.layout.turns["sum"][layer]
        ring = self.layout.rings.shared(name)
        return Ref(f"sum.{ring}", partial_gradients(layer), turn % self.layout.rings.sums_of(name))

    def passing(self, layer: int, *, forward: bool) -> Ref:
        """The ring entry where compute leaves or finds a micro-batch's kept activations."""
        if self.layout.table[layer].activations is Tier.GPU:
            return kept(layer)
        return self._passing("act", layer, forward=forward)

    def staged(self, layer: int, *, forward: bool) -> Ref:
        """The staging entry in host memory of kept activations on their way to or from NVMe."""
        return self._passing("stage.a", layer, forward=forward)

    def _passing(self, ring: str, layer: int, *, forward: bool) -> Ref:
        """A ring entry; entries are taken in the order of the pass, so that a whole ring is ahead.

        Where the forward's last entries stay in the ring, a backward pass begins with them.
        """
        layout, name = self.layout, self.layout.keeps(layer)
        turn = layout.turns[ring][layer]
        if not forward:
            last = layout.users[ring, name] - 1
            turn = last - turn + (last if ring == "act" and name in layout.staying else 0)
        start = turn * layout.graph.strategy.accumulation_group
        return Ref(f"{ring}.{name}", kept(layer).content, start, moving=True)

    def _reads_table(self, layer: int) -> bool:
        graph = self.layout.graph
        return graph.tied and layer == len(graph.layers) - 1


@cache
def rows(buffer: str, layer: int) -> Ref:
    """A micro-batch's rows of the layer's tables on their way."""
    return Ref(buffer, Content(Holds.ROWS, layer), moving=True)


@cache
def row_gradients(buffer: str, layer: int) -> Ref:
    """The gradients of these rows on their way."""
    return Ref(buffer, Content(Holds.ROW_GRADIENTS, layer), moving=True)


@cache
def kept(layer: int) -> Ref:
    """The home of the layer's kept activations of a micro-batch."""
    return Ref(f"a{layer}", Content(Holds.ACTIVATIONS, layer), moving=True)


@cache
def parameter_home(layer: int, rows: Share | None = None) -> Ref:
    """The home of the layer's parameters, or of the rows that a share's updater writes."""
    return Ref(f"w{layer}", Content(Holds.PARAMETERS, layer), rows=rows)


@cache
def gradient_home(layer: int) -> Ref:
    """The home of the layer's gradients."""
    return Ref(f"g{layer}", Content(Holds.GRADIENTS, layer))


@cache
def borrowed_gradients() -> Ref:
    """The last stage's sum of gradients of a table that it has borrowed from the first stage."""
    return gradient_home(0)._replace(content=partial_gradients(0))


@cache
def returned_gradients() -> Ref:
    """The borrowed table's gradients where the first stage takes them back."""
    return Ref("g0.back", partial_gradients(0))


@cache
def partial_gradients(layer: int) -> Content:
    """A unit's part of the layer's gradients."""
    return Content(Holds.PARTIAL_GRADIENTS, layer)


@cache
def state_home(layer: int, share: Share, chunk: int = 0) -> Ref:
    """The home of the layer's optimizer state in a share, chunk by chunk where it has chunks."""
    return Ref(f"o{layer}.{share}", Content(Holds.STATE, layer, share, chunk), chunk)


@cache
def square_sum(layer: int) -> Ref:
    """The square sum of the layer's gradients."""
    return Ref(f"n{layer}", Content(Holds.SQUARES, layer))


@cache
def checkpoint_entry(layer: int, entry: int) -> Ref:
    """A host staging entry that a checkpoint of the layer passes through."""
    return Ref("stage.c", Content(Holds.CHECKPOINT, layer), entry)


@cache
def hidden(layer: int) -> Ref:
    """The output of `layer`."""
    return Ref("h", Content(Holds.HIDDEN, layer), moving=True)


@cache
def hidden_gradient(ring: str, layer: int) -> Ref:
    """The loss's gradient by the output of `layer`."""
    return Ref(ring, Content(Holds.HIDDEN_GRADIENT, layer), moving=True)
