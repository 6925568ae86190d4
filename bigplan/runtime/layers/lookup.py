"""Rows that are looked up in tables, and their gradients, added to their sums in place.

If a table stays in host memory, a micro-batch's rows go to the GPU and their gradients come back:
33 MB each way in place of 1.05 and 2.1 GB for 128,256 words of 4096 and 4,096 tokens. Neither the
table nor the sum takes memory of the GPU.

Autograd's gradient of a table is as large as the table for every micro-batch (1.05 GB for 128,256
words of 4096 in 16 bits). It also needs partial sums in fp32 of a row a token and a tenth more
(EmbeddingBackwardKernel.cu of torch 2.11). This module takes a few rows at a time, so that a large
vocabulary trains on a small GPU. It adds up 16-bit gradients before it rounds them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.mechanics import LOOKED_UP_ROWS, ROW_ELEMENTS
from bigplan.program import Action, Ref
from bigplan.runtime.context import Context
from bigplan.runtime.cpu.native import native
from bigplan.runtime.layers import blocks
from bigplan.spec.carried import INPUTS, TABLES


class StagedRows(NamedTuple):
    """Rows on their way between host memory and the GPU."""

    rows: Tensor  # [tables, tokens, columns] in the precision of the parameters
    tokens: Tensor  # int64 [micro_batch, sequence_length]: of gradients, the tokens they are for

    @classmethod
    def of(cls, context: Context, ref: Ref, action: Action) -> StagedRows:
        """What `ref` names for the action's micro-batch."""
        view, key, kind = (
            context.memory.view,
            context.entries.key(ref, action),
            context.kind(action.layer),
        )
        batch, length = context.graph.strategy.micro_batch, context.length
        # Tokens come first: after any number of 16-bit rows 8-byte numbers may lie across words.
        tokens = view(key, torch.int64, batch * length)
        rows = view(key, context.parameter_dtype, kind.looked_up, 8 * batch * length)
        columns = kind.tensors[0].columns  # of each of its tables
        return cls(rows.view(-1, batch * length, columns), tokens.view(batch, length))

    def embedded(self) -> Tensor:
        """[micro_batch, sequence_length, columns]: the tables' rows added up, in memory of its own.

        As blocks.embedding has it.
        """
        output = self.rows[0].clone()
        for more in self.rows[1:]:
            output += more
        return output.view(*self.tokens.shape, -1)


def look_up(context: Context, action: Action) -> None:
    """Copy the rows for a micro-batch's tokens out of the layer's tables."""
    tokens = context.batch(action.reads, action)[0]
    flat = context.entries.flat(action.reads[0], action, context.parameter_dtype)
    tables, entry = (
        context.views(flat, action.layer),
        StagedRows.of(context, action.writes[0], action),
    )
    for into, (name, rows) in zip(
        entry.rows, _looked_up(context, action, tokens).items(), strict=True
    ):
        torch.index_select(tables[name], 0, rows, out=into)


def _looked_up(context: Context, action: Action, tokens: Tensor) -> dict[str, Tensor]:
    """The tables' rows for a micro-batch's tokens in host memory."""
    if context.kind(action.layer).name == INPUTS:
        return {TABLES: tokens.flatten()}
    documents, begins = context.documents, None
    if documents is not None:
        begins = documents.begins_here(action.micro_batch)
    return blocks.looked_up(tokens, context.model, begins=begins)


def send_home(context: Context, action: Action, gradient: Tensor, tokens: Tensor) -> None:
    """Leave a micro-batch's gradients [micro_batch, sequence_length, hidden], and its tokens.

    Every table gets the same, so they leave once.
    """
    entry = StagedRows.of(context, action.writes[0], action)
    entry.rows[0].copy_(gradient.flatten(0, 1))
    entry.tokens.copy_(tokens)


def add_up(context: Context, action: Action, threads: int) -> None:
    """Add a micro-batch's gradients to their sum in host memory; a step's first clear it."""
    entry, total = StagedRows.of(context, action.reads[0], action), action.writes[0]
    sums = context.views(context.entries.flat(total, action, context.gradient_dtype), action.layer)
    if total not in action.reads:
        for table in sums.values():
            table.zero_()
    for name, rows in _looked_up(context, action, entry.tokens).items():
        add_rows(sums[name], rows, entry.rows[0], threads)


def add_rows(total: Tensor, rows: Tensor, gradients: Tensor, threads: int = 1) -> None:
    """Add gradients[i] to row rows[i] of `total`, for all i; on the CPU by so many threads.

    total [V, h], rows int64 [n], gradients [n, h], on one device. Gradients are sorted by row, so
    those of equal rows lie together; they are added in fp32, and then to `total` once. So a result
    never depends on the order of threads. In host memory compiled code does that (rows.cpp).
    Without it, and on a GPU, they are taken ROW_ELEMENTS and LOOKED_UP_ROWS at a time. The host
    reads no value of a GPU, because it would have to wait.
    """
    some_rows = LOOKED_UP_ROWS if total.is_cuda else max(1, ROW_ELEMENTS // total.shape[1])
    ranked, order = rows.sort(stable=True)
    library = None if total.is_cuda or not total.is_contiguous() else native()
    if library and library.takes(total) and library.takes(gradients):
        library.add_rows(total, ranked, order, gradients.contiguous(), threads)
        return
    for some, places in zip(*(torch.split(t, some_rows) for t in (ranked, order)), strict=True):
        _add(total, some, gradients[places])


def _add(total: Tensor, rows: Tensor, gradients: Tensor) -> None:
    """Add sorted rows: the first of equal rows adds their sum, the others add zeros."""
    first = torch.searchsorted(rows, rows)
    total.index_add_(0, rows, _sums(first, gradients).to(total.dtype))


def _sums(first: Tensor, gradients: Tensor) -> Tensor:
    """fp32 [n, h]: at i the sum of gradients[j] over all j with first[j] = i, where there are some.

    On CUDA this is a product with a matrix of ones and zeros. torch's kernel for gradients of rows
    takes equal rows one by one: 5 ms for 32,768 bytes of text with some 60 values and 4096 columns.
    """
    if not gradients.is_cuda:
        wide, count = gradients.float(), len(first)
        sums: Tensor = torch.ops.aten.embedding_dense_backward(wide, first, count, -1, False)
        return sums
    places = torch.arange(len(first), device=first.device)
    same = (places[:, None] == first).to(gradients.dtype)
    if gradients.dtype == torch.float32:
        return same @ gradients
    return torch.mm(same, gradients, out_dtype=torch.float32)
