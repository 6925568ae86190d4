"""What limit.py predicted and measured and what peers took, in one table."""

from __future__ import annotations

import csv
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

Record = dict[str, Any]
TIERS = ("gpu", "host", "nvme")
HEADING = (
    f"{'case':24s} {'bound':>8s} {'predict':>8s} {'measured':>8s} {'error':>7s} "
    f"{'of bound':>8s} {'GHz':>5s}  {'GPU GiB':>15s}  {'host GiB':>15s}  {'drive GiB':>13s}"
    "  bound by"
)
COLUMNS = (
    *("folder", "case", "model", "tokens", "length", "gpu_cap", "steps"),
    *("bound_seconds", "bound_by", "predicted_seconds", "seconds"),
    *("predicted_cpu_seconds", "cpu_seconds", "predicted_gpu", "gpu"),
    *("predicted_host", "host", "predicted_nvme", "nvme", "ghz"),
)
TOKENS, LENGTH = 65536, 4096  # of a step and of a sequence, where a peer is not told: peers.frame


def table(folders: Sequence[Path]) -> None:
    """Every case of these folders, its peers below it, and the mean and worst error of each figure.

    A case that is in several folders is shown once for each, with that folder's prediction and the
    peers that ran on the same machine.
    """
    errors: dict[str, dict[str, float]] = {what: {} for what in ("step", *TIERS)}
    print(HEADING)
    ran = count = 0
    for folder in folders:
        peers = _read(folder / "peers.json")
        for name, predicted in sorted(_read(folder / "predictions.json").items()):
            count += 1
            record = _read(folder / f"{name}.json")
            if "seconds" not in record:
                print(f"{name:24s} {promise(predicted)}  {record.get('error', 'not run')}")
                continue
            ran += 1
            print(f"{name:24s} {measured(predicted, record)}")
            for what, error in errors_of(predicted, record).items():
                errors[what][f"{folder.name}/{name}"] = error
            for peer, told in peers.items():
                if alike(predicted, told):
                    print(f"    {peer:32s} {beside(told, seconds_of(record))}")
    print(f"{ran} of {count} cases ran; sizes are predicted/measured, x is of our step")
    for what, by_case in errors.items():
        summary(what, by_case)


def rows(folders: Sequence[Path], out: TextIO) -> None:
    """One line of CSV for every case of these folders that ran, as results/limit.csv has them."""
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(COLUMNS)
    for folder in folders:
        for name, predicted in sorted(_read(folder / "predictions.json").items()):
            record = _read(folder / f"{name}.json")
            if len(record.get("seconds", ())) > 1:
                lines.writerow([str(folder), name, *row(predicted, record)])


def row(predicted: Record, record: Record) -> list[object]:
    """What such a line says of a run: seconds, then bytes, each predicted before measured."""
    cap = predicted["caps"].get("gpu")
    busy = [told.get("busy_seconds", {}).get("cpu", 0.0) for told in (predicted, record)]
    memory = [told["memory"].get(tier, 0) for tier in TIERS for told in (predicted, record)]
    bound, state = predicted["bound"], record.get("gpu_state") or {}
    return [
        *(predicted[key] for key in ("model", "tokens", "length")),
        cap or "",
        len(record["seconds"]),
        f"{bound['seconds']:.4f}",
        bound["by"],
        f"{predicted['step_seconds']:.4f}",
        f"{seconds_of(record):.4f}",
        *(f"{seconds:.4f}" for seconds in busy),
        *memory,
        f"{state.get('clock_hertz', 0) / 1e9:.3f}",
    ]


def _read(path: Path) -> Record:
    found: Record = json.loads(path.read_text()) if path.exists() else {}
    return found


def seconds_of(record: Record) -> float:
    """The median step without the first."""
    return float(statistics.median(record["seconds"][1:]))


def errors_of(predicted: Record, record: Record) -> dict[str, float]:
    """Predicted over measured, less one: of the step, and of every tier that is in use."""
    found = {"step": predicted["step_seconds"] / seconds_of(record) - 1}
    for tier in TIERS:
        here, there = predicted["memory"].get(tier, 0), record["memory"].get(tier, 0)
        if here or there:
            found[tier] = here / there - 1 if there else float("inf")
    return found


def alike(predicted: Record, peer: Record) -> bool:
    """Whether a peer trained the same on as much of the GPU, and on a drive if the case did.

    A case did where it had more there than in host memory. No peer can be held to less host memory,
    so cases that are have none.
    """
    cap, memory = predicted["caps"].get("gpu"), predicted["memory"]
    case = {key: predicted[key] for key in ("model", "tokens", "length")}
    case["gpu_limit"] = cap / 2**30 if cap else None
    case["drive"] = memory.get("nvme", 0) > memory.get("host", 0)
    return "host" not in predicted["caps"] and case == asked(peer["command"])


def asked(command: str) -> Record:
    """What a peer was to do, by its command: one that was killed has left nothing else."""
    words = shlex.split(command)[3:]  # python -m MODULE

    def option(name: str) -> str | None:
        return words[words.index(name) + 1] if name in words else None

    limit = option("--gpu-limit")
    return {
        "model": words[0] if words else None,
        "tokens": int(option("--tokens") or TOKENS),
        "length": int(option("--length") or LENGTH),
        "gpu_limit": float(limit) if limit else None,
        "drive": option("--state") == "nvme",
    }


def promise(predicted: Record) -> str:
    """The bound and the predicted step."""
    return f"{predicted['bound']['seconds']:8.3f} {predicted['step_seconds']:8.3f}"


def measured(predicted: Record, record: Record) -> str:
    """All that a table tells of a case that ran."""
    seconds, bound = seconds_of(record), predicted["bound"]
    clock = (record["gpu_state"] or {}).get("clock_hertz", float("nan")) / 1e9
    both = [[told["memory"].get(tier, 0) / 2**30 for told in (predicted, record)] for tier in TIERS]
    memory = [f"{here:.2f}/{there:.2f}" for here, there in both]
    return (
        f"{promise(predicted)} {seconds:8.3f} {predicted['step_seconds'] / seconds - 1:+7.1%} "
        f"{bound['seconds'] / seconds:8.1%} {clock:5.2f}  {memory[0]:>15s}  {memory[1]:>15s}  "
        f"{memory[2]:>13s}  {bound['by']}"
    )


def beside(peer: Record, ours: float) -> str:
    """A peer's step over ours, or why it has none."""
    host = f"host {peer['host_peak_taken_bytes'] / 2**30:.1f} GiB"
    gpu = peer.get("gpu_peak_allocated_bytes")
    memory = f"GPU {gpu / 2**30:.1f} GiB, {host}" if gpu else host
    if "median_seconds" not in peer:
        return f"{peer['error'].partition('. ')[0]}; {memory}"
    return f"{peer['median_seconds']:8.3f} s  x{peer['median_seconds'] / ours:.2f}  {memory}"


def summary(what: str, by_case: dict[str, float]) -> None:
    """Mean and worst error of one quantity."""
    if by_case:
        worst = max(by_case, key=lambda name: abs(by_case[name]))
        mean = statistics.mean(map(abs, by_case.values()))
        print(f"{what}: MAPE {mean:.2%}, worst {by_case[worst]:+.2%} ({worst})")
