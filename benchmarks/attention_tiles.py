"""Tiles of the attention kernels (kernels/handwritten/attention.py), one kernel after the other.

    python -m benchmarks.attention_tiles [--columns 256] [--heads 8] [--kv-heads 4]
        [--sequences 8] [--length 4096] [--window W] [--cap 50] [--document TOKENS]

Milliseconds of a forward, and of a backward whose other kernel keeps today's tiles, for every
candidate of `CANDIDATES`, shortest first, beside today's tiles and compiled flex attention with the
same cap. A cap of 0 is none; with --document sequences are cut into documents of so many tokens,
which see nothing of each other. Each result is compared with today's. The default is a block of
Gemma 2 2B. Without a GPU: nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.errors import TritonError

from benchmarks.parts import milliseconds
from bigplan.kernels.handwritten import attention
from bigplan.kernels.handwritten.attention import ScoreRule, Tile, Tiles

PARTS = Tiles._fields
SIZES = {"result": ((64, 128), (32, 64, 128)), "by_queries": ((32, 64, 128), (16, 32, 64, 128))}
SIZES["by_keys"] = ((16, 32, 64, 128), (32, 64, 128))  # queries, keys
CANDIDATES = {
    part: [
        Tile(queries, keys, warps, stages)
        for queries, keys, warps, stages in product(*SIZES[part], (4, 8), (1, 2, 3))
        if queries * keys <= 128 * 128 and not (warps == 4 and max(queries, keys) == 128)
    ]
    for part in PARTS
}
Case = argparse.Namespace


def inputs_of(case: Case, sequences: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Queries, keys and values, and a gradient of the result."""
    torch.manual_seed(0)
    counts = case.heads, case.kv_heads, case.kv_heads, case.heads
    q, k, v, gradient = (
        torch.randn(sequences, case.length, n, case.columns, device="cuda", dtype=torch.bfloat16)
        for n in counts
    )
    return (q, k, v), gradient


def rule_of(case: Case) -> ScoreRule:
    """What becomes of products."""
    return ScoreRule(case.columns**-0.5, case.cap or None, case.window)


def bounds_of(case: Case, sequences: int) -> Tensor | None:
    """Where each token's document begins and ends."""
    if not case.document:
        return None
    begins = torch.arange(case.length) // case.document * case.document
    both = torch.stack((begins, (begins + case.document).clamp_max(case.length)))
    return both.int().repeat(sequences, 1, 1).cuda()


def today(case: Case) -> Tiles:
    """The tiles that are taken without a choice."""
    return attention._tiles_on(torch.device("cuda"), attention._columns(case.columns))


def one_of(case: Case, part: str, tile: Tile) -> Tiles:
    """Today's, but for one kernel."""
    return today(case)._replace(**{part: tile})


def compiles(case: Case, part: str, tile: Tile) -> str:
    """Compile a candidate, which leaves it in Triton's cache. Why not, or nothing."""
    inputs, gradient = inputs_of(case, 1)
    given = {"tiles": one_of(case, part, tile), "bounds": bounds_of(case, 1)}
    try:
        results = attention.forward(inputs, rule_of(case), **given)
        if part != "result":
            attention.backward(gradient, inputs, results, rule_of(case), **given)
        torch.cuda.synchronize()
    except (RuntimeError, TritonError) as error:  # too much shared memory, or no such product
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return ""


def measured(case: Case, part: str, tiles: Tiles) -> tuple[float, tuple[Tensor, ...]]:
    """Milliseconds and results of the forward, or of the backward."""
    inputs, gradient = inputs_of(case, case.sequences)
    rule, given = rule_of(case), {"tiles": tiles, "bounds": bounds_of(case, case.sequences)}
    results = attention.forward(inputs, rule, **given)
    if part == "result":
        return milliseconds(lambda: attention.forward(inputs, rule, **given)), results
    found = attention.backward(gradient, inputs, results, rule, **given)
    took = milliseconds(lambda: attention.backward(gradient, inputs, results, rule, **given))
    return took, found


def off(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest difference, as a part of the largest value."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max().float() / b.abs().max().float()) for a, b in pairs)


def sweep(case: Case, part: str) -> Iterator[tuple[float, Tile, float]]:
    """Milliseconds, tile and distance of each candidate that compiles."""
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        tiles = CANDIDATES[part]
        reasons = list(pool.map(compiles, [case] * len(tiles), [part] * len(tiles), tiles))
    _, expected = measured(case, part, today(case))
    for tile, why in zip(tiles, reasons, strict=True):
        if why:
            print(f"  {part} {tuple(tile)}: {why}")
            continue
        took, found = measured(case, part, one_of(case, part, tile))
        yield took, tile, off(found, expected)


def flex(case: Case) -> None:
    """Compiled flex attention, which caps scores by code like this."""
    (q, k, v), gradient = inputs_of(case, case.sequences)
    leaves = [each.transpose(1, 2).contiguous().requires_grad_() for each in (q, k, v)]

    def seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) if case.window is None else (i >= j) & (i - j < case.window)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        cap: float = case.cap
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(seen, None, None, case.length, case.length, device="cuda")
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    by = gradient.transpose(1, 2).contiguous()

    def run() -> Tensor:
        return compiled(*leaves, score_mod=capped, block_mask=mask, enable_gqa=True)

    out = run()
    back = milliseconds(lambda: torch.autograd.grad(out, leaves, by, retain_graph=True))
    print(f"compiled flex attention: forward {milliseconds(run):.3f}, backward {back:.3f} ms")


def main() -> None:
    """All kernels in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("columns", 256), ("heads", 8), ("kv-heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--cap", type=float, default=50.0)
    parser.add_argument("--document", type=int, default=0)
    case = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: nothing is measured")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {vars(case)}")
    ahead, back = (measured(case, part, today(case))[0] for part in ("result", "by_keys"))
    print(f"today: forward {ahead:.3f}, backward {back:.3f} ms, {today(case)}", flush=True)
    best = {}
    for part in PARTS:
        found = sorted(sweep(case, part))
        best[part] = found[0][1]
        for took, tile, distance in found[:8]:
            print(f"  {part} {tuple(tile)}: {took:.3f} ms, off {distance:.1e}", flush=True)
    tiles = Tiles(**best)
    ahead, back = (measured(case, part, tiles)[0] for part in ("result", "by_keys"))
    print(f"best: forward {ahead:.3f}, backward {back:.3f} ms, {tiles}", flush=True)
    if case.document or not case.cap:
        return
    try:
        flex(case)
    except RuntimeError as error:  # it compiles tiles of its own, which may not fit
        print(f"flex attention: {type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    main()
