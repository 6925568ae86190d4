"""Attention of heads that no flash kernel has, by products and by torch's memory-efficient kernel.

    python -m benchmarks.wide_heads > OUT

Needs a CUDA device. In bf16, causal: milliseconds forward and backward of both, and of plain torch
in blocks; with several numbers of queries at a time, and what the backward takes of memory. Errors
are relative to fp64, of the result and of gradients by queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from bigplan.runtime.attention import by_products, fused, in_blocks
from bigplan.runtime.attention.in_blocks import Heads, Scores

# Sequences, tokens, heads of queries and of keys, columns; the second is Gemma 4 31B's.
SHAPES = (
    (1, 4096, 8, 8, 512),
    (1, 4096, 32, 4, 512),
    (2, 2048, 32, 4, 512),
    (1, 16384, 32, 4, 512),
    (1, 4096, 16, 1, 512),
    (1, 4096, 16, 16, 320),
)
COMPARED = 4096  # tokens of the longest sequences that fp64 computes
QUERIES = 128, 256, 512, 1024


def milliseconds(function: Callable[[], object], times: int = 10) -> float:
    """The mean of `times` after three."""
    for _ in range(3):
        function()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / times


def exact(heads: Heads, gradient: Tensor, scale: float) -> list[Tensor]:
    """The result and its gradients in fp64, a head of a sequence at a time."""
    q, k, v = heads
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    hidden = torch.ones(length, length, device=q.device, dtype=torch.bool).triu(1)
    found = [torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v)]
    for b in range(len(q)):
        for head in range(q.shape[2]):
            at = head, head // groups, head // groups
            own = [x[b, :, i].double().requires_grad_() for x, i in zip(heads, at, strict=True)]
            scores = (own[0] @ own[1].T * scale).masked_fill(hidden, -torch.inf)
            out = scores.softmax(-1) @ own[2]
            parts = torch.autograd.grad(out, own, gradient[b, :, head].double())
            for total, i, part in zip(found, (head, *at), (out.detach(), *parts), strict=True):
                total[b, :, i] += part
    return found


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """Relative ones of each."""
    pairs = zip(found, wanted, strict=True)
    return " ".join(f"{float((a.double() - b).norm() / b.double().norm()):.1e}" for a, b in pairs)


def compare(shape: tuple[int, int, int, int, int]) -> None:
    """One shape: a line for each way."""
    batch, length, heads, kv_heads, width = shape
    made = torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> Tensor:
        drawn = torch.randn(batch, length, count, width, generator=made, device="cuda")
        return drawn.to(torch.bfloat16)

    inputs, scores = (draw(heads), draw(kv_heads), draw(kv_heads)), Scores(width**-0.5)
    gradient = draw(heads)
    wanted = exact(inputs, gradient, scores.scale) if length <= COMPARED else None
    print(f"{batch} x {length}, {heads} heads, {kv_heads} of keys, {width} columns")
    kernel(inputs, gradient, scores, wanted)
    for together in QUERIES:
        with patch.object(by_products, "wide_queries", return_value=together):
            print(f"  products of {together:5}", products(inputs, gradient, scores, wanted))
    if wanted is None:
        return
    results = in_blocks.forward(inputs, scores)
    ahead = milliseconds(lambda: in_blocks.forward(inputs, scores), 3)
    back = milliseconds(lambda: in_blocks.backward(gradient, inputs, results, scores), 3)
    print(f"  plain torch       {ahead:6.2f} {back:6.2f} ms")


def kernel(inputs: Heads, gradient: Tensor, scores: Scores, wanted: list[Tensor] | None) -> None:
    """The memory-efficient one's line."""
    leaves = [x.clone().requires_grad_() for x in inputs]

    def run() -> Tensor:
        return fused.attention(leaves[0], leaves[1], leaves[2], scale=scores.scale)

    out = run()
    given = out.detach(), *torch.autograd.grad(out, leaves, gradient)
    both = milliseconds(lambda: torch.autograd.grad(run(), leaves, gradient))
    ahead = milliseconds(run)
    wrong = errors(given, wanted) if wanted else ""
    print(f"  kernel            {ahead:6.2f} {both - ahead:6.2f} ms  {wrong}")


def products(inputs: Heads, gradient: Tensor, scores: Scores, wanted: list[Tensor] | None) -> str:
    """Ours, as wide_queries has it."""
    out, sums = by_products.forward(inputs, scores)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = by_products.backward(gradient, inputs, sums, scores)
    taken = (torch.cuda.max_memory_allocated() - before) / 2**20
    ahead = milliseconds(lambda: by_products.forward(inputs, scores))
    back = milliseconds(lambda: by_products.backward(gradient, inputs, sums, scores))
    wrong = errors((out, *found), wanted) if wanted else ""
    return f"{ahead:6.2f} {back:6.2f} ms  {wrong}  {taken:.0f} MiB"


def main() -> None:
    """All shapes."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in SHAPES:
        compare(shape)


if __name__ == "__main__":
    main()
