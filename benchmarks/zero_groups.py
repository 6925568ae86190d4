"""Zero groups beside ZeRO over all GPUs, in steps of a model like Llama: measured and promised.

    python -m benchmarks.zero_groups OUT [PART ...]

Parts: `zero1`, `zero2` and `zero3`: `bigplan launch` on four GPUs with that stage of ZeRO, over all
of them and in two groups of two, each with its plan's promises. All start with the same weights and
tokens, so losses and norms of gradients must agree. GPUs of one host gain nothing by groups: what
this shows is that both communicators run beside the backward as promised. OUT gets cluster-4.yaml,
zero-groups.json, which keeps what earlier calls found, and the runs. Two runs a part.

Without GPUs: small shapes on CPU processes, to see that everything runs; its figures mean
nothing.
"""

from __future__ import annotations

import torch

from benchmarks import parts
from benchmarks.parts import Asked, Trained, beside_promises, gpu
from bigplan.spec.model import ModelSpec

RANKS, GROUP = 4, 2
PARTS = {f"zero{zero}": zero for zero in (1, 2, 3)}
SMALL = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 256}
LENGTH, SEQUENCES = (4096, 4) if parts.CUDA else (32, 4)  # of a rank and step
ACCUMULATED = {"micro_batch": 2, "accumulation_group": 1}  # ZeRO 2 and 3 reduce twice a step
RATE = ("--learning-rate", "2e-5")  # with 3e-4, without warm-up, losses jump from 9 to 18 and back
STEPS = 8 if parts.CUDA else 3
# 3.9 B parameters. By ZeRO 1 in groups of two a GPU has 47 GB of them, gradients and state.
MODEL = ModelSpec.model_validate(
    {
        "name": "llama-like-4b",
        "layers": 34,
        "hidden": 3072,
        "ffn": 9216,
        "heads": 24,
        "kv_heads": 8,
        "vocab": 32000,
        "max_sequence_length": 4096,
        "source": "Llama 3's block, made up for this measurement",
    }
    | ({} if parts.CUDA else SMALL)
)


def main() -> None:
    """All parts, or those that are named; what was found before stays in the file."""
    asked = Asked.of(__doc__, "zero-groups", PARTS)
    trained = Trained(asked.out, MODEL, LENGTH, SEQUENCES, STEPS)
    print(f"torch {torch.__version__}, {RANKS} x {gpu()}; seconds a step (promised)", flush=True)
    for part in asked.parts:
        for groups in ({}, {"zero_group": GROUP}):
            pins = {"dp": RANKS, "zero": PARTS[part], **ACCUMULATED, **groups}
            found = beside_promises(trained.launched(RANKS, pins, *RATE))
            asked.keep(trained.name(RANKS, pins), found, pins=pins)
            told = f"{found['seconds']:.3f} ({found['promised']:.3f})"
            told += f", losses {found['losses']}, norms {found['norms']}, {found['memory']}"
            print(f"  {pins}: {told}", flush=True)


if __name__ == "__main__":
    main()
