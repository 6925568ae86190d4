"""Attention within chunks of tokens, against documents that are as long as chunks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.runtime.mixers import attention
from bigplan.runtime.mixers.positions import position_tables
from bigplan.runtime.mixers.ways import PLAIN
from tests.runtime.plans import shape_on, tiny_model

LENGTH, CHUNK = 24, 8


def _bounds(ends: list[int]) -> Tensor:
    """Of documents that end there, int32 [1, 2, s]."""
    begins = [0, *ends[:-1]]
    each = torch.tensor([end - begin for begin, end in zip(begins, ends, strict=True)])
    rows = [torch.tensor(places).repeat_interleave(each) for places in (begins, ends)]
    return torch.stack(rows).int()[None]


@pytest.mark.parametrize("ends", [[], [5, 8, 19], [3, 24]], ids=str)
def test_chunks_are_documents_of_their_own(ends: list[int]) -> None:
    """Documents are cut where chunks end."""
    torch.manual_seed(0)
    fields = {"sliding_window": None, "heads": 4, "kv_heads": 2}
    chunked, whole = tiny_model(**fields, attention_chunk=CHUNK), tiny_model(**fields)
    p = {q.name: torch.randn(shape_on(q, 1)) * 0.2 for q in whole.kinds()["block"]}
    x = torch.randn(2, LENGTH, whole.hidden, requires_grad=True)
    edges = sorted({*ends, *range(CHUNK, LENGTH + 1, CHUNK)})

    def played(model: object, ends: list[int]) -> tuple[Tensor, Tensor]:
        assert isinstance(model, type(whole))
        tables = position_tables(model, LENGTH, "cpu", torch.float32)
        bounds = _bounds(sorted({*ends, LENGTH})).expand(2, -1, -1) if ends else None
        found = attention.mixed(p, x, model, tables._replace(bounds=bounds), PLAIN)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
        return found.detach(), gradient

    for one, other in zip(played(chunked, ends), played(whole, edges), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
    alone, _ = played(whole, ends)
    assert (alone - played(chunked, ends)[0]).abs().max() > 0.01  # chunks hide something
