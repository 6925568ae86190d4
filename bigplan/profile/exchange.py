"""What a peer does when collectives are measured: exchanges, and work beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.profile.fit import Exchange
from bigplan.profile.load import event
from bigplan.profile.peers import Company, Peer

GPU_PRODUCT, CPU_PRODUCT = 8192, 512  # rows and columns: 2 ms on an H200, 3 ms on a core
COPIED = 64 * 2**20  # bytes each way

Work = Callable[[], object]


class Beside(NamedTuple):
    """Seconds of exchanges, and runs a second of the work beside them."""

    exchange: float
    work: float


def form_groups(peer: Peer, sizes: tuple[int, ...]) -> None:
    """Form the communicators: one of each size, of the peers from rank 0 on."""
    for size in sizes:
        group = dist.new_group(list(range(size)))  # all peers call it, also those outside
        if peer.rank < size:
            assert isinstance(group, dist.ProcessGroup)
            peer.groups[size] = group


def timed(peer: Peer, exchange: Exchange, runs: int) -> float:
    """Seconds of `runs` exchanges, one after the other; 0 for a peer that takes no part."""
    if peer.rank >= exchange.ranks:
        return 0.0
    once = _exchanging(peer, exchange)
    once()  # lines the peers up, and makes the communicator on its first use
    peer.wait()
    start = time.perf_counter()
    for _ in range(runs):
        once()
    peer.wait()
    return time.perf_counter() - start


def multiplied(peer: Peer, products: int, exchange: Exchange, exchanges: int) -> Beside:
    """Queue all products of a GPU at once, and exchanges beside them; seconds of one of these.

    The GPU has the next product when one ends, as in training. `exchanges` go on on another stream
    and should last longer than the products; those that end before the last product count. 0:
    there are none, and they take no seconds.
    """
    multiply, once = _product(peer), _exchanging(peer, exchange)
    work, beside = (torch.cuda.Stream(peer.device) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(work):
        multiply()  # loads the kernel and takes its workspace
    once()  # lines the peers up
    peer.wait()
    begin = _queued(multiply, 0, work)
    end = _queued(multiply, products, work)
    ends = [_queued(once, 1, beside) for _ in range(exchanges)]
    peer.wait()
    whole, *each = (begin.elapsed_time(one) / 1e3 for one in (end, *ends))
    counted = max(1, sum(seconds <= whole for seconds in each))
    return Beside(each[counted - 1] / counted if each else 0.0, products / whole)


def _queued(work: Work, runs: int, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Queue the work so many times; the event follows the last."""
    with torch.cuda.stream(stream):
        for _ in range(runs):
            work()
        mark = event()
        mark.record()
    return mark


def _exchanging(peer: Peer, exchange: Exchange) -> Work:
    """A function that exchanges once; it sends zeros, whose sums stay small."""
    traffic, ranks, nbytes = exchange
    elements = max(1, nbytes // 4 // ranks)
    whole = torch.zeros(elements * ranks, device=peer.device)
    part = torch.zeros(elements, device=peer.device)
    group = peer.groups[ranks]
    if traffic == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if traffic == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if traffic == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if peer.rank == 0:
        return lambda: dist.send(whole, 1, group=group)
    return lambda: dist.recv(whole, 0, group=group)


def multiplying(peer: Peer) -> Work:
    """A product as in training, which a GPU has on a stream of its own and is waited for."""
    return _on_stream(peer, _product(peer))


def _product(peer: Peer) -> Callable[[], Tensor]:
    """A product as in training, in its precision; a GPU has it on the current stream."""
    cuda = peer.device.type == "cuda"
    size = GPU_PRODUCT if cuda else CPU_PRODUCT
    dtype = torch.bfloat16 if cuda else torch.float32
    a, b, c = (torch.zeros(size, size, dtype=dtype, device=peer.device) for _ in range(3))
    for tensor in (a, b):
        tensor.normal_()  # a GPU multiplies zeros faster
    return lambda: torch.mm(a, b, out=c)


def copying(peer: Peer) -> Work:
    """Copies between page-locked memory and the GPU, both ways at the same time."""
    ways = []
    for _ in range(2):
        host = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=peer.device.type == "cuda")
        ways.append((host, torch.zeros(COPIED, dtype=torch.uint8, device=peer.device)))
    (into, there), (back, off) = ways
    one = _on_stream(peer, lambda: there.copy_(into, non_blocking=True), wait=False)
    other = _on_stream(peer, lambda: back.copy_(off, non_blocking=True))

    def both() -> None:
        one()
        other()

    return both


def _on_stream(peer: Peer, work: Callable[[], Tensor], *, wait: bool = True) -> Work:
    """The work; on CUDA, on its own stream and, with `wait`, followed by a wait for its end."""
    if peer.device.type != "cuda":
        return work
    stream = torch.cuda.Stream(peer.device)  # type: ignore[no-untyped-call]

    def once() -> None:
        with torch.cuda.stream(stream):
            work()
        if wait:
            stream.synchronize()

    return once


def begin(peer: Peer, make: Callable[[Peer], Work]) -> None:
    """Start work in a thread that goes on until `end`."""
    assert peer.company is None, "one at a time"
    peer.company = Company(make(peer), peer.threads)


def end(peer: Peer) -> None:
    """Stop what `begin` began."""
    assert peer.company is not None, "begin comes first"
    peer.company.stop()
    peer.company = None


def rate_of_company(peer: Peer, seconds: float) -> float:
    """Runs a second of the work begun, without exchanges beside it."""
    return _counted(peer, lambda: time.sleep(seconds))


def timed_beside(peer: Peer, exchange: Exchange, runs: int) -> Beside:
    """Time `runs` exchanges while the work goes on."""
    took = 0.0

    def exchanging() -> None:
        nonlocal took
        took = timed(peer, exchange, runs)

    rate = _counted(peer, exchanging)
    return Beside(took, rate)


def _counted(peer: Peer, meanwhile: Callable[[], None]) -> float:
    """Runs a second: at least one is waited for, which a busy machine may take long to come to."""
    assert peer.company is not None, "begin comes first"
    before, start = peer.company.runs, time.perf_counter()
    meanwhile()
    runs = peer.company.beyond(before) - before
    return runs / (time.perf_counter() - start)
