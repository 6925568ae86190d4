"""What the GPUs of one machine take from each other, beyond what `bigplan profile` measures.

    python -m benchmarks.hosts_rates copies       copies both ways on 1, 2, 4, ... GPUs at once
    python -m benchmarks.hosts_rates updates      AdamW on the CPU by 1, 2, 4, ... processes at once
    python -m benchmarks.hosts_rates waits        products beside a receive or gather that waits
    python -m benchmarks.hosts_rates soak SECONDS three communicators, four threads: does it end?

A process for each GPU, or --cpu-devices N of a CPU over gloo, to see that it runs. `waits` starts
the processes anew for each NCCL_MAX_CTAS of 1, 2, 4 and 8, and CUDA_DEVICE_MAX_CONNECTIONS of 8 and
32: a transfer that waits for its other side holds that many of a GPU's multiprocessors. `soak` sums
and gathers over all GPUs in one thread, sends and receives down and up a chain in two more, and
multiplies in a fourth, as the lanes of a rank do; who waits for 120 s for the others has hung.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.profile.collectives import group_sizes
from bigplan.profile.exchange import COPIED, begin, copying, end, multiplying, rate_of_company
from bigplan.profile.host import ADAM_BYTES, adam
from bigplan.profile.peers import Peer, Peers
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.memory.slab import Slab
from bigplan.spec.detect.machine import available_cores

CTAS, CONNECTIONS = (1, 2, 4, 8), (8, 32)
WAIT = 1.0  # seconds for which a transfer waits
UPDATED = 2**26  # parameters of each process: 1.1 GiB
MESSAGE = 2**22  # elements that go down and up the chain, 16 MiB
ROUND = 100  # of the soak, between two looks at the clock
SOAKED = 3  # communicators


def counts(world: int) -> list[int]:
    """Of processes that work at once."""
    return [1, *group_sizes(world)]


def copies(peers: Peers) -> None:
    """Bytes a second each way, of each GPU, by how many copy at once."""
    for number in counts(len(peers)):
        ranks = range(number)
        peers.call_some(ranks, begin, copying)
        peers.call_some(ranks, rate_of_company, 0.5)  # until all are at it
        rates = [COPIED * runs / 1e9 for runs in peers.call_some(ranks, rate_of_company, 2.0)]
        peers.call_some(ranks, end)
        each = " ".join(f"{rate:.1f}" for rate in rates)
        print(f"copies both ways, {number} at once: {each} GB/s each way", flush=True)


def updated(peer: Peer, elements: int, seconds: float) -> float:
    """Parameters a second that this process updates meanwhile."""
    torch.set_num_threads(peer.threads)
    slab = Slab(ADAM_BYTES * elements, pinned=peer.device.type == "cuda")
    try:
        with Cores() as cores:
            step = adam(slab.take(ADAM_BYTES * elements), cores)
            step()
            runs, start = 0, time.perf_counter()
            while time.perf_counter() < start + seconds:
                step()
                runs += 1
            return runs * elements / (time.perf_counter() - start)
    finally:
        slab.close()


def updates(peers: Peers, elements: int) -> None:
    """Parameters a second of each process, with its part of the cores."""
    for number in counts(len(peers)):
        rates = [rate / 1e9 for rate in peers.call_some(range(number), updated, elements, 3.0)]
        each = " ".join(f"{rate:.2f}" for rate in rates)
        print(f"AdamW, {number} processes at once: {each}, {sum(rates):.2f} G/s", flush=True)


def products_beside(peer: Peer, kind: str, wait: float) -> float:
    """Products a second of the first process while a transfer waits for the last one's side."""
    last, values = peer.world - 1, torch.zeros(MESSAGE, device=peer.device)
    if peer.rank == last:
        time.sleep(wait)
    if kind == "receive" and peer.rank not in (0, last):
        return 0.0
    work = _transfer(peer, kind, values)
    rate = 0.0
    if peer.rank == 0 and wait and peer.company is not None:
        before, start = peer.company.runs, time.perf_counter()
        time.sleep(0.8 * wait)
        rate = (peer.company.runs - before) / (time.perf_counter() - start)
    work.wait()
    peer.wait()
    return rate


def _transfer(peer: Peer, kind: str, values: Tensor) -> dist.Work:
    """What the first and the last process, or all, do together."""
    if kind == "gather":
        whole = torch.zeros(MESSAGE * peer.world, device=peer.device)
        found = dist.all_gather_into_tensor(whole, values, async_op=True)
    elif peer.rank == 0:
        found = dist.irecv(values, peer.world - 1)
    else:
        found = dist.isend(values, 0)
    assert isinstance(found, dist.Work)
    return found


def waits(start: Callable[[], Peers], settings: list[tuple[int, int]]) -> None:
    """What is left of products beside each kind of transfer, by the settings of NCCL and CUDA."""
    for ctas, connections in settings:
        os.environ["NCCL_MAX_CTAS"] = str(ctas)
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
        with start() as peers:
            for kind in ("receive", "gather"):
                peers.call(products_beside, kind, 0.0)  # communicators are made on their first use
            peers.call_some((0,), begin, multiplying)
            alone = peers.call_some((0,), rate_of_company, 2 * WAIT)[0]
            told = []
            for kind in ("receive", "gather"):
                rates = [peers.call(products_beside, kind, WAIT)[0] for _ in range(3)]
                told.append(f"{kind} {sorted(rates)[1] / alone:.1%}")
            peers.call_some((0,), end)
        where = f"{ctas} CTAs, {connections} connections"
        print(f"{where}: {alone:.1f} products/s; beside a waiting {', '.join(told)}", flush=True)


def form_three(peer: Peer) -> None:
    """Communicators of all: for sums, down the chain, up the chain."""
    for number in range(SOAKED):
        group = dist.new_group(list(range(peer.world)))
        assert isinstance(group, dist.ProcessGroup)
        peer.groups[number] = group


def soak_round(peer: Peer, rounds: int) -> float:
    """So many rounds by four threads; how many sums and messages arrived right."""
    right = [0.0] * 4
    threads = [
        threading.Thread(target=_soaking, args=(peer, work, rounds, right, place), daemon=True)
        for place, work in enumerate((_sums, _sends, _receives, _products))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peer.wait()
    return sum(right)


def _soaking(
    peer: Peer,
    work: Callable[[Peer, int], int],
    rounds: int,
    right: list[float],
    place: int,
) -> None:
    with _on_stream(peer):
        right[place] = sum(work(peer, number) for number in range(rounds))


@contextmanager
def _on_stream(peer: Peer) -> Iterator[None]:
    if peer.device.type != "cuda":
        yield
        return
    torch.cuda.set_device(peer.device)
    with torch.cuda.stream(torch.cuda.Stream(peer.device)):  # type: ignore[no-untyped-call]
        yield


def _sums(peer: Peer, number: int) -> int:
    values = torch.full((MESSAGE // 4,), float(number + peer.rank), device=peer.device)
    whole = torch.empty(values.numel() * peer.world, device=peer.device)
    dist.all_reduce(values, group=peer.groups[0])
    dist.all_gather_into_tensor(whole, values, group=peer.groups[0])
    expected = sum(number + rank for rank in range(peer.world))
    return int(bool((whole == expected).all()))


def _sends(peer: Peer, number: int) -> int:
    values = torch.full((MESSAGE,), float(number), device=peer.device)
    if peer.rank < peer.world - 1:
        dist.send(values, peer.rank + 1, group=peer.groups[1])
    if peer.rank > 0:
        dist.send(values, peer.rank - 1, group=peer.groups[2])
    return 0


def _receives(peer: Peer, number: int) -> int:
    right = 0
    if peer.rank > 0:
        right += _received(peer, number, peer.rank - 1, peer.groups[1])
    if peer.rank < peer.world - 1:
        right += _received(peer, number, peer.rank + 1, peer.groups[2])
    return right


def _received(peer: Peer, number: int, sender: int, group: dist.ProcessGroup) -> int:
    values = torch.empty(MESSAGE, device=peer.device)
    dist.recv(values, sender, group=group)
    return int(bool((values == number).all()))


def _products(peer: Peer, number: int) -> int:
    size = 4096 if peer.device.type == "cuda" else 64
    values = torch.ones(size, size, device=peer.device)
    torch.mm(values, values)
    return 0


def soak(peers: Peers, seconds: float, rounds: int) -> None:
    """Rounds until the time is over, and whether all that was sent arrived right."""
    peers.call(form_three)
    world, begun, done, wrong = len(peers), time.perf_counter(), 0, 0
    expected = rounds * (world + 2 * (world - 1))
    while time.perf_counter() < begun + seconds:
        wrong += expected - int(sum(peers.call(soak_round, rounds)))
        done += rounds
    took = time.perf_counter() - begun
    print(f"soak: {done} rounds of {world} processes in {took:.0f} s, {wrong} wrong, no hang")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["copies", "updates", "waits", "soak"])
    parser.add_argument("seconds", nargs="?", type=float, default=600.0, help="of the soak")
    parser.add_argument("--cpu-devices", type=int, default=0)
    args = parser.parse_args()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    small = bool(args.cpu_devices)
    if small:
        devices = [torch.device("cpu")] * args.cpu_devices
    if len(devices) < 2:
        parser.error(f"{len(devices)} GPUs take nothing from each other; use a machine with two")

    def start() -> Peers:
        return Peers(devices, max(1, available_cores() // len(devices)))

    if args.what == "waits":
        waits(start, [(1, 8)] if small else [(n, m) for n in CTAS for m in CONNECTIONS])
        return
    with start() as peers:
        match args.what:
            case "copies":
                copies(peers)
            case "updates":
                updates(peers, UPDATED // 64 if small else UPDATED)
            case _:
                soak(peers, args.seconds, 5 if small else ROUND)


if __name__ == "__main__":
    main()
