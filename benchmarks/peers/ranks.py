"""Starts a peer as several processes of this machine, a GPU each, which train together.

    python -m benchmarks.peers.ranks RANKS MODULE ARGUMENTS...

MODULE lies below benchmarks/, as peers.fsdp2 does. They meet over a file, and each sees one GPU.
Ends with the first that fails, and ends the others, which would wait for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLL = 0.1  # seconds between looks at the processes


def environment(rank: int, ranks: int, meeting: Path) -> dict[str, str]:
    """What a rank runs in: its place, its GPU, its part of the cores."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # it sees one GPU
        "WORLD_SIZE": str(ranks),
        "PEERS_MEETING": str(meeting),
        "CUDA_VISIBLE_DEVICES": seen.split(",")[rank] if seen else str(rank),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }


def run(ranks: int, command: list[str]) -> int:
    """The exit code of all: 0, or that of the first that failed."""
    with tempfile.TemporaryDirectory(prefix="bigplan-peers-") as folder:
        meeting = Path(folder) / "meeting"
        processes = [
            subprocess.Popen(command, env=environment(rank, ranks, meeting))
            for rank in range(ranks)
        ]
        try:
            while True:
                codes = [process.poll() for process in processes]
                failed = [code for code in codes if code]
                if failed or None not in codes:
                    return failed[0] if failed else 0
                time.sleep(POLL)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def main() -> None:
    """Read the command line."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    module = f"benchmarks.{sys.argv[2]}"
    code = run(int(sys.argv[1]), [sys.executable, "-m", module, *sys.argv[3:]])
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
