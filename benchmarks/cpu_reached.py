"""What the CPU's updates reached in steps, of what was measured before them.

    python -m benchmarks.cpu_reached

Of every run in results/limit.csv since profiles time updates beside copies, but those that wait for
a drive: seconds of the updates as promised over those measured, sorted, and the middles of fifths.
`solve/candidate.py` chooses plans by them (REACHED).
"""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from statistics import median

RUNS = Path(__file__).parent / "results" / "limit.csv"
EARLIER = ("2026-11-21", "2026-11-22-h200-lanes")  # chunks still held up what else was copied
LEAST = 0.3  # seconds of promised updates: shorter ones are mostly waiting


def reached() -> list[float]:
    """Promised over measured seconds of the CPU's updates, a run each, sorted."""
    found = []
    with RUNS.open() as lines:
        for run in csv.DictReader(lines):
            promised, measured = float(run["predicted_cpu_seconds"]), float(run["cpu_seconds"])
            left_out = run["case"].startswith("d") or run["folder"].startswith(EARLIER)
            if not left_out and promised > LEAST and measured:
                found.append(promised / measured)
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
