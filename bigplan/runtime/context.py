"""What every action of a rank works with: the plan's shapes, and this machine's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bigplan.content import ADAPTERS, Content, Holds
from bigplan.graph.graph import Graph, LayerKind
from bigplan.placement import IN_CHUNKS
from bigplan.program import Action, Program, Ref
from bigplan.ranks import Coordinates
from bigplan.runtime.documents import Documents
from bigplan.runtime.entries import Entries
from bigplan.runtime.experts.expert_parallel import ExpertParallel
from bigplan.runtime.generated import dropping_by, library_for
from bigplan.runtime.linear.dropout import Draws
from bigplan.runtime.memory.adapter_rows import adapter_kind, adapter_parameters, adapter_rows
from bigplan.runtime.memory.buffers import Memory
from bigplan.runtime.memory.moments import StoredState, View
from bigplan.runtime.memory.pieces import LayerRows, Offsets, Owner, offsets_of
from bigplan.runtime.parallel.context_parallel import ContextParallel
from bigplan.runtime.parallel.groups import Groups
from bigplan.runtime.parallel.tensor_parallel import TensorParallel
from bigplan.spec.lora import Lora, adapters, stored
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import full_name
from bigplan.spec.step import Parameter
from bigplan.spec.training import Training

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Context:
    """One rank's program with its memory; the same for every step."""

    model: ModelSpec
    training: Training
    graph: Graph
    program: Program
    memory: Memory
    rows: Mapping[int, LayerRows]
    groups: Groups
    adapters: LayerKind = field(init=False)  # the stage's; without tensors where all is trained
    entries: Entries = field(init=False)  # of its buffers
    offsets: Mapping[int, Offsets] = field(init=False)  # by layer, of a borrowed one too
    documents: Documents | None = field(init=False)  # that are kept apart; None: they are not
    draws: Draws | None = field(init=False)  # of what adapters read; None: nothing is dropped

    def __post_init__(self) -> None:
        stages = adapter_kind(self.graph, self.program)
        object.__setattr__(self, "adapters", stages)
        of = self.graph, self.program, self.memory, self.rows, self.groups
        object.__setattr__(self, "entries", Entries(*of, stages))
        layers = {*self.rows} | ({0} if self.graph.lends_table else set())
        found = {layer: offsets_of(self.kind(layer)) for layer in layers}
        object.__setattr__(self, "offsets", found)
        apart = Documents(self.graph, self.memory) if self.training.isolate_documents else None
        object.__setattr__(self, "documents", apart)
        object.__setattr__(self, "draws", self._draws())

    def _draws(self) -> Draws | None:
        training, lora = self.training, self.training.lora
        if lora is None or not lora.dropout:
            return None
        firsts = torch.zeros(self.graph.micro_batches, dtype=torch.int64, device=self.device)
        tokens = self.length, self.context_parallel.first(self.length)
        by = dropping_by(library_for(training, self.device))
        return Draws(lora.dropout, training.seed, firsts, tokens, by)

    @property
    def device(self) -> torch.device:
        """Where compute runs."""
        return self.memory.device

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The dtype of compute and of stored parameters."""
        return DTYPES[self.training.precision]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of summed and of stored gradients."""
        return DTYPES[self.training.gradient_precision]

    @property
    def tensor_parallel(self) -> TensorParallel:
        """How this rank and its neighbours split layers."""
        return TensorParallel(self.groups.tensor, self.graph.strategy.sequence_parallel)

    @property
    def context_parallel(self) -> ContextParallel:
        """How this rank and its neighbours split sequences."""
        return ContextParallel(self.groups.context)

    @property
    def expert_parallel(self) -> ExpertParallel:
        """How this rank and its neighbours share out experts."""
        return ExpertParallel(self.groups.expert)

    @property
    def length(self) -> int:
        """Tokens of a sequence that this rank has."""
        return self.graph.strategy.rank_length(self.training)

    @property
    def trained(self) -> tuple[int, ...]:
        """Layers with state: those of the stage, or its adapters alone, if it has some."""
        if not self.graph.frozen:
            return tuple(self.program.layers)
        return (ADAPTERS,) if self.adapters.tensors else ()

    def kind(self, layer: int) -> LayerKind:
        """The layer's kind."""
        return self.entries.kind(layer)

    def state_bytes(self, layer: int, elements: int) -> int:
        """Bytes of the state of elements of the layer that are stored together."""
        return self.graph.state_bytes(self.kind(layer), elements)

    def state_of(self, layer: int, view: View, elements: int) -> StoredState:
        """The parts of that state."""
        seconds = self.graph.second_moments(self.kind(layer), elements)
        optimizer, master = self.training.optimizer, self.graph.sizes.master
        return StoredState.of(view, elements, optimizer, master=master, seconds=seconds)

    def parameters(self, layer: int) -> tuple[Parameter, ...]:
        """The layer's parameters as this training stores them."""
        if layer == ADAPTERS:
            return adapter_parameters(self.model, self.training.lora, self.program.layers)
        kind, element = self.graph.layers[layer], self.graph.sizes.parameter
        return stored(self.model, kind, self.training.lora, element)

    def batch(self, refs: Iterable[Ref], action: Action) -> Tensor:
        """Tokens and targets, int64 [2, micro_batch, length], in host memory."""
        flat = self.entries.bytes_of(find(refs, Holds.BATCH), action).view(torch.int64)
        rows, length = self.graph.strategy.micro_batch, self.length
        return flat[: 2 * rows * length].view(2, rows, length)

    def views(self, flat: Tensor, layer: int) -> dict[str, Tensor]:
        """A flat buffer as the layer's tensors on this rank, by name."""
        offsets = self.offsets[layer]
        return {
            parameter.name: flat[start : start + rows * columns].view(shape)
            for parameter in self.parameters(layer)
            for start, rows, columns in [offsets[parameter.name]]
            for shape in [
                (-1, parameter.shape[-1])  # experts' rows take turns
                if parameter.experts
                else (rows, columns)[-len(parameter.shape) :]
            ]
        }

    def adapter_views(self, flat: Tensor, layer: int) -> dict[str, Tensor]:
        """A layer's adapters within the stage's, by their names in the layer."""
        offsets, layers = self.offsets[ADAPTERS], self.graph.layers
        return {
            parameter.name: flat[start : start + rows * columns].view(
                (-1, parameter.shape[1]) if parameter.experts else (rows, columns)
            )
            for parameter in adapters(self.model, self.training.lora, layers[layer])
            for start, rows, columns in [offsets[full_name(layers, layer, parameter.name)]]
        }


def find(refs: Iterable[Ref], kind: Holds) -> Ref:
    """The first reference to content of a kind."""
    return next(ref for ref in refs if ref.content.kind is kind)


def layer_rows(
    model: ModelSpec, graph: Graph, program: Program, at: Coordinates, lora: Lora | None = None
) -> dict[int, LayerRows]:
    """What the rank at `at` owns of every layer and of adapters, chunks as the program has them."""
    owner, rows = Owner.of(at, graph.strategy), {}
    for layer, placement in program.layers.items():
        homes = {share: program.home(Content(Holds.STATE, layer, share)) for share in IN_CHUNKS}
        counts = {share: home.count if home else 0 for share, home in homes.items()}
        name = graph.layers[layer]
        parameters = stored(model, name, lora, graph.sizes.parameter)
        rows[layer] = LayerRows.of(graph.kinds[name], parameters, placement, counts, owner)
    if graph.frozen and (kind := adapter_kind(graph, program)).tensors:
        described = adapter_parameters(model, lora, program.layers)
        rows[ADAPTERS] = adapter_rows(kind, described, at, graph.strategy)
    return rows
