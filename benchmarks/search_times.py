"""Times `bigplan plan` as a whole process, from a cold start, and prints what the search did.

Usage: python benchmarks/search_times.py    (about a minute on two cores)
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage

CASES = (
    ("llama-3-8b", "rtx-4090-workstation", 1),
    ("llama-3-8b", "dgx-h100", 1),
    ("llama-3-70b", "dgx-h100", 4),
    ("llama-3-70b", "dgx-a100-80g", 4),
    ("gpt3-175b", "dgx-a100-80g", 1),
    ("gpt3-175b", "dgx-a100-80g", 64),
)
COMMAND = [sys.executable, "-c", "from bigplan.cli import main; main()", "plan", "--json"]


def main() -> None:
    """One line per case."""
    print(f"python {platform.python_version()}, {os.cpu_count()} cores")
    print("model cluster nodes: CPU s, step s, model gap, simulated gap")
    for model, cluster, nodes in CASES:
        before = getrusage(RUSAGE_CHILDREN)
        options = ["--model", model, "--cluster", cluster, "--nodes", str(nodes)]
        done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=True)
        after = getrusage(RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        plan = json.loads(done.stdout)
        print(
            f"{model} {cluster} {nodes}: {used:.1f}, {plan['step_seconds']:.4g}, "
            f"{plan['model_gap']:.4f}, {plan['simulated_gap']:.3f}"
        )


if __name__ == "__main__":
    main()
