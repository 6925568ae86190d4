"""Sustained load: what training does to a GPU's clock, before and between measurements.

A kernel on an idle GPU is faster than the same kernel in a step: under load the power limit sets
the clock, and the power that a kernel draws depends also on its operands. So the load is a
transformer block's forward and backward on normal random values. Its products, attention and
memory-bound kernels have the shares that they have in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.profile.budget import ReadClock
from bigplan.profile.settle import settled, until_settled

# Llama-3-8B's block; its key and value heads are fewer only where attention supports that.
HIDDEN, FFN, HEADS, KEY_VALUE_HEADS, HEAD = 4096, 14336, 32, 8, 128
LONGEST = 4096  # tokens of a sequence
FEW_TOKENS, MANY_TOKENS = 256, 8192
# A round takes about so long at the GPU's peak. Most of what is measured between two rounds is
# shorter, so the clock stays that of the load.
ROUND_SECONDS = 10e-3
WINDOW_SECONDS = 0.25
LEAST_WINDOWS = 12  # of a heating, however short


@dataclass(slots=True)
class Load:
    """Rounds of a block's work on one GPU. `settled`: whether their rate stopped changing."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    settled: bool = False
    _round: Callable[[], object] | None = None

    def heat(self, seconds: float, clock: ReadClock) -> None:
        """Work until the rate settles, for `seconds` at most."""
        self._round = block_round(self.tokens, self.dtype, self.device)
        window = min(WINDOW_SECONDS, seconds / LEAST_WINDOWS)
        self.settled = settled(until_settled(self._rates(window), seconds, clock))

    def queue(self) -> None:
        """Queue a round on the current stream; heat() has to come first."""
        assert self._round is not None, "heat first"
        self._round()

    def _rates(self, seconds: float) -> Iterator[float]:
        """Rounds a second in windows of about `seconds`; one is queued ahead, so no gap."""
        second, third = self._mark(1), self._mark(1)  # the first round loads kernels
        third.synchronize()
        rounds = max(1, round(1e3 * seconds / second.elapsed_time(third)))
        start, stop = self._mark(), self._mark(rounds)
        while True:
            ahead = self._mark(rounds)
            stop.synchronize()
            yield 1e3 * rounds / start.elapsed_time(stop)
            start, stop = stop, ahead

    def _mark(self, rounds: int = 0) -> torch.cuda.Event:
        """An event after so many more rounds."""
        for _ in range(rounds):
            self.queue()
        mark = event()
        mark.record()
        return mark


def tokens_of_round(peak: float) -> int:
    """Tokens of a round of about ROUND_SECONDS at `peak` FLOP/s: a power of two.

    Forward and backward take 6 FLOPs per parameter and token.
    """
    parameters = HIDDEN * (2 * HEADS * HEAD + 2 * KEY_VALUE_HEADS * HEAD + 3 * FFN)
    wanted = int(ROUND_SECONDS * peak / (6 * parameters))
    return min(MANY_TOKENS, 1 << max(FEW_TOKENS, wanted).bit_length() - 1)


def block_round(tokens: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Forward and backward of a block without norms, on normal random values."""
    length, grouped = min(tokens, LONGEST), grouped_heads(device, dtype)
    width, narrow = HEADS * HEAD, (KEY_VALUE_HEADS if grouped else HEADS) * HEAD

    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, device=device).mul_(0.02).to(dtype).requires_grad_()

    inner = [weight(width, HIDDEN), weight(narrow, HIDDEN), weight(narrow, HIDDEN)]
    output, gate, up, down = (
        weight(HIDDEN, width), weight(FFN, HIDDEN), weight(FFN, HIDDEN), weight(HIDDEN, FFN),
    )  # fmt: skip
    x = torch.randn(tokens // length, length, HIDDEN, device=device).to(dtype).requires_grad_()
    gradient = torch.randn_like(x)

    def work() -> object:
        q, k, v = (F.linear(x, w).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for w in inner)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        middle = x + F.linear(mixed.transpose(1, 2).flatten(2), output)
        out = middle + F.linear(F.silu(F.linear(middle, gate)) * F.linear(middle, up), down)
        return torch.autograd.grad(out, [x, *inner, output, gate, up, down], gradient)

    return work


def grouped_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's fused attention supports fewer key and value heads than query heads.

    FlashAttention's and cuDNN's kernels do, from Ampere on and in 16 bits. Elsewhere torch would
    take the unfused path, which keeps the square matrix of scores.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def event() -> torch.cuda.Event:
    """A CUDA event that tells times and lets the host sleep while it waits."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
