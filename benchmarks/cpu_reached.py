"""What the CPU's update reached in steps, of its rate beside copies just before, in all runs here.

    python -m benchmarks.cpu_reached

Of every run on an H200 since the rates of a profile are of updates beside copies, but those that
wait for a drive: seconds of the updates as promised over those measured, sorted, and the middles of
fifths. `solve/candidate.py` chooses plans by them (REACHED).
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results"
EARLIER = "2026-11-22-h200-lanes"  # chunks still held up what else was copied, and so the update
LEAST = 0.3  # seconds of promised updates: shorter ones are mostly waiting


def reached() -> list[float]:
    """Promised over measured seconds of the CPU's updates, a run each, sorted."""
    found = []
    for promises in sorted(RESULTS.glob("2026-11-22-h200-*/**/predictions.json")):
        if EARLIER in promises.parts:
            continue
        for name, promised in json.loads(promises.read_text()).items():
            record = promises.with_name(f"{name}.json")
            if not record.exists() or name.startswith("d"):
                continue
            expected = promised["busy_seconds"].get("cpu", 0.0)
            measured = json.loads(record.read_text())["busy_seconds"].get("cpu", 0.0)
            if expected > LEAST and measured:
                found.append(expected / measured)
    return sorted(found)


def main() -> None:
    """Print them."""
    ratios = reached()
    print(f"{len(ratios)} runs: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    ends = [len(ratios) * part // 5 for part in range(6)]
    fifths = [ratios[start:end] for start, end in pairwise(ends)]
    print("middles of fifths:", " ".join(f"{median(fifth):.2f}" for fifth in fifths))


if __name__ == "__main__":
    main()
