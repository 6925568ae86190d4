"""The graph of one step for one strategy: layer kinds with their operators, tensors and bytes.

All sizes are those of one rank, after tensor parallelism. Code that uses a graph does not know what
a transformer is: a layer is a kind, a kind is tensors, operators and byte counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from math import gcd, lcm
from typing import NamedTuple

from bigplan.graph.operators import Operator
from bigplan.graph.strategy import WIDEST_CUT, Cut, Strategy
from bigplan.spec.carried import INPUTS
from bigplan.spec.moments import BLOCK, Moments, blocks, scale_bytes
from bigplan.spec.step import StepOp

LOSS_CHUNK_TOKENS = 1024  # at least, at a time: 1.3 GB of logits for 128,256 words


class Recompute(StrEnum):
    """What a layer does between its forward and its backward."""

    NONE = "none"  # keep everything that autograd saves
    SELECTIVE = "selective"  # run again the steps that are cheap for the bytes they save
    MLP = "mlp"  # also run the MLP's first products again: keep what attention saves
    FULL = "full"  # keep the layer's input, run the forward again as far as its backward needs


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter on one rank: `rows` rows of `columns` elements; a vector is one row.

    `holders` is how many neighbouring tensor-parallel ranks hold the same tensor. `experts` take
    turns in its rows; 0: none do.
    """

    name: str
    rows: int
    columns: int
    holders: int = 1
    experts: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class Rerun(NamedTuple):
    """A way to recompute a layer."""

    kept: int  # bytes between forward and backward of one micro-batch
    operators: tuple[Operator, ...]  # operators that run a second time, just before the backward


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layer on one rank. Byte counts are per micro-batch."""

    name: str
    tensors: tuple[Tensor, ...]
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    saved: int  # what autograd keeps for the backward without recomputation
    boundary: int  # the layer's input, which is what full recomputation keeps
    reruns: Mapping[Recompute, Rerun]  # without an entry: `saved`, and nothing runs again
    forward_workspace: int  # transient bytes during the forward, beyond what is saved
    backward_workspace: int  # transient bytes during the backward, beyond what is saved
    largest: int = 0  # bytes of the largest transient tensor
    pinned: bool = False  # parameters and gradients must stay on the GPU (shared with a layer)
    stores_activations: bool = True  # False: nothing worth moving or recomputing is kept
    # Bytes kept beyond `saved` where an operator is a chain of plain torch kernels, by its step.
    chained: Mapping[StepOp, int] = field(default_factory=dict)
    # Elements of the rows that it reads; if not 0, its tables may stay on the host.
    looked_up: int = 0
    # Its tensors are frozen: in the compute dtype, without gradient or optimizer state.
    frozen: bool = False
    # Nothing in or before it is trained: its backward drops what its forward kept, no more.
    idle_backward: bool = False
    # Trained beside frozen tensors; a stage keeps those of all its layers on the GPU, as one.
    adapters: tuple[Tensor, ...] = ()
    # The host waits for the device within a pass, for numbers that the next launches need.
    waits: bool = False
    in_turn: bool = False  # and the device has run out of work by then
    # Elements of experts, where `ep` ranks have them all together. Fewer ranks share them than
    # share the rest (`Strategy.expert_shards`). They are the first tensors.
    whole_experts: int = 0
    ep: int = 1
    # Elements whose moments share a scale. What several ranks have copies of begins with a block of
    # so many (`capabilities.splits.copies_refusal`): beside other elements, copies would get other
    # scales.
    scaled: int = 1
    # Bytes that are kept where more rows than an equal share reach this rank's experts; see `room`.
    uneven: int = 0
    # Tensors that Muon updates; the whole layer's state is then on one tier and updated at once.
    orthogonalised: tuple[Tensor, ...] = ()
    directions: tuple[Tensor, ...] = ()  # these, as tensor-parallel ranks have them together
    others: int = field(init=False)  # elements of all other tensors
    parameters: int = field(init=False)  # elements of all tensors; asked thousands of times
    trained: int = field(init=False)  # elements of those that are trained: of adapters, or all
    unit: int = field(init=False)  # elements: the flat layer is cut at multiples of it
    # Ranges of elements that several tensor-parallel ranks hold, each with the number of ranks. A
    # rank has the part of their gradients that its tokens or heads add.
    repeated: tuple[tuple[int, range], ...] = field(init=False)

    def __post_init__(self) -> None:
        elements = sum(tensor.elements for tensor in self.tensors)
        object.__setattr__(self, "parameters", elements)
        adapted = sum(tensor.elements for tensor in self.adapters)
        object.__setattr__(self, "trained", adapted if self.frozen else elements)
        by_muon = sum(tensor.elements for tensor in self.orthogonalised)
        object.__setattr__(self, "others", elements - by_muon)
        # A unit divides every row, so no cut lies within the elements that a kernel loads at once.
        unit = gcd(WIDEST_CUT, *(tensor.columns for tensor in self.tensors))
        object.__setattr__(self, "unit", lcm(unit, self.scaled))
        object.__setattr__(self, "repeated", tuple(_repeated(self.tensors)))

    def owned(self, ranks: int) -> int:
        """Elements of the flat layer that each of `ranks` owns: equal parts, in whole units."""
        if ranks == 1:
            return self.parameters
        return self.owned_experts(ranks) + self._shared(ranks)

    def owned_experts(self, ranks: int) -> int:
        """Those of experts that are spread: every ep-th of `ranks` shares this rank's.

        They are whole units for each (`strategy_space.spreads_experts`).
        """
        return self.whole_experts // max(1, ranks // self.ep) if self.ep > 1 else 0

    def padded(self, ranks: int) -> int:
        """Elements of all ranks' parts together, of the experts that this rank has."""
        if ranks == 1:
            return self.parameters
        return (self.whole_experts if self.ep > 1 else 0) + ranks * self._shared(ranks)

    def _shared(self, ranks: int) -> int:
        rest = self.parameters - (self.whole_experts if self.ep > 1 else 0)
        return -(-rest // (ranks * self.unit)) * self.unit

    def kept(self, recompute: Recompute) -> int:
        """Bytes kept between forward and backward of one micro-batch."""
        return self.reruns[recompute].kept if recompute in self.reruns else self.saved

    def varies(self, recompute: Recompute) -> bool:
        """Whether the bytes kept depend on how many rows reach this rank's experts.

        Such bytes have no place that is known before a step, so they stay on the GPU.
        """
        return self.ep > 1 and recompute in (Recompute.NONE, Recompute.SELECTIVE)

    def room(self, recompute: Recompute) -> int:
        """Bytes that a micro-batch has room to keep: more than `kept` where that varies."""
        return self.kept(recompute) + (self.uneven if self.varies(recompute) else 0)

    def again(self, recompute: Recompute) -> tuple[Operator, ...]:
        """The operators that run a second time, just before the backward."""
        return self.reruns[recompute].operators if recompute in self.reruns else ()

    def workspace(self, recompute: Recompute) -> int:
        """Transient bytes of forward or backward, whichever has more."""
        again = self.saved - self.kept(recompute)
        if recompute is Recompute.FULL:
            # Without room for the input beside the kept one, the allocator unmaps and maps memory
            # many times a step, and the GPU waits each time.
            again = self.saved
        return max(self.forward_workspace, self.backward_workspace + again)


def _repeated(tensors: Iterable[Tensor]) -> Iterator[tuple[int, range]]:
    start = 0
    for holders, alike in groupby(tensors, key=lambda tensor: tensor.holders):
        stop = start + sum(tensor.elements for tensor in alike)
        if holders > 1:
            yield holders, range(start, stop)
        start = stop


@dataclass(frozen=True, slots=True)
class Adapters:
    """A stage's adapters as one flat tensor: of experts that are spread over `ep` ranks first.

    Of these and of the rest those that most tensor-parallel ranks hold are last.
    """

    tensors: tuple[tuple[int, Tensor], ...]  # each with its layer
    ep: int = 1
    elements: int = field(init=False)
    whole_experts: int = field(init=False)  # as in LayerKind
    repeated: tuple[tuple[int, range], ...] = field(init=False)  # likewise

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tensors, key=lambda each: self._order(each[1])))
        flat = [tensor for _, tensor in ordered]
        spread = sum(tensor.elements for tensor in flat if self.ep > 1 and tensor.experts)
        object.__setattr__(self, "tensors", ordered)
        object.__setattr__(self, "elements", sum(tensor.elements for tensor in flat))
        object.__setattr__(self, "whole_experts", spread)
        object.__setattr__(self, "repeated", tuple(_repeated(flat)))

    def _order(self, tensor: Tensor) -> tuple[bool, int]:
        return self.ep > 1 and not tensor.experts, tensor.holders


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes an element takes as parameter, gradient and optimizer state."""

    parameter: int
    gradient: int
    state: int  # without `scales`
    master: bool  # the state holds an fp32 master copy, so an update needs no parameter
    moments: Moments = "fp32"
    second: int = 0  # bytes of a second moment, where only elements have it that are not Muon's

    @property
    def scales(self) -> int:
        """Bytes of state that each BLOCK of elements stored together has besides."""
        return scale_bytes(self.moments)

    @property
    def stored(self) -> float:
        """Bytes of an element's state, with its part of the scales."""
        return self.state + self.scales / BLOCK

    def state_bytes(self, elements: int) -> int:
        """Bytes of the state of elements that are stored together."""
        return elements * self.state + blocks(elements) * self.scales

    @property
    def update_bytes(self) -> float:
        """Bytes an update moves: gradient read; fp32 parameter and moments read and written.

        Beside a master copy the parameter is written, too. Muon's matrices have no second moment,
        but write and read as many bytes for their directions.
        """
        return 4 + 2 * (self.stored + self.second) + (self.parameter if self.master else 8)


@lru_cache(maxsize=256)  # a search makes thousands of graphs, cut in few ways
def chunk_layers(layers: tuple[str, ...], cut: Cut) -> tuple[range, ...]:
    """Layers of each chunk of these kinds: its blocks, and at the ends what is no block."""
    before = 1 + (INPUTS in layers)
    stops = list(accumulate(cut.blocks(len(layers) - before - 1), initial=before))
    stops[0], stops[-1] = 0, len(layers)
    return tuple(range(a, b) for a, b in pairwise(stops))


@dataclass(frozen=True, slots=True)
class Graph:
    """One optimizer step under one strategy; solver and lowering work on it."""

    strategy: Strategy
    layers: tuple[str, ...]  # the kind of every layer, first to last
    kinds: Mapping[str, LayerKind]
    sizes: ElementSizes
    micro_batches: int
    deferred: bool  # updates wait for the gradient norm: they run in the next step's forward
    tied: bool = False  # the last layer reads the first layer's tensors; see `lends_table`
    recomputes: tuple[Recompute, ...] = tuple(Recompute)  # what the engine can execute
    loss_chunk: int = LOSS_CHUNK_TOKENS  # tokens that the loss layer takes at a time
    document_bytes: int = 0  # of where documents are in a step; 0: they are not kept apart
    handed: int = 0  # bytes of a micro-batch that stages send each other beside hidden states
    carried: int = 0  # and that each has on its GPU beside them, as long as the micro-batch lasts
    _chunks: tuple[range, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_chunks", chunk_layers(self.layers, self.strategy.cut))

    @property
    def lends_table(self) -> bool:
        """Whether the last layer reads a copy of the first layer's tensors from another stage.

        The first stage alone owns and updates these tensors. The last stage gets them at the
        beginning of a step, and sends its part of their gradients back at the end.
        """
        return self.tied and self.strategy.pp > 1

    @property
    def several_kinds(self) -> bool:
        """Whether its blocks are of several kinds."""
        return len({*self.layers[1:-1]}) > 1

    @property
    def frozen(self) -> bool:
        """Whether adapters alone are trained."""
        return self.kinds[self.layers[0]].frozen

    def repeated_ways(self, kind: LayerKind) -> Iterator[Recompute]:
        """Ways to recompute that do for the kind what one before does: no MLP, nothing of it."""
        seen = list[tuple[object, ...]]()
        for way in self.recomputes:
            does = kind.kept(way), kind.workspace(way), kind.varies(way), kind.again(way)
            if does in seen:
                yield way
            seen.append(does)

    def state_bytes(self, kind: LayerKind, elements: int) -> int:
        """Bytes of the state of so many elements of a layer that are stored together.

        Of a layer that Muon updates in part they are all that a rank owns: no more than `others`
        have a second moment.
        """
        seconds = self.second_moments(kind, elements)
        return self.sizes.state_bytes(elements) + self.sizes.second * seconds

    def second_moments(self, kind: LayerKind, elements: int) -> int:
        """Elements of these that have room for a second moment, where Muon's have none."""
        return min(elements, kind.others) if self.sizes.second else 0

    def adapters(self, layers: Iterable[int]) -> Adapters:
        """The adapters of a stage's layers."""
        return Adapters(
            tuple((layer, t) for layer in layers for t in self.kinds[self.layers[layer]].adapters),
            self.strategy.ep,
        )

    @property
    def units(self) -> int:
        """Accumulation groups per step."""
        return self.micro_batches // self.strategy.accumulation_group

    def passes(self, layers: int) -> int:
        """Forwards and backwards of so many layers in a step."""
        return 2 * self.micro_batches * layers

    def chunk_layers(self, chunk: int) -> range:
        """Layers of a chunk: its blocks, and the model's first and last layer at the ends."""
        return self._chunks[chunk]

    def stage_chunks(self, stage: int) -> range:
        """The chunks that a pipeline stage has, first to last."""
        strategy = self.strategy
        return range(stage, strategy.pp * strategy.vpp, strategy.pp)

    def stage_layers(self, stage: int) -> tuple[int, ...]:
        """Layers of a pipeline stage, first to last."""
        return tuple(i for chunk in self.stage_chunks(stage) for i in self._chunks[chunk])

    def in_flight_units(self, stage: int, turn: int = 0) -> int:
        """Units whose activations a chunk of a stage holds at once; the first chunk holds the most.

        The schedule is one forward, one backward, after a warm-up (Narayanan et al. 2021, section
        2.2). Forward passes take the chunks in turn, as many units of each as there are stages.
        Backward passes take the chunks in reverse.
        """
        stages, turns = self.strategy.pp, self.strategy.vpp
        if turns == 1:
            return min(self.units, stages - stage)
        live = 0
        for group in range(min(4, self.units // stages)):  # the fourth is like the third
            forwards = (group * turns + turn + 1) * stages
            backwards = max(0, forwards - 1 - self.warm_up(stage))
            groups, rest = divmod(backwards, stages * turns)
            mine = min(max(rest - (turns - 1 - turn) * stages, 0), stages)
            live = max(live, (group + 1) * stages - groups * stages - mine)
        return live

    def live_units(self, stage: int, turn: int = 0) -> int:
        """Units whose activations a chunk of a stage holds when the stage holds the most.

        That is after the first forward pass that follows the warm-up. From then on the stage holds
        as many or fewer, and moves them to earlier chunks. So where earlier chunks keep no more of
        a unit than later ones do, no other moment needs more memory; each chunk's own most, which
        `in_flight_units` counts, comes at another time. The test plays all schedules of some sizes.

        Where blocks are of several kinds, earlier chunks may keep more of a unit, and any moment
        may be that of the most. So each chunk then counts with its own most, which is no less.
        """
        stages, turns = self.strategy.pp, self.strategy.vpp
        if turns == 1 or self.several_kinds:
            return self.in_flight_units(stage, turn)
        passes = min(self.warm_up(stage) + 1, self.units * turns)
        groups, rest = divmod(passes, stages * turns)
        return groups * stages + min(max(rest - turn * stages, 0), stages)

    def warm_up(self, stage: int) -> int:
        """Forward passes of a stage's chunks before its first backward pass follows one."""
        stages, turns = self.strategy.pp, self.strategy.vpp
        if turns == 1:
            return self.in_flight_units(stage) - 1
        return min(self.units * turns - 1, 2 * (stages - stage - 1) + (turns - 1) * stages)
