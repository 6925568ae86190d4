"""Attention that keeps documents apart, beside causal attention of whole sequences and its price.

Usage: attention_documents.py [DOCUMENT ...]. Milliseconds of a forward and of a backward of two
sequences of 8,192 tokens in bf16, 32 heads of 128 and 8 of keys and values, whose documents have so
many tokens; 0: lengths drawn at random, 512 on average. Ways: `causal`, torch's own choice for
whole sequences, which is cuDNN's kernel on Hopper; `apart`, the runtime's kernel, beside its price
for an H200 in brackets; `varlen`, FlashAttention-2 by torch, which is told where each document
begins by a list as long as there are documents, and so is in no CUDA graph. Without a GPU: small
shapes, no times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigplan.cost.compute import Device, attention_seconds
from bigplan.data.documents import bounds, mean_piece
from bigplan.data.prepared import Tokens
from bigplan.graph.attention import DOCUMENT_EDGES, DOCUMENT_FILLS
from bigplan.graph.operators import Attention
from bigplan.runtime.attention import isolated
from bigplan.runtime.attention.fused import attention
from bigplan.runtime.attention.in_blocks import Scores
from bigplan.runtime.data import bundled_text
from bigplan.spec.catalog import find_cluster

CUDA = torch.cuda.is_available()
WHERE = "cuda" if CUDA else "cpu"
HEADS, KV_HEADS, WIDTH = (32, 8, 128) if CUDA else (4, 2, 16)
BATCH, LENGTH = 2, 8192 if CUDA else 256
DOCUMENTS = ("512", "2048", "8192", "0") if CUDA else ("16", "0")
MEAN = 512 if CUDA else 32  # of lengths that are drawn
aten = torch.ops.aten


def milliseconds(work: Callable[[], object]) -> float:
    """The median."""
    if not CUDA:
        work()
        return 0.0
    import triton

    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median"))


def packed(document: int) -> Tokens:
    """Tokens without values, of documents so long that they fill the sequences."""
    total = BATCH * LENGTH + 1
    lengths = np.full(total // max(1, document) + 1, document)
    if not document:
        lengths = np.random.default_rng(0).geometric(1 / MEAN, 4 * total // MEAN)
    ends = np.cumsum(lengths)
    ends = np.append(ends[ends < total], total).astype(np.uint64)
    return Tokens(bundled_text(), np.zeros(total, np.uint8), None, 0, ends)


def varlen(heads: tuple[Tensor, Tensor, Tensor], gradient: Tensor, ends: list[int]) -> list[float]:
    """Milliseconds of FlashAttention-2 forward and backward, of documents in one row."""
    q, k, v, by_out = (x.detach().flatten(0, 1) for x in (*heads, gradient))
    starts = torch.tensor([0, *ends], device=WHERE, dtype=torch.int32)
    longest = int(starts.diff().max())
    places = starts, starts, longest, longest, 0.0, True

    def forward() -> Any:
        return aten._flash_attention_forward(q, k, v, *places, False)

    out, lse, *random, _ = forward()

    def backward() -> Any:
        return aten._flash_attention_backward(by_out, q, k, v, out, lse, *places, *random)

    return [milliseconds(forward), milliseconds(backward)]


def autograd(attend: Callable[[], Tensor], inputs: list[Tensor], gradient: Tensor) -> list[float]:
    """Milliseconds of a function's forward and backward."""
    with torch.no_grad():
        forward = milliseconds(attend)
    out = attend()

    def backward() -> object:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return [forward, milliseconds(backward)]


def measure(document: int, device: Device) -> None:
    """Three rows of the table."""
    q, k, v, gradient = (
        torch.randn(BATCH, LENGTH, heads, WIDTH, device=WHERE, dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    inputs, tokens = [each.requires_grad_() for each in (q, k, v)], packed(document)
    rows = [torch.from_numpy(bounds(tokens, i * LENGTH, LENGTH)) for i in range(BATCH)]
    where = torch.stack(rows).to(WHERE)
    scores, heads = Scores(WIDTH**-0.5, bounds=where), (inputs[0], inputs[1], inputs[2])
    causal = autograd(lambda: attention(q, k, v), inputs, gradient)
    apart = autograd(lambda: isolated.attention(heads, scores, generated=CUDA), inputs, gradient)
    mean = round(mean_piece(tokens, LENGTH))
    flops = 2.0 * BATCH * LENGTH * mean * HEADS * WIDTH
    ahead, behind = DOCUMENT_EDGES
    there = Attention("attention", flops, length=mean, kernel="alibi", edges=ahead)
    there = replace(there, fills=DOCUMENT_FILLS)
    back = replace(there, flops=2.5 * flops, backward=True, edges=behind)
    price = [1e3 * attention_seconds(one, device) for one in (there, back)]
    print(f"{document:8d} {mean:6d}  causal {causal[0]:8.3f}            {causal[1]:8.3f}")
    told = "  ".join(f"{f:8.3f} ({p:6.3f})" for f, p in zip(apart, price, strict=True))
    print(f"{'':15s}  apart  {told}", flush=True)
    if CUDA:
        ends = [i * LENGTH + end for i, row in enumerate(rows) for end in row[1].unique().tolist()]
        found = varlen(heads, gradient, ends)
        print(f"{'':15s}  varlen {found[0]:8.3f}            {found[1]:8.3f}", flush=True)


def main() -> None:
    """The table."""
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "no GPU: small, no times")
    print("document   mean  way    forward ms (priced)  backward ms (priced)")
    device = Device(find_cluster("h200-1x").group.gpu, "bf16")
    for document in sys.argv[1:] or DOCUMENTS:
        measure(int(document), device)


if __name__ == "__main__":
    main()
