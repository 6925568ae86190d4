"""Writing where nothing was written before beside writing there again, as the runtime writes.

    python -m benchmarks.drive_rewrite [FOLDER]

Fills a file of 4 GiB four times over and prints GB/s of each pass. A step writes where the one
before has, so the first pass is not what it gets.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from bigplan.runtime.memory.disk import DiskFile
from bigplan.runtime.memory.slab import Slab

SIZE, MOVED, PASSES = 4 << 30, 64 << 20, 4


def main() -> None:
    """All passes."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    slab = Slab(MOVED, pinned=False)
    source = slab.take(MOVED)
    source.random_(255)  # some drives compress
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        DiskFile(Path(scratch) / "file", SIZE) as file,
    ):
        print(f"O_DIRECT: {file.direct}")
        for number in range(1, PASSES + 1):
            start = time.perf_counter()
            for at in range(0, SIZE, MOVED):
                file.write(at, source)
            rate = SIZE / (time.perf_counter() - start)
            print(f"pass {number}: {rate / 1e9:.2f} GB/s", flush=True)
    slab.close()


if __name__ == "__main__":
    main()
