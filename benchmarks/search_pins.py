"""Real cases: the free plan beside plans with one decision pinned, which no pin should beat.

Usage: python -m benchmarks.search_pins [MODEL ...]    (whole: five minutes of a core)

A line per case: its step in seconds, and the pins by how much longer their step is, in percent.
Pins that nothing fits with, or that a strategy does not have, are left out.
"""

from __future__ import annotations

import sys
from typing import Any

import bigplan
from bigplan.errors import BigplanError

DESK = "rtx-4090-workstation"
CASES: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("llama-3-8b", DESK, {}),
    ("qwen2.5-7b", DESK, {}),
    ("qwen3-4b", DESK, {}),
    ("llama-2-13b", "rtx-4090x2-workstation", {}),
    ("qwen3-14b", "rtx-4090x2-workstation", {}),
    ("qwen2.5-7b", "rtx-3090x4-workstation", {"sequence_length": 4096, "global_batch": 64}),
    ("llama-3-8b", "h200-1x", {}),
    ("phi-4", "l40s-8x", {}),
    ("llama-3-70b", "dgx-h100", {"sequence_length": 4096, "global_batch": 128}),
    ("mistral-7b", "rtx-5090-workstation", {}),
    ("qwen3-32b", "rtx-a6000x4-workstation", {}),
    ("opt-13b", "a10g-cloud", {}),
)
PINS: tuple[dict[str, int | str], ...] = (
    *({"micro_batch": number} for number in (1, 2, 4)),
    *({"recompute": how} for how in ("none", "selective", "full")),
    *({tensor: "host"} for tensor in ("gradients", "parameters")),
    {"accumulation_group": 1},
    {"zero": 3},
)


def seconds(case: tuple[str, str, dict[str, int]], **pinned: Any) -> float | None:
    """The planned step; None where nothing fits."""
    model, cluster, training = case
    try:
        plan = bigplan.plan(
            model=model, cluster=cluster, training=training, engine="native", set=pinned
        )
    except BigplanError:
        return None
    return plan.predicted.step_seconds


def main() -> None:
    """Print a line per case."""
    for case in CASES:
        if sys.argv[1:] and case[0] not in sys.argv[1:]:
            continue
        free = seconds(case)
        if free is None:
            print(*case[:2], "nothing fits")
            continue
        found = [(seconds(case, **pin), pin) for pin in PINS]
        longer = sorted((100 * (s / free - 1), str(pin)) for s, pin in found if s is not None)
        told = "; ".join(f"{pin} {more:+.1f}%" for more, pin in longer)
        print(f"{case[0]} {case[1]} {free:.2f} s: {told}", flush=True)


if __name__ == "__main__":
    main()
