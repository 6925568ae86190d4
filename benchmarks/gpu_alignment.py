"""What products lose where a dimension is no multiple of 8: `python benchmarks/gpu_alignment.py`.

A layer's three products in bf16, as torch calls them: tokens x inputs by a weight of outputs x
inputs. Rates beside those of the same product with all dimensions a multiple of 8, medians of 20
after 5, random inputs; and both of a head's batched products in materialised attention.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import Tensor

SIZE = 4096
DIVISORS = (8, 4, 2, 1)


def seconds(product: Callable[[], Tensor]) -> float:
    """Median of 20 calls."""
    found = []
    for number in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        product()
        end.record()
        end.synchronize()
        if number >= 5:
            found.append(start.elapsed_time(end) / 1e3)
    return sorted(found)[len(found) // 2]


def layer(tokens: int, inputs: int, outputs: int) -> list[float]:
    """FLOP/s forward, by input and by weight."""
    x, weight, grad = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    flops = 2.0 * tokens * inputs * outputs
    products = (lambda: x @ weight.T, lambda: grad @ weight, lambda: grad.T @ x)
    return [flops / seconds(product) for product in products]


def heads(length: int, width: int) -> list[float]:
    """FLOP/s of 64 heads' scores and of their weighted values."""
    q, k, v = (torch.randn(64, length, width, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    scores = torch.randn(64, length, length, device="cuda", dtype=torch.bfloat16)
    flops = 2.0 * 64 * length * length * width
    return [flops / seconds(lambda: q @ k.mT), flops / seconds(lambda: scores @ v)]


def main() -> None:
    """Print both tables."""
    print(torch.cuda.get_device_name(), torch.__version__, platform.python_version())
    full = layer(SIZE, SIZE, SIZE)
    print("TFLOP/s of", SIZE, "cubed:", " ".join(f"{rate / 1e12:.0f}" for rate in full))
    print("one dimension less by  divides by   forward  by input  by weight")
    for place, name in enumerate(("tokens", "inputs", "outputs")):
        for divisor in DIVISORS[1:]:
            shape = [SIZE] * 3
            shape[place] -= divisor
            rates = [rate / best for rate, best in zip(layer(*shape), full, strict=True)]
            print(f"{name:10} {divisor:22} " + " ".join(f"{rate:9.3f}" for rate in rates))
    full = heads(2048, 128)
    told = " ".join(f"{rate / 1e12:.0f}" for rate in full)
    print("64 heads of 128, 2048 tokens, scores and values, TFLOP/s:", told)
    odd = [(2048 - divisor, 128) for divisor in DIVISORS[1:]]
    for length, width in (*odd, (2048, 124), (2048, 126), (2048, 125)):
        rates = [rate / best for rate, best in zip(heads(length, width), full, strict=True)]
        print(f"{length} tokens, width {width}: " + " ".join(f"{rate:.3f}" for rate in rates))


if __name__ == "__main__":
    main()
