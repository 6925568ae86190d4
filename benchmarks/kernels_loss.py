"""Linear + cross-entropy, forward and backward, in chunks of tokens, beside its products alone.

Usage: python -m benchmarks.kernels_loss. One GPU, 8,192 x 4,096 x 128,256 in bf16. The loss is the
kernel written by hand; milliseconds are medians by CUDA events, GiB what is allocated at the peak
beside inputs and the held fp32 sum of the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from bigplan.kernels import cross_entropy
from bigplan.runtime.products import add_product

TOKENS, HIDDEN, WORDS = 8192, 4096, 128256
CHUNKS = (512, 1024, 2048, 4096, 8192)


def seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times[2:])


class Loss:
    """One step of the loss."""

    def __init__(self) -> None:
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(TOKENS, HIDDEN, **kind)
        self.w = torch.randn(WORDS, HIDDEN, **kind) / 64
        self.targets = torch.randint(WORDS, (TOKENS,), device="cuda")
        self.total = torch.zeros(WORDS, HIDDEN, device="cuda")

    def chunked(self, chunk: int, *, only_products: bool = False) -> Tensor:
        """Gradient by x; that by the weight goes to its sum."""
        by_x = torch.empty_like(self.x)
        ones = torch.ones(chunk, device="cuda")
        for first in range(0, TOKENS, chunk):
            x, targets = self.x[first : first + chunk], self.targets[first : first + chunk]
            logits = x @ self.w.T
            if not only_products:
                _, lse = cross_entropy.forward(logits, targets)
                cross_entropy.backward_(logits, targets, lse, ones)
            torch.mm(logits, self.w, out=by_x[first : first + chunk])
            add_product(self.total, logits, x, fresh=False)
        return by_x


def main() -> None:
    """Print a line for each chunk."""
    loss = Loss()
    first, second = loss.chunked(4096), loss.chunked(4096)
    print(f"{torch.cuda.get_device_name()}; the same bits twice: {torch.equal(first, second)}")
    for chunk in CHUNKS:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        whole = seconds(lambda chunk=chunk: loss.chunked(chunk))
        extra = (torch.cuda.max_memory_allocated() - before) / 2**30
        alone = seconds(lambda chunk=chunk: loss.chunked(chunk, only_products=True))
        took = f"{whole * 1e3:7.2f} ms, products alone {alone * 1e3:7.2f}"
        print(f"chunk {chunk:5d}: {took}, {extra:5.2f} GiB")


if __name__ == "__main__":
    main()
