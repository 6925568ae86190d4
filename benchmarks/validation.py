"""The cost model against published runs: step times, picks within sweeps, peak memory, offload.

    python benchmarks/validation.py [ROWS.csv]

`bigplan validate` prints the step times alone. A sweep is all runs of a table with the same model,
GPUs and batch; the regret of a sweep is how much slower the run predicted fastest was measured to
be than the fastest.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

from bigplan.validate.rows import Row, read_rows
from bigplan.validate.score import Scored, group_quality, score


def main() -> None:
    """Print every comparison."""
    rows = read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    scored = score(rows)
    print("Step time by table: rows, mean and median absolute error, bias")
    for name, quality in group_quality(scored).items():
        print(
            f"  {name:16s}{quality.n:5d}{quality.mape:8.2f}%{quality.median_ape:8.2f}%"
            f"{quality.bias:+8.2f}%"
        )
    by_id = {one.id: one for one in scored if one.status == "scored"}
    _sweeps(rows, by_id)
    _memory(rows, scored)
    offloaded = [r for r in rows if r.trust == "A" and (r.offload_optimizer or "none") != "none"]
    print("Offload runs of trust A: predicted and measured seconds, error")
    for row in offloaded:
        if one := by_id.get(row.id):
            print(
                f"  {row.id:10s}{one.predicted_step_s:9.2f}{one.measured_step_s:9.2f}"
                f"{one.error_pct:+8.2f}%"
            )


def _sweeps(rows: list[Row], by_id: dict[str, Scored]) -> None:
    sweeps: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for row in rows:
        if row.id in by_id:
            key = (row.group, row.model_name, row.n_gpus, row.gpu, row.global_batch, row.seq_len)
            sweeps[key].append(by_id[row.id])
    regrets: dict[str, list[float]] = defaultdict(list)
    for key, runs in sweeps.items():
        if len(runs) > 1:
            picked = min(runs, key=lambda one: one.predicted_step_s or 0.0)
            best = min(one.measured_step_s or 0.0 for one in runs)
            regrets[str(key[0])].append(100 * ((picked.measured_step_s or 0.0) / best - 1))
    print("Sweeps by table: number, mean and largest regret of the run predicted fastest")
    for table, found in sorted(regrets.items()):
        print(f"  {table:16s}{len(found):5d}{fmean(found):8.2f}%{max(found):8.2f}%")


def _memory(rows: list[Row], scored: list[Scored]) -> None:
    kinds = {row.id: row.mem_kind or "kind not stated" for row in rows}
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in scored:
        if one.predicted_peak_gb and one.measured_peak_gb:
            error = 100 * (one.predicted_peak_gb / one.measured_peak_gb - 1)
            errors[one.group, kinds[one.id]].append(error)
    print("Peak memory by table and kind: rows, mean and median absolute error, bias")
    for (table, kind), found in sorted(errors.items()):
        sizes = [abs(error) for error in found]
        print(
            f"  {table:12s}{kind:16s}{len(found):4d}{fmean(sizes):8.2f}%{median(sizes):8.2f}%"
            f"{fmean(found):+8.2f}%"
        )


if __name__ == "__main__":
    main()
