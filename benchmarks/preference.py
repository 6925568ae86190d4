"""Steps of direct preference optimisation beside their promises, and beside plain fine-tuning.

    python -m benchmarks.preference OUT [CASE ...]

Pairs are made of the bundled book: a prompt, what follows it (chosen), and another place of the
book (rejected), of 500 to 1,900 bytes each, byte tokens. So a model learns to tell them apart, and
the accuracy of its rewards says so. A case is a model, all weights or adapters (lora), and whether
it learns from pairs (dpo) or the next token of the same kind of text (sft). Each launch's report
goes to OUT/CASE.txt, its metrics to OUT/CASE.jsonl.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

from bigplan.data.preferences import PairFields
from bigplan.data.prepare import Preparation, prepare
from bigplan.runtime.data import bundled_text

PAIRS, LENGTH, BATCH, STEPS = 96, 4096, 16, 10
# By case: what `bigplan launch` is told beside.
CASES = {
    "1b-dpo": ["--model", "llama-3.2-1b"],
    "1b-sft": ["--model", "llama-3.2-1b"],
    "1b-lora-dpo": ["--model", "llama-3.2-1b", "--lora-rank", "16"],
    "3.3b-dpo": ["--model", "llama-like-3.3b"],
    "3.3b-sft": ["--model", "llama-like-3.3b"],
    "3.3b-lora-dpo": ["--model", "llama-like-3.3b", "--lora-rank", "16"],
}


def pairs(folder: Path) -> Path:
    """The prepared pairs."""
    random, text = Random(1), bundled_text().read_text()

    def part(start: int) -> str:
        return text[start : start + random.randrange(500, 1900)]

    source = folder / "pairs.jsonl"
    with source.open("w") as file:
        for _ in range(PAIRS):
            start = random.randrange(len(text) - 5000)
            prompt = text[start : start + random.randrange(50, 200)]
            chosen, other = start + len(prompt), random.randrange(len(text) - 5000)
            row = {"prompt": prompt, "chosen": part(chosen), "rejected": part(other)}
            file.write(json.dumps(row) + "\n")
    fields = PairFields("prompt", "chosen", "rejected")
    index = prepare(Preparation((source,), fields, longest_pair=LENGTH), folder / "pairs")[""]
    print(f"{index.documents // 2} pairs, {index.tokens:,} tokens, {index.left_out} left out")
    return folder / "pairs"


def run(case: str, data: Path, out: Path) -> None:
    """One launch, and its figures."""
    learns = ["--data", str(data), "--preference", "dpo", "--beta", "0.1"]
    runs = data.parent / case
    command = [
        *(sys.executable, "-c", "from bigplan.cli import main; main()", "launch", *CASES[case]),
        *("--cluster", "h200-1x", "--run-dir", str(runs)),
        *("--seq-len", str(LENGTH), "--global-batch", str(BATCH), "--steps", str(STEPS)),
        *("--learning-rate", "1e-4" if "lora" in case else "1e-5", "--checkpoint-keep", "0"),
        *(learns if case.endswith("dpo") else []),
    ]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    (out / f"{case}.txt").write_text(done.stdout + done.stderr)
    print(f"\n{case}: exit {done.returncode}")
    if done.returncode:
        print((done.stdout + done.stderr)[-2500:])
        return
    (folder,) = (path.parent for path in runs.glob("*/summary.json"))
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "metrics.jsonl").read_text()
    (out / f"{case}.jsonl").write_text(lines)
    predicted, measured = (summary[f"{name}_step_seconds"] for name in ("predicted", "measured"))
    print(f"step {measured:.3f} s, promised {predicted:.3f} ({measured / predicted - 1:+.1%})")
    for row in summary["memory"]:
        if row["predicted"]:
            print(
                f"{row['tier']} {row['measured'] / 2**30:.2f} GiB of {row['predicted'] / 2**30:.2f}"
            )
    steps = [json.loads(line) for line in lines.splitlines()]
    for step in (steps[0], steps[len(steps) // 2], steps[-1]):
        print(
            step["step"],
            f"loss {step['loss']:.4f}",
            f"{step['seconds']:.3f} s",
            step.get("rewards"),
        )


def main() -> None:
    """All cases, or the named ones."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path("runs") / "preference"
    scratch.mkdir(parents=True, exist_ok=True)
    data = pairs(scratch)
    for case in sys.argv[2:] or CASES:
        run(case, data, out)


if __name__ == "__main__":
    main()
