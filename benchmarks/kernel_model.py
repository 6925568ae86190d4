"""How well the model of fused kernels picks tiles and predicts them, by the sweeps of a GPU.

    python -m benchmarks.kernel_model SWEEP.jsonl... [--gpu h200-sxm] [--kernels]

The records are those of `bigplan kernels bench --part sweep-norms` and `sweep-pointwise`. Each
kernel's first pick of today's model is compared with the fastest tile measured, so a change of the
model is judged without a GPU, among the tiles that were measured. "Aside" are the cases that no
constant was fitted to. `--kernels` prints every kernel.
"""

from __future__ import annotations

import argparse
import json
import re
from math import exp, log
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

import torch

from bigplan.cost.kernel import KernelWork, Shape, Tile, best_tiles
from bigplan.kernels.benchmark import cases
from bigplan.kernels.fusion.fuse import work_of
from bigplan.kernels.fusion.price import Pricer
from bigplan.kernels.optimised import optimise
from bigplan.spec.gpu import find_gpu
from bigplan.spec.multiprocessor import find_multiprocessor

TILE = re.compile(
    r"Tile\(shape=<Shape\.(\w+): .*>, rows=(\d+), columns=(\d+), warps=(\d+), programs=(\d+)"
    r"(?:, stages=(\d+))?\)"
)


def tile_of(text: str) -> Tile:
    """A tile as records have it."""
    found = TILE.fullmatch(text)
    assert found, text
    numbers = (int(part or 1) for part in found.groups()[1:])
    return Tile(Shape[found[1]], *numbers)


def works(label: str, gpu: str) -> list[KernelWork]:
    """What the generated kernels of a case do."""
    every = [*cases.norms(small=False), *cases.pointwise(small=False)]
    case = next(one for one in every if one.label == label)
    given = [
        torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in case.shapes
    ]
    with patch.object(Pricer, "torch", lambda *_: 1.0):
        plan = optimise(case.function, given, gpu=gpu).kernels.plans[-1]
    return [work_of(unit.fused.body) for unit in plan.cover.units if unit.fused]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--gpu", default="h200-sxm")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    gpu, sm = find_gpu(given.gpu), find_multiprocessor(given.gpu)
    lines = [json.loads(text) for path in given.records for text in path.open()]
    known: dict[str, list[KernelWork]] = {}
    scores: dict[bool, list[tuple[float, float, float, float]]] = {False: [], True: []}
    for record in (line for line in lines if line["kind"] == "sweep"):
        left = known.setdefault(record["case"], works(record["case"], given.gpu))
        same = [
            w for w in left if abs(w.read + w.written - record["bytes"]) < 1e-3 * record["bytes"]
        ]
        if not same:
            print(f"{record['case']}: its kernel is another one today")
            continue
        left.remove(same[0])
        times = {tile_of(text): seconds for text, seconds in record["times"].items()}
        pick, time = best_tiles(same[0], list(times), gpu, sm)[0]
        # Each sum of columns is added up by a kernel of its own, which was measured with it.
        predicted = time.seconds + same[0].column_sums * sm.kernel_start
        best, usual = min(times.values()), median(times.values())
        error = abs(predicted / times[pick] - 1)
        scores[record["aside"]].append((best / times[pick], best / usual, error, times[pick]))
        if given.kernels:
            told = f"{times[pick] * 1e6:.0f} us, predicted {predicted * 1e6:.0f}"
            print(f"{record['case']:32s} {best / times[pick]:4.0%} of the best, {told}: {pick}")
    for aside, found in scores.items():
        if not found:
            continue
        picks, usual, errors = ([one[i] for one in found] for i in range(3))
        geometric = [exp(mean(map(log, part))) for part in (picks, usual)]
        print(
            f"{'set aside' if aside else 'fitted to'}: {len(found)} kernels, first pick "
            f"{geometric[0]:.1%} of the best (least {min(picks):.0%}), median tile "
            f"{geometric[1]:.0%}; picks predicted within {median(errors):.1%} (median), "
            f"{max(errors):.0%} (most)"
        )


if __name__ == "__main__":
    main()
