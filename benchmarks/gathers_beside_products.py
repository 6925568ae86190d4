"""What do products take beside gathers of parameters, by NCCL's kernels and by copy engines?

    python -m benchmarks.gathers_beside_products [alone]

Each GPU here multiplies matrices like those of Llama 3 70B's MLP (16,384 x 8,192 x 28,672, bf16) on
one stream, while another gathers a block's parameters (1.7 GB) from all GPUs: by a communicator as
usual, by one held to few blocks, and as in bigplan/runtime/parallel/copy_engines, with a rank's own
part in its place, and copied there first. Printed: the products' seconds, the median gather beside
them, and alone. `alone`: each process sees its own GPU only, as Ray has it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.runtime.parallel.copy_engines import NO_BLOCKS
from bigplan.runtime.parallel.group import CopyEngines

ROWS, HIDDEN, MLP = 16384, 8192, 28672
LAYER = 856_000_000  # parameters of a block of Llama 3 70B
PRODUCTS, GATHERS = 40, 12
Gather = Callable[[], object]


class Bench:
    """One rank's streams and products."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cuda", 0)
        bf16 = {"device": self.device, "dtype": torch.bfloat16}
        self.x, self.w = torch.randn(ROWS, HIDDEN, **bf16), torch.randn(HIDDEN, MLP, **bf16)
        self.product = torch.empty(ROWS, MLP, **bf16)
        self.compute, self.beside = (torch.cuda.Stream(self.device) for _ in range(2))

    def measure(self, name: str, gather: Gather | None) -> None:
        """Beside products, and alone."""
        took, beside = self._run(PRODUCTS, gather)
        alone = self._run(0, gather)[1]
        if self.rank == 0:
            print(
                f"{name:44s} {PRODUCTS} products {took:6.1f} ms"
                + (f", a gather {beside:6.2f} ms, alone {alone:5.2f}" if gather else ""),
                flush=True,
            )

    def _run(self, products: int, gather: Gather | None) -> tuple[float, float]:
        torch.cuda.synchronize()
        dist.barrier()
        times = []
        with torch.cuda.stream(self.compute):
            first = event()
            for _ in range(products):
                torch.mm(self.x, self.w, out=self.product)
            last = event()
        with torch.cuda.stream(self.beside):
            for _ in range(GATHERS if gather else 0):
                begin = event()
                gather()
                times.append((begin, event()))
        torch.cuda.synchronize()
        each = sorted(begin.elapsed_time(end) for begin, end in times)
        return first.elapsed_time(last), each[len(each) // 2] if each else 0.0


def event() -> torch.cuda.Event:
    """Recorded on the current stream."""
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made


def run(rank: int, ranks: int, told: str, alone: bool) -> None:
    """One process."""
    others = [] if alone else [each for each in range(ranks) if each != rank]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, (rank, *others)))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    meeting = Path(told) / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    bench = Bench(rank)
    part = -(-LAYER // ranks)
    mine = torch.randn(part, device=bench.device).bfloat16()
    if rank == 0:
        print(
            torch.__version__, torch.cuda.nccl.version(), torch.cuda.get_device_name(), flush=True
        )
    ways: dict[str, Gather | None] = {"nothing beside": None}
    for most in (0, 4, 8):
        options = dist.ProcessGroupNCCL.Options()
        if most:
            options.config.max_ctas = most
        group = dist.new_group(list(range(ranks)), backend="nccl", pg_options=options)
        whole = torch.empty(part * ranks, device=bench.device, dtype=torch.bfloat16)
        name = f"kernels of {most} blocks at most" if most else "kernels"
        ways[name] = by_kernels(whole, mine, group)
    engines = engines_of(ranks, part * ranks * 2, bench.device)
    whole = engines.memory.view(torch.bfloat16)
    own = whole[rank * part : (rank + 1) * part]
    ways["copy engines, the own part copied first"] = lambda: engines.gather(whole, own, mine)
    ways["copy engines, the own part in its place"] = lambda: engines.gather(whole, own, own)
    with torch.cuda.stream(bench.beside):
        for way in ways.values():
            if way is not None:
                way()
    torch.mm(bench.x, bench.w, out=bench.product)
    for name, way in ways.items():
        bench.measure(name, way)
    engines.close()
    dist.barrier()
    dist.destroy_process_group()


def by_kernels(whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Gather:
    """NCCL's usual way."""
    return lambda: dist.all_gather_into_tensor(whole, mine, group=group)


def engines_of(ranks: int, nbytes: int, device: torch.device) -> CopyEngines:
    """A communicator of all ranks, and so much memory that it maps."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = NO_BLOCKS
    group = dist.new_group(list(range(ranks)), backend="nccl", pg_options=options)
    backend = group._get_backend(device)
    backend.eager_connect_single_device(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool, device):
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    engines = CopyEngines(group, pool, memory)
    engines.register()
    return engines


if __name__ == "__main__":
    count = torch.cuda.device_count()  # asks the driver's library, so that no context is made
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(run, (count, place, "alone" in sys.argv), nprocs=count)
