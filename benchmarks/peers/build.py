"""Compiles what DeepSpeed needs, so that no case has to: CPU Adam, page-locking, reads and writes.

    python -m benchmarks.peers.build

It builds in TORCH_EXTENSIONS_DIR, or where torch does. Prints a JSON line with the seconds of each.
"""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.peers.zero import environment


def main() -> None:
    """Build, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    environment(args.device, "native")
    from deepspeed.accelerator import get_accelerator

    record: dict[str, object] = {"peer": "build"}
    for name in ("CPUAdamBuilder", "PinMemoryBuilder", "AsyncIOBuilder"):
        begun = time.perf_counter()
        get_accelerator().create_op_builder(name).load()
        record[name] = time.perf_counter() - begun
    print(json.dumps(record))


if __name__ == "__main__":
    main()
