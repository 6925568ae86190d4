"""One rank of a run: checks the machine, allocates, initialises, steps, finishes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.graph.build import build_graph
from bigplan.lower import lower_stage
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime import blocks
from bigplan.runtime.compute import Compute
from bigplan.runtime.context import Context, layer_rows
from bigplan.runtime.data import BatchSource, Prefetcher, bundled_text
from bigplan.runtime.executor import Executor
from bigplan.runtime.memory import Memory, check_machine, static_sizes
from bigplan.runtime.moves import mean_loss
from bigplan.runtime.pieces import Box
from bigplan.runtime.result import Finished, StepResult
from bigplan.runtime.slab import aligned_empty
from bigplan.runtime.update import Update
from bigplan.spec.model import Parameter

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
DIGEST_LIMIT = 100_000_000  # parameters: hashing more would take longer than a step


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a started worker consists of."""

    context: Context
    compute: Compute
    update: Update
    executor: Executor
    batches: Prefetcher

    def close(self) -> None:
        """Stop the lanes before the memory that they work on goes."""
        self.executor.close()
        self.batches.close()
        self.context.memory.close()


class Worker:
    """The runtime of one rank. Call preflight, start, step as often as wanted, finish, close."""

    def __init__(
        self, plan: Plan, rank: int, world: int, scratch: Path, *, poison: bool = False
    ) -> None:
        self._plan, self._rank, self._world = plan, rank, world
        self._scratch = scratch
        self._poison = poison
        self._graph = build_graph(plan.model, plan.training, plan.strategy)
        self._program = lower_stage(self._graph, plan.placement, stage=0)
        gpu = plan.cluster.group.gpu
        self._device = torch.device(gpu.device, 0) if gpu.device == "cuda" else torch.device("cpu")
        self._steps = 0
        self._parts: _Parts | None = None

    def preflight(self) -> None:
        """Raise PreflightError where this machine has less than the plan promises."""
        ranks = min(self._world, self._plan.cluster.group.gpus_per_node)
        self._scratch.mkdir(parents=True, exist_ok=True)
        sizes = static_sizes(self._program)
        # Hidden states, saved activations and workspace are torch's to allocate, but promised too.
        promised = max(sizes.device, self._program.bytes_by_tier()[Tier.GPU])
        check_machine(replace(sizes, device=promised), self._device, self._scratch, ranks)

    def start(self, init_method: str) -> None:
        """Join the other ranks, allocate everything, fill in the first weights."""
        plan, source = self._plan, self._source()  # a text too short fails before memory is taken
        if self._device.type == "cuda":
            self._limit_gpu()
        if self._world > 1:
            self._join(init_method)
        memory = Memory(
            self._program, self._device, self._scratch / f"bigplan-rank{self._rank}.bin"
        )
        if self._poison:
            memory.poison_all()
        rows = layer_rows(self._graph, self._program)
        context = Context(
            plan.model, plan.training, self._graph, self._program, memory, rows, self._world
        )
        batches = Prefetcher(source, pinned=self._device.type == "cuda")
        compute, update = Compute(context, batches), Update(context)
        executor = Executor(context, compute, update, poison=self._poison)
        self._parts = _Parts(context, compute, update, executor, batches)
        self._initialise(context)

    def _join(self, init_method: str) -> None:
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=self._rank,
            world_size=self._world,
            timeout=COLLECTIVE_TIMEOUT,
        )
        # Create the communicator, and NCCL's buffers, before the arena takes its memory.
        dist.all_reduce(torch.zeros(1, device=self._device))

    def _limit_gpu(self) -> None:
        """Hold torch to the plan's GPU memory, so that a broken promise fails and is seen."""
        torch.cuda.set_device(self._device)
        gpu = self._plan.cluster.group.gpu
        _, total = torch.cuda.mem_get_info(self._device)
        allowed = min(1.0, (gpu.memory - gpu.context_memory) / total)
        torch.cuda.set_per_process_memory_fraction(allowed, self._device)

    def _source(self) -> BatchSource:
        training, strategy = self._plan.training, self._plan.strategy
        path = bundled_text() if training.data == "bundled" else Path(training.data)
        return BatchSource(
            path,
            training.sequence_length,
            strategy.micro_batch,
            self._rank,
            self._world,
            training.seed,
            training.global_batch,
        )

    def _initialise(self, context: Context) -> None:
        """First weights and empty moments at the home of every layer."""
        for layer in self._program.layers:
            kind, parameters = self._graph.layers[layer], context.parameters(layer)
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # a generator uses one thread
                values = pool.map(partial(self._first_values, kind, layer), parameters)
                whole = torch.cat(list(values))
            store(context, f"w{layer}", 0, whole.to(context.parameter_dtype))
            pieces = [
                ((f"o{layer}.{t}", 0), context.rows[layer].pieces[t]) for t in (Tier.GPU, Tier.HOST)
            ]
            chunks = context.rows[layer].chunks
            pieces += [((f"o{layer}.{Tier.NVME}", i), boxes) for i, boxes in enumerate(chunks)]
            for (name, entry), boxes in pieces:
                if boxes:
                    store(context, name, entry, _first_state(context, boxes, whole))

    def _first_values(self, kind: str, layer: int, parameter: Parameter) -> Tensor:
        return blocks.initial_values(kind, layer, parameter, self._plan.training.seed).flatten()

    def step(self) -> StepResult:
        """One optimizer step."""
        parts = self._running()
        compute, update = parts.compute, parts.update
        compute.step = self._steps
        clipped = self._graph.clipped
        # A deferred update belongs to the step before; the first step has none.
        update.step = self._steps if clipped else self._steps + 1
        start = time.perf_counter()
        timeline = parts.executor.play(self._program.step if self._steps else self._program.first)
        seconds = time.perf_counter() - start
        loss = mean_loss(compute.losses, self._world)
        compute.losses.clear()
        self._steps += 1
        return StepResult(self._steps, loss, seconds, timeline)

    def finish(self) -> Finished:
        """Apply what is pending; report memory and, for small models, a digest of the weights."""
        parts = self._running()
        if self._graph.clipped and self._steps:
            parts.update.step = self._steps
            parts.executor.play(self._program.flush)
        digest = ""
        if self._plan.model.parameter_count <= DIGEST_LIMIT:
            total = hashlib.sha256()
            for _, weights in self.weights():
                total.update(weights.contiguous().view(torch.uint8).numpy().data)
            digest = total.hexdigest()
        return Finished(self._measured_memory(parts.context.memory), self._notes(), digest)

    def weights(self) -> Iterator[tuple[int, Tensor]]:
        """Every layer's flat parameters, on the CPU, in layer order."""
        context = self._running().context
        dtype = context.parameter_dtype
        for layer in self._program.layers:
            nbytes = context.kind(layer).parameters * dtype.itemsize
            yield layer, load(context, f"w{layer}", 0)[:nbytes].view(dtype)

    def _notes(self) -> tuple[str, ...]:
        if self._device.type == "cuda":
            return ()
        return (
            "measured GPU memory is the arena of this CPU device; hidden states, saved "
            "activations and workspace, which the promise includes, are not measured here",
        )

    def _measured_memory(self, memory: Memory) -> dict[str, int]:
        device = memory.arena.used
        if self._device.type == "cuda":
            device = torch.cuda.max_memory_allocated(self._device)
        disk = memory.disk.size if memory.disk else 0
        return {Tier.GPU: device, Tier.HOST: memory.slab.used, Tier.NVME: disk}

    def _running(self) -> _Parts:
        assert self._parts is not None, "start() comes first"
        return self._parts

    def close(self) -> None:
        """Stop the lanes, give memory back, leave the group. May be called at any time."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None
        if self._world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _first_state(context: Context, boxes: Sequence[Box], whole: Tensor) -> Tensor:
    """Empty moments and, where the state has a master copy, the rows' first values."""
    elements = sum(box.count for box in boxes)
    parts = 3 if context.graph.sizes.master else 2
    state = torch.zeros(parts, elements)
    if parts == 3:
        for box in boxes:
            state[2][box.in_piece] = whole[box.in_layer]
    return state.flatten()


def store(context: Context, name: str, entry: int, values: Tensor) -> None:
    """Put values at a buffer's home, whichever tier it is on."""
    source = values.contiguous().view(-1).view(torch.uint8)
    key = (name, entry)
    if context.memory.on_disk(key):
        pages = aligned_empty(-(-source.numel() // 4096) * 4096)
        pages[: source.numel()].copy_(source)
        context.memory.write(key, pages)
    else:
        context.memory.place(key)[: source.numel()].copy_(source)


def load(context: Context, name: str, entry: int) -> Tensor:
    """A buffer's bytes in host memory, padding included."""
    key = (name, entry)
    if context.memory.on_disk(key):
        pages = aligned_empty(-(-context.memory.buffers[name].nbytes // 4096) * 4096)
        context.memory.read(key, pages)
        return pages
    return context.memory.place(key).cpu()
