"""One seed, one loss curve, with generated kernels as with torch's: 200 steps of small models.

    python -m benchmarks.kernels_curve [--steps 200] [--device cuda] [--only FAMILY ...]

Two layers of every family of blocks learn the bundled book, in fp32 and bf16 with clipping, once
with torch's operators and once with `kernels: generated`. Prints the largest relative difference
of a step's loss, and of the mean loss of the last 20 steps. In fp32 both compute the same but for
the order of sums, and in bf16 values are rounded at other places; training carries both on, so
that single steps may part where it is unsteady. The means of the last steps are held to BOUNDS,
and beside them stands the same training with a rate larger by 1%, to show what they see.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from benchmarks.layouts import ONE, Layout, differences
from bigplan.graph.build import build_graph
from bigplan.placement import KindPlacement, Placement, StagePlacement
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training
from tests.runtime.plans import CHUNK, plan_of

BOUNDS = {"fp32": 1e-5, "bf16": 1e-3}  # of the mean loss of the last 20 steps
SIZES = {"layers": 2, "hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 2, "head_dim": 64}
NEOX = {"positions": "rope", "rotary_fraction": 0.25, "parallel_residual": True}
RATE = 3e-4
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2-xl", {"kv_heads": 4}),
    "opt": ("opt-13b", {"kv_heads": 4}),
    "neox": ("gpt2-xl", NEOX | {"kv_heads": 4}),
    "llama": ("llama-3-8b", {}),
    "qwen3": ("llama-3-8b", {"qk_norm": True}),
}


def model_of(name: str) -> ModelSpec:
    """A family's block, small, over bytes."""
    shipped, changes = FAMILIES[name]
    given = find_model(shipped).model_dump() | SIZES | changes
    return ModelSpec.model_validate(given | {"vocab": 256, "max_sequence_length": 1024})


def training_of(precision: str, kernels: str, rate: float = RATE) -> Training:
    """8 sequences of 256 bytes a step."""
    return Training.model_validate(
        {
            "sequence_length": 256,
            "global_batch": 8,
            "precision": precision,
            "kernels": kernels,
            "optimizer": Optimizer(learning_rate=rate),
        }
    )


def losses(model: ModelSpec, training: Training, device: str, steps: int) -> list[float]:
    """What a training of the model by the runtime's worker reports, all on one device."""
    layout: Layout = ONE
    graph = build_graph(model, training, layout.strategy)
    kinds = {name: KindPlacement.on_gpu(n) for name, n in _counts(graph.layers).items()}
    placement = Placement(stages=(StagePlacement(kinds=kinds),), slots=2, chunk=CHUNK)
    plan = plan_of(model, training, layout.strategy, placement, device)
    with tempfile.TemporaryDirectory() as scratch:
        worker = NativeWorker(plan, 0, Path(scratch))
        try:
            worker.preflight()
            worker.start(Path(scratch) / "meeting", None)
            return [worker.step().loss for _ in range(steps)]
        finally:
            worker.close()


def _counts(names: tuple[str, ...]) -> dict[str, int]:
    return {name: names.count(name) for name in names}


def main() -> None:
    """Read the command line, train, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", nargs="*", default=[], choices=list(FAMILIES))
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    print(f"torch {torch.__version__}, {args.device}, {args.steps} steps")
    print(f"{'family':8s} {'':5s} {'any step':>9s} {'last 20':>9s} {'rate +1%':>9s}  last loss")
    failed = False
    for name, precision in product(args.only or FAMILIES, BOUNDS):
        model = model_of(name)
        plain, ours, faster = (
            losses(model, training, args.device, args.steps)
            for training in (
                training_of(precision, "torch"),
                training_of(precision, "generated"),
                training_of(precision, "torch", 1.01 * RATE),
            )
        )
        bad = apart(ours, plain) > BOUNDS[precision]
        failed |= bad
        print(
            f"{name:8s} {precision:5s} {max(differences(ours, plain)):9.2e} "
            f"{apart(ours, plain):9.2e} {apart(faster, plain):9.2e}  {plain[-1]:.5f}"
            f"{'  PASSED THE BOUND' if bad else ''}",
            flush=True,
        )
    sys.exit(failed)


def apart(ours: list[float], plain: list[float]) -> float:
    """The relative difference of the mean loss of the last 20 steps."""
    return abs(statistics.mean(ours[-20:]) / statistics.mean(plain[-20:]) - 1)


if __name__ == "__main__":
    main()
