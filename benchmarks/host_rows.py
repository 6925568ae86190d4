"""Rows of a token table in host memory: looking them up, and adding their gradients to a sum.

    python -m benchmarks.host_rows

4,096 tokens of a table of 128,256 words of 4096, as Llama 3 8B has it; gradients are added in
compiled code, and by torch with parts of several sizes, of which runtime/layers/lookup.py takes
ROW_ELEMENTS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from bigplan.runtime.layers import lookup

WORDS, COLUMNS, TOKENS = 128_256, 4096, 4096
RUNS = 7


def milliseconds(work: Callable[[], object]) -> float:
    """The median run's, the first left out."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[1:])


def main() -> None:
    """The look-up, then each size of part."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(WORDS, COLUMNS, dtype=torch.bfloat16).random_()
    gradients, found = torch.ones(TOKENS, COLUMNS).bfloat16(), table[:TOKENS].clone()
    took = milliseconds(lambda: torch.index_select(table, 0, rows, out=found))
    print(f"look-up of {TOKENS} rows: {took:.1f} ms")
    total, chosen = torch.zeros(WORDS, COLUMNS), lookup.ROW_ELEMENTS
    for threads in sorted({1, torch.get_num_threads()}):
        took = milliseconds(partial(lookup.add_rows, total, rows, gradients, threads))
        print(f"gradients added in compiled code, threads {threads}: {took:.1f} ms", flush=True)
    lookup.native = lambda: None  # as where there is no compiler
    for part in (2048, 1024, 512, 256, 128):
        lookup.ROW_ELEMENTS = part * COLUMNS
        took = milliseconds(lambda: lookup.add_rows(total, rows, gradients))
        mark = ", the runtime's" if chosen == lookup.ROW_ELEMENTS else ""
        print(f"gradients added {part} at a time: {took:.1f} ms{mark}", flush=True)


if __name__ == "__main__":
    main()
