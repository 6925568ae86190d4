"""Gathers by copy engines: communicators of NCCL that run no kernel for them.

A kernel of a gather takes multiprocessors from products, and waits for some where products hold
all. Beside products of Llama 3 70B two H200s gathered a layer in 12.1 ms by kernels, 4.3 without
products, which took 8% longer. Copy engines take 2.2 ms either way, and products 0 to 4% longer
(benchmarks/results/2026-11-30-h200-x2-engines).

NCCL has engines copy between GPUs of one machine if a communicator asks for no blocks of kernels,
every rank's part is in its place already, and the memory is registered with the communicator, at
one place on all ranks ("Copy Engine Collectives", https://docs.pytorch.org/docs/stable/
distributed.html). The GPUs must be seen by each process: what a process does not see, the driver
takes for memory of its own GPU, and copies by kernels. Sums keep a communicator of their own: with
this one's policy a reduce-scatter took 1.7 times as long.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.ranks import GroupName, members
from bigplan.runtime.parallel.group import CopyEngines, RankGroup
from bigplan.runtime.parallel.groups import COLLECTIVE_TIMEOUT, Groups, ranks_of_all

FIRST_NCCL: Final = (2, 28)  # whose collectives can run by copy engines
NO_BLOCKS: Final = 2  # NCCL_CTA_POLICY_ZERO
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")  # one for each start of a machine


@dataclass(frozen=True, slots=True)
class GatherCommunicators:
    """This rank's communicators for gathers, by the field of Groups whose ranks they connect."""

    made: Mapping[str, dist.ProcessGroup]
    pool: torch.cuda.MemPool | None = None  # of memory that they can map; None without one

    def carry(self, groups: Groups, memory: Tensor) -> Groups:
        """The groups, with these for what lies in `memory` (uint8 [n] of the pool).

        All ranks call it. Where one cannot map the memory, or gets wrong values, all groups stay as
        they are.
        """
        if self.pool is None:
            return groups
        found = {}
        for name, made in self.made.items():
            engines = CopyEngines(made, self.pool, memory)
            found[name] = replace(getattr(groups, name), copy_engines=engines)
        gathered = [_gathers(group) for group in found.values()]  # all, whatever becomes of one
        if groups.all_true(all(gathered)):
            return replace(groups, **found)
        for group in found.values():
            with suppress(RuntimeError):  # what was never mapped
                group.copy_engines.close()
        return groups


def copy_engines_between(groups: Groups, device: torch.device, layout: str) -> GatherCommunicators:
    """Communicators where all ranks of a group that gathers parameters see each other's GPUs.

    All ranks call it. `layout`: of the memory in which they gather, equal where they can.
    """
    strategy = groups.strategy
    if strategy.zero == 0 or groups.shard.size == 1 or groups.shard.is_gloo:
        return GatherCommunicators({})
    texts = groups.texts_of_all(_alike(device, layout).encode())
    named = {"shard": GroupName.SHARD if strategy.zero_group else GroupName.DATA}
    if groups.expert_data.size > 1:
        named["expert_data"] = GroupName.EXPERT_DATA
    made = {}
    for name, kind in named.items():  # every rank makes the same groups, in one order
        every = ranks_of_all(kind, strategy)
        if all(texts[rank] == texts[ranks[0]] != b"" for ranks in every for rank in ranks):
            own = members(kind, groups.at, strategy)
            made[name] = {ranks: _communicator(ranks) for ranks in every}[own]
    if not made:
        return GatherCommunicators({})
    for group in made.values():
        # Without channels, which the first collective by kernels would connect.
        group._get_backend(device).eager_connect_single_device(device)
    allocator = next(iter(made.values()))._get_backend(device).mem_allocator
    return GatherCommunicators(made, torch.cuda.MemPool(allocator))


def _alike(device: torch.device, layout: str) -> str:
    """What is equal on ranks whose memory engines can gather; "" where they cannot."""
    if device.type != "cuda" or why_no_copy_engines(device):
        return ""
    digest = hashlib.sha256(layout.encode()).hexdigest()
    return f"{socket.gethostname()} {BOOT.read_text().strip()} {digest}"


def why_no_copy_engines(device: torch.device) -> str:
    """What keeps copy engines from gathering on this CUDA device; "" where nothing does."""
    if torch.version.cuda is None or not dist.is_nccl_available():
        return "this torch has no NCCL"
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < FIRST_NCCL or not hasattr(dist.ProcessGroupNCCL.Options().config, "cta_policy"):
        return f"NCCL is {'.'.join(map(str, version))} with torch {torch.__version__}"
    others = set(range(torch.cuda.device_count())) - {device.index}
    if not others:
        return "a rank sees no GPU but its own"
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "its GPUs cannot write to each other's memory"
    return ""


def _communicator(ranks: Sequence[int]) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = NO_BLOCKS  # type: ignore[attr-defined]
    options._timeout = COLLECTIVE_TIMEOUT
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=COLLECTIVE_TIMEOUT, backend="nccl", pg_options=options
    )
    return made


def _gathers(group: RankGroup) -> bool:
    """Map the memory, and gather every rank's place in its first bytes: whether that goes well."""
    engines = group.copy_engines
    assert engines is not None, "it was made for this"
    stream = torch.cuda.Stream(engines.memory.device)  # type: ignore[no-untyped-call]
    values = engines.memory[: 4 * group.size].view(torch.int32)
    own = group.own(values)
    try:
        engines.register()
        with torch.cuda.stream(stream):
            engines.gather(values, own, torch.full_like(own, group.place))
            return values.tolist() == list(range(group.size))
    except RuntimeError:  # of NCCL, or of CUDA below it
        return False
