"""The cost model's offload runs, one by one, beside what `bigplan validate` prints by table.

python benchmarks/validation.py [ROWS.csv]
"""

from __future__ import annotations

import sys
from pathlib import Path

from bigplan.validate.rows import read_rows
from bigplan.validate.score import score


def main() -> None:
    """Print them."""
    rows = read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    by_id = {one.id: one for one in score(rows) if one.status == "scored"}
    offloaded = [r for r in rows if r.trust != "C" and (r.offload_optimizer or "none") != "none"]
    print("Offload runs: predicted and measured seconds, error")
    for row in offloaded:
        if one := by_id.get(row.id):
            print(
                f"  {row.id:10s}({row.trust}){one.predicted_step_s:9.2f}{one.measured_step_s:9.2f}"
                f"{one.error_pct:+8.2f}%"
            )


if __name__ == "__main__":
    main()
