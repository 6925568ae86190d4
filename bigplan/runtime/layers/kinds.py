"""The kinds of layers behind one interface: forward, forward alone, backward of a micro-batch.

A layer owns no memory. Parameters, gradients and the tensors between layers come and go, and a
visit says where they are. So one object serves all layers of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.mechanics import sums_in_products
from bigplan.runtime import generated
from bigplan.runtime.context import Context
from bigplan.runtime.experts.expert_parallel import ALL_HERE, ExpertParallel
from bigplan.runtime.generated import library_for
from bigplan.runtime.layers import blocks, inputs
from bigplan.runtime.layers.carried import NOTHING, Carried, Turn, UnderWay
from bigplan.runtime.layers.head import Head
from bigplan.runtime.layers.inputs import Inputs
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.leaves import differentiated, leaf_of, leaves_of, without
from bigplan.runtime.layers.losses import Losses
from bigplan.runtime.layers.preference import PairLoss
from bigplan.runtime.layers.products import Products
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.layers.visit import Batches, Visit
from bigplan.runtime.linear.matrices import AS_STORED, Matrices
from bigplan.runtime.mixers.positions import Positions, Sharing, position_tables
from bigplan.runtime.mixers.ways import PLAIN, Ways
from bigplan.runtime.parallel.context_parallel import WHOLE, ContextParallel
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.runtime.parallel.words import own_rows
from bigplan.spec.layers import BLOCK, TABLE, first_block
from bigplan.spec.lora import Lora, adapted_steps
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import BlockAttention

if TYPE_CHECKING:
    from bigplan.kernels.library import Library


class Layer(Protocol):
    """What the runtime asks of a layer."""

    def forward(self, visit: Visit, kept: KeptActivations) -> Tensor | None:
        """The output [b, s, h]; `kept` gets what the backward needs. None: it leads nowhere."""

    def evaluate(self, visit: Visit) -> Tensor | None:
        """The same output, with nothing kept."""

    def backward(self, visit: Visit, kept: KeptActivations) -> Tensor | None:
        """Add to the gradients; the one by the input [b, s, h]. None: no layer is before."""


def layers_of(
    context: Context, losses: Losses, under_way: UnderWay, pairs: PairLoss | None = None
) -> tuple[Layer, ...]:
    """The objects for all layers of the model, first to last."""
    graph, kernels = context.graph, library_for(context.training, context.device)
    in_product, ranks = sums_in_products(graph.sizes.gradient), context.tensor_parallel
    batches = Batches(with_targets=len(graph.layers) - 1 in context.program.layers)
    embedding = Embedding(context.model, batches, ranks, context.context_parallel, kernels)
    embedding.under_way = under_way
    head = Head(context, batches, losses, in_product=in_product, kernels=kernels)
    embedding.frozen = head.frozen = graph.frozen
    head.pairs = pairs
    between = list(zip(context.model.block_kinds, context.model.attentions, strict=True))
    blocks_of = {one: _block(context, *one, losses) for one in dict.fromkeys(between)}
    for block in blocks_of.values() if context.model.carries else ():
        block.under_way, block.first = under_way, first_block(graph.layers)
    own = () if context.model.block_inputs is None else (Inputs(under_way),)
    return (embedding, *own, *(blocks_of[one] for one in between), head)


def _block(context: Context, kind: str, attends: BlockAttention, losses: Losses) -> Block:
    """What computes the blocks of a kind with this attention."""
    ranks, parts = context.tensor_parallel, context.context_parallel
    length, dtype = context.training.sequence_length, context.parameter_dtype
    sharing = Sharing(ranks, parts)
    model = context.model.seen_by(kind)
    positions = position_tables(model, length, context.device, dtype, sharing, attends)
    kernels = library_for(context.training, context.device)
    in_product = sums_in_products(context.graph.sizes.gradient)
    block = Block(model, positions, ranks, parts, in_product=in_product, kernels=kernels)
    block.lora = context.training.lora
    block.matrices = generated.matrices_for(context.training, kernels)
    block.balance = _balance(context, losses) if model.experts else None
    block.spread = context.expert_parallel
    return block


def _balance(context: Context, losses: Losses) -> Callable[[], float] | None:
    """The weight of a micro-batch's balance of one block's experts, in the gradients of a step.

    The loss of balance is a mean over blocks, micro-batches and the ranks that share out tokens.
    Tensor-parallel ranks all have the whole of it, and their gradients are summed.
    """
    model, strategy = context.model, context.graph.strategy
    if not model.router_loss:
        return None
    terms = model.routed_blocks * context.graph.micro_batches * strategy.shards * strategy.tp
    return lambda: model.router_loss / terms * losses.scale


class Embedding:
    """Rows of tables, by token and place, and their norm where the model has one."""

    frozen = False  # then its backward is idle
    under_way: UnderWay  # what blocks find beside the residual stream

    def __init__(
        self,
        model: ModelSpec,
        batches: Batches,
        ranks: TensorParallel,
        context: ContextParallel = WHOLE,
        kernels: Library | None = None,
    ) -> None:
        self._model, self._batches, self._ranks = model, batches, ranks
        self._context = context
        self._ways = PLAIN._replace(kernels=kernels)
        self._elsewhere = ranks.counted_elsewhere(model.steps("embedding"))

    def forward(self, visit: Visit, kept: KeptActivations) -> Tensor:
        """Keeps the tokens, and the graph of the norm unless it is frozen."""
        tokens = self._batches.tokens(visit)
        kept.saved, x, model = [tokens], self._embedded(visit, tokens), self._model
        self._carry(visit, tokens, x)
        if not model.embedding_norm:
            return x
        if self.frozen:
            return self._normed(visit, x)
        # Rows are added to the tables' sums.
        leaves = leaves_of(visit.parameters(), in_product=True)
        kept.parameters = differentiated(leaves)
        return kept.record(lambda x: blocks.embedding_norm(leaves, x, model, self._ways), x)

    def evaluate(self, visit: Visit) -> Tensor:
        """The same, with nothing kept."""
        tokens = self._batches.tokens(visit)
        x = self._embedded(visit, tokens)
        self._carry(visit, tokens, x)
        return self._normed(visit, x) if self._model.embedding_norm else x

    @torch.no_grad()
    def _carry(self, visit: Visit, tokens: Tensor, x: Tensor) -> None:
        """Begin what blocks of the micro-batch find beside the residual stream."""
        if self._model.carries:
            own = self._model.block_inputs is not None
            made = inputs.to_inputs(visit.parameters(), x, self._model, self._ways) if own else None
            self.under_way.carried[visit.action.micro_batch] = Carried(tokens, made)

    @torch.no_grad()
    def _normed(self, visit: Visit, x: Tensor) -> Tensor:
        return blocks.embedding_norm(visit.parameters(), x, self._model, self._ways)

    @torch.no_grad()
    def _embedded(self, visit: Visit, tokens: Tensor) -> Tensor:
        if visit.by_rows:
            return blocks.scaled(visit.embedded_rows(), self._model)
        p, model = visit.parameters(), self._model
        return blocks.embedding(p, tokens, model, self._ranks, self._context, visit.begins)

    def backward(self, visit: Visit, kept: KeptActivations) -> None:
        """Adds rows to the tables' sums, or leaves them for sums in host memory."""
        gradient, tokens = visit.gradient(), kept.kept_input()
        if visit.by_rows:
            visit.send_rows_home(blocks.scaled(gradient, self._model), tokens)
            return
        visit.open(kept.sums)
        if self._model.embedding_norm:
            kept.weights = visit.weights()
            gradient, by_norm = kept.gradients(gradient)
            kept.sums.add(without(by_norm, self._elsewhere))
        if self._model.block_inputs is not None:
            by_made = self.under_way.carried[visit.action.micro_batch].own()
            p, x = visit.parameters(), self._embedded(visit, tokens)
            by_x, by_own = inputs.gradients(p, x, by_made, self._model, self._ways)
            kept.sums.add(by_own)
            gradient = gradient + by_x
        gradient = blocks.scaled(gradient, self._model)
        tables = blocks.looked_up(tokens, self._model, self._context, visit.begins)
        words = tables.pop(TABLE)
        for name in tables.keys() - self._elsewhere:
            kept.sums.add_rows(name, self._ranks.own(tables[name]), gradient.flatten(0, -2))
        gradient = self._ranks.all_tokens(gradient).flatten(0, -2)
        if not self._ranks.alone:
            words, others = own_rows(words, len(kept.sums.totals[TABLE]), self._ranks)
            gradient.masked_fill_(others[:, None], 0.0)  # nobody reads it after this
        kept.sums.add_rows(TABLE, words, gradient)
        kept.sums.close(self._elsewhere)


class Block:
    """Attention and MLP, recomputed as the plan has it."""

    balance: Callable[[], float] | None = None  # of experts, as mixture.Mixture's
    lora: Lora | None = None  # adapters alone are trained; None: all of the block is
    matrices: Matrices = AS_STORED  # how products multiply
    spread: ExpertParallel = ALL_HERE  # ranks that have some of the experts each
    under_way: UnderWay | None = None  # what it finds beside the residual stream, if anything
    first = 1  # the first block's place among layers

    def __init__(
        self,
        model: ModelSpec,
        positions: Positions,
        ranks: TensorParallel = ONE,
        context: ContextParallel = WHOLE,
        *,
        in_product: bool,
        kernels: Library | None = None,
    ) -> None:
        """`in_product`: the products of the backward add the weights' gradients to their sums."""
        self._model, self._positions, self._in_product = model, positions, in_product
        self._kernels, self._context = kernels, context
        self._ranks = ranks
        self._constants = frozenset(t.untyped_storage().data_ptr() for t in positions.tables)
        # Their sums of gradients stay zero.
        self._untrained = {p.name for p in model.kinds()["block"] if p.constant}
        self._filters = {p.name for p in model.kinds()["block"] if p.filters}

    def forward(self, visit: Visit, kept: KeptActivations) -> Tensor:
        """Keeps the input where all is recomputed, else a graph."""
        x, recompute = visit.hidden(), visit.recompute
        if recompute is Recompute.FULL:
            kept.keep_input(x)
            return self._alone(visit, x, self._turn(visit))
        return self.record(self._parameters(visit), x, kept, recompute, self._turn(visit))

    def _turn(self, visit: Visit) -> Turn:
        if self.under_way is None:
            return Turn(visit.bounds, visit.drops)
        action, found = visit.action, (visit.bounds, visit.drops)
        return self.under_way.turn(action.layer - self.first, action.micro_batch, *found)

    def _parameters(self, visit: Visit) -> dict[str, Tensor]:
        """The block's tensors, and its adapters where it has some."""
        own = visit.parameters()
        return own if self.lora is None or not visit.adapted else own | visit.parameters(1)

    def evaluate(self, visit: Visit) -> Tensor:
        """Without a graph, and with nothing dropped."""
        return self._alone(visit, visit.hidden(), replace(self._turn(visit), drops=None))

    def _products(self, turn: Turn, sums: Sums | None = None) -> Products:
        lora, scale = self.lora, 0.0 if self.lora is None else self.lora.scale
        frozen = lora is not None
        products = Products(self._ranks, sums, self._kernels, frozen, scale, self.matrices)
        return replace(products, spread=self.spread, drops=turn.drops)

    def _alone(self, visit: Visit, x: Tensor, turn: Turn) -> Tensor:
        ways = self._products(turn).ways._replace(context=self._context)
        ways = ways._replace(hand_on=turn.hand_on if turn.keeps else None)
        positions, p = self._positions._replace(bounds=turn.bounds), self._parameters(visit)
        with torch.no_grad():
            return blocks.block(p | turn.found(), x, self._model, positions, ways)

    def backward(self, visit: Visit, kept: KeptActivations) -> Tensor:
        """Through the graph, which is recorded first where the input alone was kept."""
        gradient, turn = visit.gradient(), self._turn(visit)
        kept.weights = visit.weights()
        if visit.recompute is Recompute.FULL:
            again, parameters = KeptActivations(weights=kept.weights), self._parameters(visit)
            self.record(parameters, kept.fetched_input(), again, Recompute.FULL, turn)
            kept = again
        visit.open(kept.sums)
        by_input, gradients = kept.gradients(gradient)
        elsewhere = self._ranks.counted_elsewhere(adapted_steps(self._model, BLOCK, self.lora))
        turn.leave({name: gradients.pop(name) for name in turn.reads if name in gradients})
        kept.sums.add(without(gradients, elsewhere))
        kept.sums.close(elsewhere | self._untrained)
        return by_input

    def record(
        self,
        parameters: Mapping[str, Tensor],
        x: Tensor,
        kept: KeptActivations,
        recompute: Recompute,
        turn: Turn = NOTHING,
    ) -> Tensor:
        """Run x [b, s, h] forward with its graph in `kept`; FULL: just before its backward.

        Under FULL the block's output is never computed, because nothing in the backward reads it.
        """
        leaves = dict(parameters)
        if self.lora is None:
            leaves = leaves_of(parameters, in_product=self._in_product)
            leaves |= {name: parameters[name] for name in self._untrained}
            leaves |= {name: leaf_of(parameters[name]) for name in self._filters}
        leaves |= turn.leaves()
        kept.parameters = differentiated(leaves)
        kept.constants = self._constants | turn.storages()
        model, ways = self._model, self._ways(kept, recompute, turn)
        ways = ways._replace(hand_on=turn.hand_on if turn.keeps else None)
        positions = self._positions._replace(bounds=turn.bounds)
        return kept.record(lambda x: blocks.block(leaves, x, model, positions, ways), x)

    def _ways(self, kept: KeptActivations, recompute: Recompute, turn: Turn) -> Ways:
        in_sums = self._in_product or self.lora is not None
        products = self._products(turn, kept.sums if in_sums else None)
        mixture = products.mixture._replace(
            balance=self.balance,
            gated=recompute is not Recompute.NONE,
            unread=recompute is Recompute.FULL,
            forget=kept.experts_again(products) if recompute is Recompute.MLP else None,
        )
        ways = products.ways._replace(context=self._context, experts=mixture)
        if recompute is Recompute.FULL:
            last = partial(products.closing, unread=True)
            gated = partial(products.gated, unread=True)
            return ways._replace(last=last, gated=gated, unread=True)
        if recompute is not Recompute.NONE:
            ways = ways._replace(forget=kept.forget, gated=products.gated)
            if self._context.group.size == 1:  # otherwise attention keeps what ranks exchanged
                ways = ways._replace(again=kept.products_again(products))
        if recompute is Recompute.MLP:
            ways = ways._replace(widening=kept.products_again(products))
        return ways
