"""What a GPU has and what is taken before training starts: by others, and by the CUDA context."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

from bigplan.profile.bench import Bench, source
from bigplan.spec.cluster import NodeGroup
from bigplan.units import format_bytes

MiB = 2**20
BUSY_MEMORY = 0.01  # share of a GPU's memory that others hold: above it the GPU is in use
BUSY_SHARE = 10  # percent of the time in which others' kernels run, likewise


@dataclass(frozen=True, slots=True)
class Use:
    """A GPU before this process touched it: bytes taken, percent of time busy; None: not known."""

    nbytes: int | None = None
    percent: int | None = None


def gpu_uses() -> dict[str, Use]:
    """What nvidia-smi says of every GPU, by `uuid_of`; nothing where it is absent or fails."""
    query = "--query-gpu=uuid,memory.used,utilization.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_uses(done.stdout)


def parse_uses(listing: str) -> dict[str, Use]:
    """Lines such as 'GPU-1b2c..., 523, 12'; '[N/A]' means not known."""
    uses = {}
    for line in listing.splitlines():
        uuid, *cells = (cell.strip() for cell in line.split(","))
        if len(cells) == 2:
            used, percent = (int(cell) if cell.isdigit() else None for cell in cells)
            uses[uuid.removeprefix("GPU-")] = Use(None if used is None else used * MiB, percent)
    return uses


def busy(device: torch.device, use: Use, total: int) -> str | None:
    """A warning where another process works on the GPU; None where none does."""
    signs = []
    if use.nbytes is not None and use.nbytes > BUSY_MEMORY * total:
        signs.append(f"{format_bytes(use.nbytes)} of its memory are taken")
    if use.percent is not None and use.percent > BUSY_SHARE:
        signs.append(f"kernels run {use.percent}% of the time")
    if not signs:
        return None
    return (
        f"{device} is in use ({' and '.join(signs)}): rates will be too low and vary; stop what "
        "runs there and measure again"
    )


def measure_memory(group: NodeGroup, bench: Bench, before: Use) -> NodeGroup:
    """Measure memory, context_memory, multiprocessors; called last, with all kernels loaded.

    The context's memory is neither free, nor torch's, nor was it taken before.
    """
    if not bench.cuda:
        return group
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(bench.device)
    others = before.nbytes or 0
    context = total - free - torch.cuda.memory_reserved(bench.device) - others
    how = "in use after all probes, less torch's own"
    how += " and what was taken before" if before.nbytes is not None else "; others' not known"
    values = {
        "memory": total,
        "context_memory": context,
        "multiprocessors": torch.cuda.get_device_properties(bench.device).multi_processor_count,
    }
    sources = {
        "memory": source("the driver's total"),
        "context_memory": source(how),
        "multiprocessors": source("the driver's"),
    }
    if context <= 0:  # the context existed before, so it counts as taken
        del values["context_memory"], sources["context_memory"]
    return group.model_copy(update={"gpu": group.gpu.replaced(values, sources)})
