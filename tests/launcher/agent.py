"""What Ray runs for the agent of its dashboard, which no launch asks for anything (warm.py).

It has no ports, which it says as Ray's own does where packages are missing, and ends with Ray.
"""

import argparse
import os
import time
from pathlib import Path


def main() -> None:
    """Ray's raylet waits for these files, and ends when its agent does."""
    raylet, parser = os.getppid(), argparse.ArgumentParser()
    parser.add_argument("--session-dir", type=Path)
    parser.add_argument("--node-id")
    given, _ = parser.parse_known_args()
    for port in ("metrics_agent", "metrics_export", "dashboard_agent_listen"):
        path = given.session_dir / f"{port}_port_{given.node_id}"
        half = path.with_suffix(".half")
        half.write_text("-1")
        half.rename(path)
    while os.getppid() == raylet:
        time.sleep(1)


if __name__ == "__main__":
    main()
