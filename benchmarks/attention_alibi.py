"""Attention with linear biases (ALiBi): by a kernel, wider heads, a mask of scores, flex attention.

Usage: attention_alibi.py [LENGTH ...]. Milliseconds of a forward, and of a backward, of 32 heads of
128 in bf16, 8,192 tokens in sequences of each length (default: 2048 8192), beside causal attention
without biases and beside what the cost model gives kernel and wider heads with an H200's rates.
Each way is compared with the first. Where torch refuses one, it says why. Without a GPU: small
ones, no kernel, no times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph.block import block
from bigplan.graph.operators import Attention, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime.attention import alibi
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

CUDA = torch.cuda.is_available()
DEVICE, HEADS, WIDTH, TOKENS = ("cuda", 32, 128, 8192) if CUDA else ("cpu", 4, 16, 256)
Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [b, s, heads, d] to the same


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without biases."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def ways(length: int) -> dict[str, Way]:
    """Each way to add the biases."""
    biases = alibi.biases(HEADS, WIDTH, length, DEVICE, torch.bfloat16)
    slopes, place = alibi.slopes(HEADS).to(DEVICE, torch.float32), torch.arange(length).to(DEVICE)
    distance = place[None, :] - place[:, None]
    mask = (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)
    mask = mask.to(torch.bfloat16)
    compiled = torch.compile(flex_attention) if CUDA else flex_attention
    causal = create_block_mask(lambda _, __, i, j: i >= j, None, None, length, length, DEVICE)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        found = compiled(q, k, v, lambda s, _, h, i, j: s + slopes[h] * (j - i), causal)
        return found.transpose(1, 2)

    kernel: dict[str, Way] = {
        "kernel": lambda *heads: alibi.attention(*heads, biases, generated=True)
    }
    return (kernel if CUDA else {}) | {
        "wider heads": lambda *heads: alibi.attention(*heads, biases),
        "mask": masked,
        "flex": flex,
    }


def milliseconds(work: Callable[[], object]) -> float:
    """The median."""
    if not CUDA:
        work()
        return 0.0
    import triton

    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median"))


def measure(name: str, way: Way, length: int, expected: Tensor | None) -> Tensor | None:
    """A row of the table; what the way gives."""
    torch.manual_seed(0)
    shape = TOKENS // length, length, HEADS, WIDTH
    heads = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    q, k, v = (each.requires_grad_() for each in heads[:3])
    try:
        found = way(q, k, v).detach()
        forward = milliseconds(lambda: way(q, k, v))
        both = milliseconds(lambda: torch.autograd.grad(way(q, k, v), (q, k, v), heads[3]))
    except (RuntimeError, NotImplementedError) as error:
        print(f"{length:6d}  {name:12s} refused: {str(error).splitlines()[0][:100]}")
        return None
    off = 0.0 if expected is None else float((found - expected).norm() / expected.norm())
    print(f"{length:6d}  {name:12s} {forward:8.3f} {both - forward:8.3f}  apart {off:.1e}")
    return found


def priced(length: int, kernels: Literal["generated", "torch"]) -> None:
    """What the cost model gives the same heads: by the kernel, or wider ones."""
    changes = {"positions": "alibi", "kv_heads": 32}
    model = find_model("llama-3-8b").model_copy(update=changes)
    batch = TOKENS // length
    training = Training(sequence_length=length, global_batch=batch, kernels=kernels)
    kind = block(RankShape(model, training, Strategy(dp=1, micro_batch=batch), fused=True))
    device = Device(find_cluster("h200-1x").group.gpu, "bf16")
    times = [
        1e3
        * sum(
            operator_seconds(op, device)
            for op in operators
            if isinstance(op, Attention) or (isinstance(op, Stream) and op.name == "linear biases")
        )
        for operators in (kind.forward, kind.backward)
    ]
    way = {"generated": "kernel", "torch": "wider heads"}[kernels]
    print(f"{length:6d}  {times[0]:8.3f} {times[1]:8.3f}  priced: {way}")


def main() -> None:
    """A table a length."""
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "no GPU: small, no times")
    for length in map(int, sys.argv[1:] or (2048, 8192) if CUDA else (64,)):
        measure("no biases", plain, length, None)
        expected = None
        for name, way in ways(length).items():
            found = measure(name, way, length, expected)
            expected = found if expected is None else expected
        if CUDA:
            priced(length, "generated")
            priced(length, "torch")


if __name__ == "__main__":
    main()
