"""What do products take beside gathers of parameters, by NCCL's kernels and by copy engines?

    python -m benchmarks.gathers_beside_products

Each GPU here multiplies matrices like those of Llama 3 70B's MLP (16,384 x 8,192 x 28,672, bf16) on
one stream, while another gathers a block's parameters (1.7 GB) from all GPUs; then likewise with
activations on their way to pinned host memory and back, and gathers alone. Printed by each rank:
the products' rate, and the median gather. Copies from peers go by torch between GPUs that a process
sees both, without waiting for anybody.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROWS, HIDDEN, MLP = 16384, 8192, 28672
LAYER = 856_000_000  # parameters of a block of Llama 3 70B
SECONDS = 1.5  # of each measurement


def options(**config: int) -> dist.ProcessGroupNCCL.Options:
    found = dist.ProcessGroupNCCL.Options()
    for name, value in config.items():
        setattr(found.config, name, value)
    return found


class Bench:
    """One rank's streams and buffers."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cuda", rank)
        self.x = torch.randn(ROWS, HIDDEN, device=self.device, dtype=torch.bfloat16)
        self.w = torch.randn(HIDDEN, MLP, device=self.device, dtype=torch.bfloat16)
        self.out = torch.empty(ROWS, MLP, device=self.device, dtype=torch.bfloat16)
        part = -(-LAYER // ranks)
        self.mine = torch.randn(part, device=self.device).bfloat16()
        self.whole = torch.empty(part * ranks, device=self.device, dtype=torch.bfloat16)
        self.there = [torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.here = [torch.empty(1 << 29, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self.streams = [torch.cuda.Stream(self.device, priority=p) for p in (0, -1, 0, 0)]

    def measure(self, name: str, gather, *, copies: bool, products: bool = True) -> None:
        compute, comm, out, into = self.streams
        made = {"products": 0, "gathers": 0}
        events = []
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        # Ahead by a fixed number of each, so that no queue is empty before the time is over.
        rounds = 12
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(compute):
            first.record()
        for _ in range(rounds):
            if products:
                with torch.cuda.stream(compute):
                    for _ in range(8):
                        torch.mm(self.x, self.w, out=self.out)
                        made["products"] += 1
            if gather is not None:
                with torch.cuda.stream(comm):
                    for _ in range(12):
                        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        a.record()
                        gather()
                        b.record()
                        events.append((a, b))
            if copies:
                for stream, (to, of) in zip(
                    (out, into),
                    ((self.there[0], self.here[0]), (self.here[1], self.there[1])),
                    strict=True,
                ):
                    with torch.cuda.stream(stream):
                        for _ in range(7):
                            to.copy_(of, non_blocking=True)
        with torch.cuda.stream(compute):
            last.record()
        torch.cuda.synchronize()
        took = first.elapsed_time(last) / 1e3
        each = sorted(a.elapsed_time(b) for a, b in events)
        rate = made["products"] * 2 * ROWS * HIDDEN * MLP / took / 1e12 if products else 0.0
        median = each[len(each) // 2] if each else 0.0
        print(
            f"rank {self.rank} {name:44s} products {rate:6.1f} TFLOP/s in {took:5.2f} s, "
            f"a gather {median:6.2f} ms, all {sum(each) / 1e3:5.2f} s, "
            f"{time.perf_counter() - start:.2f} s",
            flush=True,
        )
        dist.barrier()


def run(rank: int, ranks: int, meeting: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    bench = Bench(rank, ranks)
    everyone = list(range(ranks))
    if rank == 0:
        print(torch.__version__, torch.cuda.nccl.version(), torch.cuda.get_device_name())
    groups = {"kernels": dist.new_group(everyone, backend="nccl")}
    for most in (4, 8, 16):
        groups[f"kernels of {most} blocks"] = dist.new_group(
            everyone, backend="nccl", pg_options=options(max_ctas=most)
        )

    def by(group, whole: Tensor):
        return lambda: dist.all_gather_into_tensor(whole, bench.mine, group=group)

    for group in groups.values():
        by(group, bench.whole)()
    torch.mm(bench.x, bench.w, out=bench.out)
    for copies in (False, True):
        more = ", copies both ways" if copies else ""
        bench.measure("nothing beside" + more, None, copies=copies)
        for name, group in groups.items():
            bench.measure(name + more, by(group, bench.whole), copies=copies)
    for name, group in groups.items():
        bench.measure(name + ", no products", by(group, bench.whole), copies=False, products=False)
    try:
        engines = engine_gather(bench, everyone)
        engines()
        torch.cuda.synchronize()
        for copies in (False, True):
            more = ", copies both ways" if copies else ""
            bench.measure("copy engines by NCCL" + more, engines, copies=copies)
        bench.measure("copy engines by NCCL, no products", engines, copies=False, products=False)
    except RuntimeError as error:  # what this version of torch lacks is what is asked
        print(f"rank {rank} copy engines by NCCL: {type(error).__name__}: {error}", flush=True)
    dist.barrier()
    try:
        pull = peer_gather(bench)
        pull()
        torch.cuda.synchronize()
        for copies in (False, True):
            more = ", copies both ways" if copies else ""
            bench.measure("copies from peers" + more, pull, copies=copies)
        bench.measure("copies from peers, no products", pull, copies=False, products=False)
    except RuntimeError as error:
        print(f"rank {rank} copies from peers: {type(error).__name__}: {error}", flush=True)
    dist.barrier()


def engine_gather(bench: Bench, everyone: list[int]):
    """A gather that NCCL gives to copy engines: zero-CTA policy, a symmetric window."""
    nccl = dist.ProcessGroupNCCL
    policy = getattr(nccl, "NCCL_CTA_POLICY_ZERO", 2)
    group = dist.new_group(everyone, backend="nccl", pg_options=options(cta_policy=policy))
    dist.all_gather_into_tensor(bench.whole, bench.mine, group=group)  # connects
    backend = group._get_backend(bench.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        whole = torch.empty_like(bench.whole)
        mine = torch.empty_like(bench.mine).copy_(bench.mine)
    backend.register_mem_pool(pool, symm=True)
    bench.kept = pool
    return lambda: dist.all_gather_into_tensor(whole, mine, group=group)


def peer_gather(bench: Bench):
    """Each rank copies the others' parts itself, through memory of other processes (CUDA IPC)."""
    from torch.multiprocessing.reductions import reduce_tensor

    told: list = [None] * bench.ranks
    dist.all_gather_object(told, reduce_tensor(bench.mine))
    parts = [bench.mine if r == bench.rank else f(*a) for r, (f, a) in enumerate(told)]
    size = bench.mine.numel()

    def pull() -> None:
        for turn in range(1, bench.ranks):
            r = (bench.rank + turn) % bench.ranks
            bench.whole[r * size : (r + 1) * size].copy_(parts[r], non_blocking=True)

    return pull


if __name__ == "__main__":
    ranks = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (ranks, str(Path(folder) / "meeting")), nprocs=ranks)
