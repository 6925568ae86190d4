"""Products in 8 bits on one GPU: casts and products alone, and steps beside those in bf16.

    python -m benchmarks.eight_bits OUT [PART ...]

Parts: `casts` (GB/s of kernels/handwritten/eight_bits.py by what they move), `products` (TFLOP/s of
a block's products in bf16 and in 8 bits, with and without all of their sums in fp32, and what a
block's products take with casts), `steps` (`bigplan launch` in bf16 and with fp8_gemms, with the
plan's promises beside) and `curves` (losses of a byte model of 300 M parameters that learns the
bundled book both ways). The shape of the others is llama-like-5.5b's. OUT gets cluster.yaml,
eight_bits.json and the runs. Without a GPU: nothing.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.parts import (
    CUDA,
    Asked,
    beside_promises,
    bigplan,
    gpu,
    milliseconds,
    newest,
)
from bigplan.kernels.handwritten import eight_bits as kernel
from bigplan.runtime.linear.eight_bits import GRADIENTS, VALUES, EightBits, multiplied
from bigplan.runtime.linear.matrices import AS_STORED, Matrices
from bigplan.spec.catalog import find_model
from bigplan.spec.files.dump import to_yaml

MODEL, LENGTH, BATCH, STEPS = "llama-like-5.5b", 4096, 16, 12
TOKENS, LAST = 16384, 20
SMALL = {"name": "bytes-300m", "layers": 24, "hidden": 1024, "ffn": 2816, "heads": 16}
SMALL |= {"kv_heads": 16, "head_dim": 64, "vocab": 256, "max_sequence_length": 512}
PARTS = ("steps", "curves", "casts", "products")  # steps first: what this process takes they lack


def _make(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def casts() -> dict[str, Any]:
    """GB/s of the bytes that each form moves."""
    model, found = find_model(MODEL), {}
    for width in (model.hidden, model.ffn):
        x = _make(TOKENS, width)
        for rows, columns in ((True, False), (False, True), (True, True)):
            took = milliseconds(
                lambda x=x, r=rows, c=columns: kernel.cast(x, GRADIENTS, rows=r, columns=c)
            )
            moved = (4 + rows + columns) * x.numel()
            found[f"{width}, rows {rows}, columns {columns}"] = moved / took / 1e6
    return found


def products() -> dict[str, Any]:
    """TFLOP/s of products alone, and milliseconds of forward and backward with casts."""
    model, found = find_model(MODEL), {}
    sides = (model.hidden, model.hidden), (model.hidden, model.ffn), (model.ffn, model.hidden)
    for inner, outer in sides:
        x, weight, gradient = _make(TOKENS, inner), _make(outer, inner), _make(TOKENS, outer)
        flops = 2e-9 * TOKENS * inner * outer
        small, by, given = (
            kernel.cast(t, dtype, rows=True, columns=True)
            for t, dtype in ((x, VALUES), (weight, VALUES), (gradient, GRADIENTS))
        )
        pairs = {
            "forward": ((small[0], small[2]), (by[0], by[2])),
            "by input": ((given[0], given[2]), (by[1], by[2])),
            "by weight": ((given[1], given[2]), (small[1], small[2])),
        }
        rates = {"bf16 forward": flops / milliseconds(lambda x=x, w=weight: F.linear(x, w))}
        for name, (left, right) in pairs.items():
            for exact in (False, True):
                took = milliseconds(
                    lambda a=left, b=right, e=exact, x=x: multiplied(a, b, x, exact=e)
                )
                rates[f"{name}, exact {exact}"] = flops / took
        total = torch.zeros(outer, inner, device="cuda")
        for name, matrices in (("bf16", AS_STORED), ("8 bits", EightBits(kernel.cast))):
            rates[f"{name}, all, ms"] = milliseconds(
                lambda m=matrices, t=(x, weight, gradient, total): _all(m, *t)
            )
        found[f"{inner} to {outer}"] = rates
    return found


def _all(matrices: Matrices, x: Tensor, weight: Tensor, gradient: Tensor, total: Tensor) -> None:
    matrices.product(matrices.read(x), weight, None)
    given = matrices.given(gradient)
    matrices.by_input(given, weight)
    read = matrices.read_again(x)
    if matrices.in_place:
        torch.addmm(total, given.T, read, out_dtype=torch.float32, out=total)
    else:
        total.add_(matrices.by_weight(given, read))


def steps(out: Path) -> dict[str, Any]:
    """Seconds, promises, losses and memory of both."""
    sizes = "--seq-len", str(LENGTH), "--global-batch", str(BATCH), "--steps", str(STEPS)
    return _both(out, MODEL, *sizes)


def curves(out: Path) -> dict[str, Any]:
    """The same of a small model, and the mean of its last losses."""
    fields = find_model(MODEL).model_dump() | SMALL
    (out / "small.yaml").write_text(to_yaml(fields))
    sizes = "--seq-len", "512", "--global-batch", "32", "--steps", "400"
    rate = "--learning-rate", "3e-4", "--warmup-steps", "20"
    found = _both(out, str(out / "small.yaml"), *sizes, *rate)
    for each in found.values():
        each["last"] = mean(each["losses"][-LAST:])
    return found


def _both(out: Path, model: str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for low in (False, True):
        name = "fp8" if low else "bf16"
        runs = out / f"{Path(model).stem}-{name}"
        bigplan(
            *("launch", "--model", model, "--cluster", str(out / "cluster.yaml"), *arguments),
            *("--precision", "bf16", "--engine", "native", "--checkpoint-keep", "0"),
            *("--fp8-gemms" if low else "--no-fp8-gemms", "--run-dir", str(runs)),
        )
        found[name] = beside_promises(newest(runs.iterdir()))
    return found


def main() -> None:
    """All parts, or those that are named."""
    if not CUDA:
        sys.exit(__doc__)
    asked = Asked.of(__doc__, "eight_bits", PARTS)
    asked.cluster()
    run = {"casts": casts, "products": products, "steps": partial(steps, asked.out)}
    run["curves"] = partial(curves, asked.out)
    for part in asked.parts:
        one = run[part]()
        print(part, json.dumps(one, indent=1), flush=True)
        asked.keep(part, one)
    print(f"torch {torch.__version__}, {gpu()}")


if __name__ == "__main__":
    main()
