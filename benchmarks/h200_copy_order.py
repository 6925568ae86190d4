"""When a small copy gets its turn beside a stream of large ones in the same direction, by CUDA.

    python benchmarks/h200_copy_order.py [--mib 88] [--copies 200]

A lane of the runtime brings chunks of optimizer state to the GPU, one after the other, while others
wait for a layer's parameters or a batch's tokens, over the same engine. Here one stream is given
--copies of --mib MiB, and another asks every 10 ms for a small one. By how the large ones are
queued:

    all at once      as fast as the host can
    8 at a time      the host waits for the one so many before, as in training (ACTIONS_AHEAD)
    one at a time    the host queues the next when the one before has arrived
    with a hop       all at once, but each waits for an event that an idle stream records once the
                     one before has arrived, so that the engine finds nothing to do between them

The rate of the large copies in GB/s, and how late the small ones were: the median and the latest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from threading import Thread

import torch

from bigplan.mechanics import ACTIONS_AHEAD

EVERY = 0.01  # seconds between small copies
SMALL = 64 << 10  # bytes: the tokens and targets of a sequence of 4096

Copy = Callable[[], object]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def queue(copy: Copy, copies: int, ahead: int) -> None:
    """On the current stream, at most `ahead` under way."""
    ends: list[torch.cuda.Event] = []
    for number in range(copies):
        if number >= ahead:
            ends[number - ahead].synchronize()
        copy()
        ends.append(_event())
        ends[-1].record()


def queue_with_hops(copy: Copy, copies: int) -> None:
    """On the current stream, all at once."""
    stream, idle = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for _ in range(copies):
        copy()
        arrived, seen = _event(), _event()
        arrived.record(stream)
        idle.wait_event(arrived)
        seen.record(idle)
        stream.wait_event(seen)


def copies_of(nbytes: int) -> dict[str, Copy]:
    """By direction, a copy of so many bytes on the current stream."""
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    return {
        "to the GPU": partial(device.copy_, host, non_blocking=True),
        "to the host": partial(host.copy_, device, non_blocking=True),
    }


def beside(large: Callable[[], None], small: Copy) -> tuple[float, list[float]]:
    """Seconds until the large copies have arrived, and those that each small one took meanwhile."""
    took: list[float] = []
    ended = False

    def ask() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            while not ended:
                start, end = time.perf_counter(), _event()
                small()
                end.record()
                end.synchronize()
                took.append(time.perf_counter() - start)
                time.sleep(EVERY)

    torch.cuda.synchronize()
    asking = Thread(target=ask)
    start = time.perf_counter()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        asking.start()
        large()
        torch.cuda.current_stream().synchronize()
    seconds = time.perf_counter() - start
    ended = True
    asking.join()
    return seconds, sorted(took)


def main() -> None:
    """Print a line for each way and direction."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=88, help="of a large copy")
    parser.add_argument("--copies", type=int, default=200)
    options = parser.parse_args()
    nbytes, count = options.mib << 20, options.copies
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    small = copies_of(SMALL)
    for direction, copy in copies_of(nbytes).items():
        ways = {
            "all at once": partial(queue, copy, count, count),
            f"{ACTIONS_AHEAD} at a time": partial(queue, copy, count, ACTIONS_AHEAD),
            "one at a time": partial(queue, copy, count, 1),
            "with a hop": partial(queue_with_hops, copy, count),
        }
        for way, large in ways.items():
            large()  # streams and events exist
            seconds, took = beside(large, small[direction])
            middle, latest = took[len(took) // 2] * 1e3, took[-1] * 1e3
            print(
                f"{direction}, {way}: {count * nbytes / seconds / 1e9:.1f} GB/s; {len(took)} small "
                f"copies in {middle:.2f} ms, the latest {latest:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
