"""A training as a named framework runs it, priced: published runs, and plans for such tools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bigplan.cost.collective import data_group
from bigplan.cost.framework import Framework
from bigplan.cost.price import price
from bigplan.cost.step import Execution, framework_step
from bigplan.graph.build import graph_of_shape
from bigplan.graph.fused_experts import fusing_experts
from bigplan.graph.graph import LOSS_CHUNK_TOKENS, Graph
from bigplan.graph.low_precision import frozen_in_fp8, in_fp4
from bigplan.graph.policies import (
    Selective,
    autocasting,
    compiling_loss,
    cutting_documents,
    fusing_norms,
    gathering_for_adapters,
    gathering_logits,
    padding_products,
    selecting,
    summing_apart,
    turning_by_torch,
)
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

LOW_STATE_BYTES = 6  # a parameter: master and two moments in 16 bits
PURE_STATE_BYTES = 4  # two moments in 16 bits; the parameters have no master copy


@dataclass(frozen=True, slots=True)
class PricedRun:
    """What the closed formulas price."""

    model: ModelSpec
    training: Training
    strategy: Strategy
    nodes: NodeGroup
    framework: Framework
    execution: Execution
    context_parallel: int = 1
    zero: int = 0  # its stage where context-parallel ranks share states, too
    chunked_loss: bool = False  # the logits of a micro-batch never live at once
    state_bytes: int = 0  # a parameter; 0: master and moments in fp32
    selective: Selective = "cheap"  # what selective recomputation runs again
    autocast: bool = False  # torch.autocast casts fp32 parameters to the run's precision
    fp4: bool = False  # products in 8 bits are in NVFP4 instead
    frozen_fp8: bool = False  # frozen products beside adapters are in 8 bits
    plain_adapters: Literal["", "apart", "joined"] = ""  # as in RankShape
    document_tokens: int = 0  # of a sequence's documents, which attention keeps apart; 0: one
    within_nodes: bool = False  # ZeRO shards over a node's ranks, and nodes hold the same


def graph_of(run: PricedRun) -> Graph:
    """The run's operators; frameworks take the loss of a micro-batch at once.

    The graph's strategy counts context-parallel ranks as data-parallel ones: they hold the same
    parameters, so frameworks reduce gradients and share states over both (torchtitan's mesh
    `dp_shard_cp`, Megatron Core's distributed optimizer).
    """
    chunk = LOSS_CHUNK_TOKENS if run.chunked_loss else None
    # In frameworks the last pipeline stage also holds and updates a tied table, like one of its
    # own.
    apart = {"tied_embeddings": False} if run.strategy.pp > 1 else {}
    model = run.model.model_copy(update=apart)
    fused = run.framework.in_place
    shape = RankShape(
        model, run.training, run.strategy, run.context_parallel, fused,
        narrow=run.nodes.gpu.narrow_values, looks_first=run.framework.current_scaling,
        pads_rows=run.framework.pads_rows,
        dispatched=model.experts > 0, sends_once=run.framework.dispatches_once, cast_once=True,
        plain_adapters=run.plain_adapters,
    )  # fmt: skip
    graph = selecting(graph_of_shape(shape, chunk), shape, run.selective)
    graph = _in_its_precision(run, graph, shape)
    if run.document_tokens:
        graph = cutting_documents(graph, run.document_tokens)
    if run.framework.inputs_summed != (1, 1):
        graph = summing_apart(graph, run.framework.inputs_summed)
    if run.framework.gathers_for_adapters:
        graph = gathering_for_adapters(graph, shape)
    if run.framework.turns_by_torch:
        graph = turning_by_torch(graph, model)
    if run.framework.compiles_loss:
        graph = compiling_loss(graph)
    if run.framework.whole_logits:
        graph = gathering_logits(graph)
    if run.framework.fused_experts:
        graph = fusing_experts(graph, mxfp8_attention=run.framework.mxfp8_attention)
    if run.framework.pads_products:
        graph = padding_products(graph)
    if run.framework.fused_norms:
        graph = fusing_norms(graph, model)
    return _shared_out(run, graph)


def _shared_out(run: PricedRun, graph: Graph) -> Graph:
    """The graph with the ranks that share states, and what these are."""
    if run.context_parallel > 1:
        ranks = {"dp": run.strategy.dp * run.context_parallel, "zero": run.zero}
        graph = replace(graph, strategy=run.strategy.model_copy(update=ranks))
    if run.within_nodes:
        inside = data_group(graph.strategy, run.nodes).per_node
        if 1 < inside < graph.strategy.shards:
            groups = {"zero_group": inside}
            graph = replace(graph, strategy=graph.strategy.model_copy(update=groups))
    if run.state_bytes:
        master = run.state_bytes > PURE_STATE_BYTES
        sizes = replace(graph.sizes, state=run.state_bytes, master=master)
        graph = replace(graph, sizes=sizes)
    return graph


def _in_its_precision(run: PricedRun, graph: Graph, shape: RankShape) -> Graph:
    if run.frozen_fp8:
        graph = frozen_in_fp8(graph)
    if run.fp4:
        graph = in_fp4(graph, looks_first=shape.looks_first)
    return autocasting(graph, shape) if run.autocast else graph


def parts_of(run: PricedRun, graph: Graph, nodes: NodeGroup) -> dict[str, float]:
    """Seconds of the run's step by part, on these nodes."""
    costs = price(graph, run.training, nodes, run.framework)
    return framework_step(graph, costs, nodes, run.framework, run.execution)
