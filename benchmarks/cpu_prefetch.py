"""What the CPU's compiled kernels make of requests for memory ahead: how far, and into which cache.

    python -m benchmarks.cpu_prefetch [--millions 218.112] [--layers 3] [--rounds 5] [--threads N]

They are compiled with other distances and cache levels, and without requests; results are compared
bit for bit. Then all of them do the same with the same layers in turn, in another order each round,
alone and, with a GPU, beside copies both ways: AdamW, sums of 16-bit gradients, and of their
squares. Prints G elements/s: the median of all layers, the mean, and what one in ten is below and
above. The defaults take 12 GB of host memory and three quarters of the cores, as the runtime does.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.cpu_update import ADAMW, USED, beside, compiled, copies, layers_in, seconds
from bigplan.mechanics import CORES_BESIDE_COPIES
from bigplan.runtime.cpu.native import FLAGS, HEADERS, SOURCES, Native, Piece

VARIANTS = [(0, 2), *((ahead, 2) for ahead in (1024, 2048, 4096, 8192)), (2048, 3), (4096, 3)]
AHEAD, LEVEL = "AHEAD = 4096;", "LEVEL = 2;"  # as elements.h has them
ELEMENTS = (1 << 18) + 1000  # of the comparison


def made(folder: Path, ahead: int, level: int) -> Native:
    """The kernels with other constants; without requests for 0."""
    for path in (*SOURCES, *HEADERS):
        shutil.copy(path, folder)
    header = folder / "elements.h"
    text = header.read_text(encoding="utf-8")
    for constant in (AHEAD, LEVEL):
        assert constant in text, f"the source does not have {constant}"
    text = text.replace(AHEAD, f"AHEAD = {ahead};").replace(LEVEL, f"LEVEL = {level};")
    if not ahead:
        text = text.replace("__builtin_prefetch(bytes + i, 0, LEVEL)", "(void)bytes")
    header.write_text(text, encoding="utf-8")
    library = folder / f"{ahead}-{level}.so"
    sources = [str(folder / path.name) for path in SOURCES]
    subprocess.run(["c++", *FLAGS, "-o", str(library), *sources], check=True)
    return Native(library)


def summed(library: Native, threads: int, piece: Piece) -> None:
    """A layer's 16-bit gradients and others."""
    assert piece.copy is not None
    library.add(piece.copy, piece.gradient.view(torch.bfloat16)[: piece.elements], threads)


def squared(library: Native, threads: int, piece: Piece) -> None:
    """Their squares."""
    assert piece.copy is not None
    library.square_sum(piece.copy, threads)


WORKS: dict[str, Callable[[Native, int, Piece], None]] = {
    "AdamW": compiled,
    "sums": summed,
    "squares": squared,
}


def updated(library: Native) -> list[torch.Tensor]:
    """What a step makes of seeded values."""
    random_ = torch.Generator().manual_seed(1)
    values = [torch.randn(ELEMENTS, generator=random_) for _ in range(4)]
    parameter, gradient, first, second = values
    piece = Piece(parameter, gradient, (first, second.abs_()), parameter.bfloat16())
    library.step(ADAMW.native, [piece], 1.5, 2)
    assert piece.copy is not None
    return [parameter, first, second, piece.copy]


def measure(
    label: str,
    libraries: dict[tuple[int, int], Native],
    work: Callable[[Native, Piece], None],
    layers: list[Piece],
    rounds: int,
) -> None:
    """Rows of one work."""
    found = defaultdict[tuple[int, int], list[float]](list)
    for turn in range(rounds):
        for variant in random.Random(turn).sample(VARIANTS, len(VARIANTS)):
            found[variant] += seconds(layers, partial(work, libraries[variant]))
    count = layers[0].elements / 1e9
    for (ahead, level), times in sorted(found.items()):
        rates = sorted(count / each for each in times)
        tenth = len(rates) // 10
        name = f"{ahead} bytes ahead into cache {4 - level}" if ahead else "no requests"
        print(
            f"{label}, {name}: {statistics.median(rates):.2f} G/s, "
            f"mean {count / statistics.mean(times):.2f}, "
            f"{rates[tenth]:.2f} to {rates[-1 - tenth]:.2f}",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--millions", type=float, default=218.112, help="parameters a layer")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=ceil(CORES_BESIDE_COPIES * cores))
    options = parser.parse_args()
    count = int(options.millions * 1e6) // 64 * 64
    cuda = torch.cuda.is_available()
    with TemporaryDirectory() as folder:
        libraries = {variant: made(Path(folder), *variant) for variant in VARIANTS}
    expected = updated(libraries[VARIANTS[0]])
    for variant, library in libraries.items():
        assert all(map(torch.equal, expected, updated(library))), variant
    print(f"torch {torch.__version__}, {options.threads} of {cores} cores, layers of {count}")
    with layers_in(USED._replace(locked=cuda), count, options.layers) as layers:
        for label, others in {"alone": [], "beside copies": [copies]}.items():
            if others and not cuda:
                continue
            with beside(others):
                for name, work in WORKS.items():

                    def threaded(library: Native, piece: Piece, work: Any = work) -> None:
                        work(library, options.threads, piece)

                    measure(f"{name}, {label}", libraries, threaded, layers, options.rounds)


if __name__ == "__main__":
    main()
