"""AdamW on the CPU with requests for memory ahead of the loop: how far, and into which cache.

    python benchmarks/cpu_prefetch.py [--millions 218.112] [--layers 3] [--rounds 5]

bigplan/runtime/step.cpp is compiled with other distances and cache levels, and without requests;
results are compared bit for bit. Then all of them update the same layers in turn, in another order
each round, alone and, with a GPU, beside copies both ways. Prints G parameters/s: the median of all
layers, the mean, and what one in ten is below and above. The defaults take 12 GB of host memory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.cpu_update import ADAMW, USED, beside, compiled, copies, layers_in, seconds
from bigplan.runtime.native import FLAGS, SOURCE, Native, Piece

VARIANTS = [(0, 2), *((ahead, level) for level in (2, 3) for ahead in (256, 512, 1024))]
AHEAD, LEVEL = "AHEAD = 512;", "LEVEL = 2;"  # as the source has them
ELEMENTS = (1 << 18) + 1000  # of the comparison


def made(folder: Path, ahead: int, level: int) -> Native:
    """The kernel with other constants; without requests for 0."""
    source = SOURCE.read_text(encoding="utf-8")
    for constant in (AHEAD, LEVEL):
        assert constant in source, f"the source does not have {constant}"
    source = source.replace(AHEAD, f"AHEAD = {ahead};").replace(LEVEL, f"LEVEL = {level};")
    if not ahead:
        source = source.replace("__builtin_prefetch(bytes + i, 0, LEVEL)", "(void)bytes")
    text = folder / f"{ahead}-{level}.cpp"
    text.write_text(source, encoding="utf-8")
    library = text.with_suffix(".so")
    subprocess.run(["c++", *FLAGS, "-o", str(library), str(text)], check=True)
    return Native(library)


def updated(library: Native) -> list[torch.Tensor]:
    """What a step makes of seeded values."""
    random_ = torch.Generator().manual_seed(1)
    values = [torch.randn(ELEMENTS, generator=random_) for _ in range(4)]
    parameter, gradient, first, second = values
    piece = Piece(parameter, gradient, (first, second.abs_()), parameter.bfloat16())
    library.step(ADAMW.native, [piece], 1.5, 2)
    assert piece.copy is not None
    return [parameter, first, second, piece.copy]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--millions", type=float, default=218.112, help="parameters a layer")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    count, cores = int(options.millions * 1e6) // 64 * 64, len(os.sched_getaffinity(0))
    cuda = torch.cuda.is_available()
    with TemporaryDirectory() as folder:
        libraries = {variant: made(Path(folder), *variant) for variant in VARIANTS}
    expected = updated(libraries[VARIANTS[0]])
    for variant, library in libraries.items():
        assert all(map(torch.equal, expected, updated(library))), variant
    print(f"torch {torch.__version__}, {cores} cores, {options.layers} layers of {count}")
    with layers_in(USED._replace(locked=cuda), count, options.layers) as layers:
        for label, works in {"alone": [], "beside copies": [copies]}.items():
            if works and not cuda:
                continue
            found = defaultdict[tuple[int, int], list[float]](list)
            with beside(works):
                for turn in range(options.rounds):
                    order = random.Random(turn).sample(VARIANTS, len(VARIANTS))
                    for variant in order:
                        update = partial(compiled, libraries[variant], cores)
                        found[variant] += seconds(layers, update)
            for (ahead, level), times in sorted(found.items()):
                rates = sorted(count / 1e9 / each for each in times)
                tenth = len(rates) // 10
                name = f"{ahead} ahead into cache {4 - level}" if ahead else "no requests"
                print(
                    f"{label}, {name}: {statistics.median(rates):.2f} G/s, "
                    f"mean {count / 1e9 / statistics.mean(times):.2f}, "
                    f"{rates[tenth]:.2f} to {rates[-1 - tenth]:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
