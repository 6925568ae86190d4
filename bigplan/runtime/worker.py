"""One rank of a run: checks the machine, allocates, initialises, steps, finishes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import Store

from bigplan.cost.price import memory_of_torch
from bigplan.cost.process import locked_bytes, process_bytes
from bigplan.errors import CheckpointError, PreflightError
from bigplan.lower import lower_stage
from bigplan.mechanics import SWITCH_SECONDS
from bigplan.placement import Tier
from bigplan.plan import Plan, as_replica, digest, graph_of
from bigplan.program import Instruction
from bigplan.ranks import Coordinates
from bigplan.runtime.checkpoint import Manifest, check_same, checkpoint_path, latest, restore
from bigplan.runtime.context import Context, layer_rows
from bigplan.runtime.data import BatchSource, Prefetcher
from bigplan.runtime.execution.background import Background
from bigplan.runtime.execution.compute import Compute
from bigplan.runtime.execution.executor import Executor
from bigplan.runtime.execution.forwards import Forwards, Part
from bigplan.runtime.execution.update import Update
from bigplan.runtime.execution.waiting import data_seconds
from bigplan.runtime.layers.preference import Scored
from bigplan.runtime.memory.buffers import Memory, check_machine, rounding, static_sizes
from bigplan.runtime.memory.host_memory import HostMemory
from bigplan.runtime.notes import notes_of
from bigplan.runtime.operators import has_triton
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.parallel.copy_engines import copy_engines_between
from bigplan.runtime.parallel.groups import Groups
from bigplan.runtime.result import Evaluated, Finished, PairData, Progress, StepResult
from bigplan.runtime.weights.digest import weights, weights_digest
from bigplan.runtime.weights.first_values import frozen_fingerprint, stored_values
from bigplan.runtime.weights.homes import fill_first
from bigplan.spec.lora import trained_count

DIGEST_LIMIT = 100_000_000  # trained parameters: hashing more would take longer than a step


@dataclass(frozen=True, slots=True)
class _RunningParts:
    """What a started worker consists of."""

    context: Context
    compute: Compute
    update: Update
    executor: Executor
    batches: Prefetcher
    background: Background
    forwards: Forwards

    def close(self) -> None:
        """Stop the lanes before the memory that they work on goes."""
        self.executor.close()
        self.update.close()
        self.background.close()
        self.batches.close()
        self.context.memory.close()


class NativeWorker:
    """The runtime of one rank. Call preflight, start, step as often as wanted, finish, close."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        scratch: Path,
        *,
        poison: bool = False,
        backend: str | None = None,
    ) -> None:
        """`backend`: of torch.distributed; NCCL on GPUs and gloo elsewhere if not told."""
        self._plan, self._rank, self._scratch = plan, rank, scratch
        self._at = Coordinates.of(rank, plan.strategy)
        self._poison = poison
        view = as_replica(plan, self._at.data // plan.strategy.cp)
        self._graph = graph_of(view)
        self._program = lower_stage(self._graph, plan.placement, self._at.stage)
        self._nodes = view.cluster.group
        gpu = self._nodes.gpu
        self._device = torch.device(gpu.device, 0) if gpu.device == "cuda" else torch.device("cpu")
        self._backend = backend or ("nccl" if gpu.device == "cuda" else "gloo")
        self._host = HostMemory()
        self._steps = 0
        self._data = self._frozen = ""  # fingerprints, once they are open
        self._pending = False  # updates that wait for the next step
        self._parts: _RunningParts | None = None

    def preflight(self) -> None:
        """Raise PreflightError where this machine has less than the plan promises.

        InputError where the data is not there, or not for this model.
        """
        BatchSource.of(self._plan, self._at.data)
        if (validation := self._plan.training.validation) is not None:
            BatchSource.of(self._plan, self._at.data, validation.data, validation.batches)
        generated = self._plan.training.kernels == "generated"
        if self._device.type == "cuda" and generated and not has_triton():
            raise PreflightError(
                "the plan counts on generated kernels, which need Triton, and none is installed; "
                "run: pip install 'bigplan[kernels]', or plan with --kernels torch"
            )
        ranks = self._ranks_here
        self._scratch.mkdir(parents=True, exist_ok=True)
        sizes = static_sizes(self._program)
        # torch allocates hidden states, saved activations and workspace; the plan promises them,
        # too.
        promised = max(sizes.device, self._program.bytes_by_tier()[Tier.GPU])
        sizes = replace(sizes, device=promised, host=sizes.host + self._beside(sizes.host))
        check_machine(sizes, self._device, self._scratch, ranks)

    @property
    def _ranks_here(self) -> int:
        """Ranks of this node."""
        return self._nodes.shared_by(self._plan.strategy.ranks).ranks

    def _beside(self, placed: int) -> int:
        """Host memory that this process will still take besides so many bytes."""
        taken = process_bytes(self._nodes, 1) - self._host.before
        return max(0, taken) + locked_bytes(self._nodes, placed)

    def start(
        self, meeting: Path | Store, resume: Path | None = None, apart: Apart | None = None
    ) -> int:
        """Join the other ranks, allocate everything, fill in the first weights; the steps done.

        `meeting`: a file that only this run's ranks may write, which need not exist, or a store
        that only they reach.
        `resume`: a checkpoint, or a folder of them, to go on from. Raises InputError where there
        is none or it is of another training, CheckpointError where it is damaged.
        `apart`: where the ranks' machines share no folder.
        """
        plan = self._plan
        source = BatchSource.of(plan, self._at.data)  # too short a text fails before memory goes
        self._data = source.data.fingerprint()
        self._frozen = frozen_fingerprint(plan.model, plan.training)
        if resume is None or self._graph.frozen:
            # And so do weights of another model.
            values = stored_values(plan.model, plan.training, resumed=resume is not None)
        if resume is not None:
            found = latest(resume, place=apart.place if apart else None)
            check_same(found, plan, self._data, self._frozen)
            self._steps = found.manifest.step
        sys.setswitchinterval(SWITCH_SECONDS)
        self._set_device()
        groups = self._joined(meeting, apart)
        self._parts = parts = self._allocated(groups, source)
        if resume is None:
            fill_first(parts.context, values)
        else:
            if self._graph.frozen:  # a checkpoint has adapters alone
                fill_first(parts.context, values, self._program.layers)
            restore(parts.context, found)
            parts.update.scaling.restore(found.manifest.state)
            parts.background.newest = found.path
        return self._steps

    def _allocated(self, groups: Groups, source: BatchSource) -> _RunningParts:
        """What runs the program, with all of its memory, which has no values yet."""
        plan, graph, program = self._plan, self._graph, self._program
        engines = copy_engines_between(groups, self._device, repr(program.buffers))
        file = self._scratch / f"bigplan-rank{self._rank}.bin"
        memory = Memory(program, self._device, file, engines.pool)
        groups = engines.carry(groups, memory.arena.buffer)
        if self._poison:
            memory.poison_all()
        rows = layer_rows(plan.model, graph, program, self._at, plan.training.lora)
        context = Context(plan.model, plan.training, graph, program, memory, rows, groups)
        batches = Prefetcher(source, self._steps)
        compute, update = Compute(context, batches), Update(context)
        executor = Executor(context, compute, update, poison=self._poison)
        background = Background(context, executor)
        forwards = Forwards(plan, self._at.data, context, compute, executor)
        return _RunningParts(context, compute, update, executor, batches, background, forwards)

    def _set_device(self) -> None:
        """Limit what torch takes of a GPU to the plan's share, and make it repeat its bits."""
        if self._device.type != "cuda":
            return
        plan = self._plan
        same_bits(wanted=plan.training.deterministic)
        locked = static_sizes(self._program).host
        gpu, lends = self._nodes.gpu, self._graph.lends_table
        muon = plan.training.optimizer.name == "muon"
        allowed = memory_of_torch(gpu, plan.strategy, locked, lends_table=lends, muon=muon)
        _limit_gpu(self._device, allowed)

    def _joined(self, meeting: Path | Store, apart: Apart | None) -> Groups:
        """The groups of this rank, once all ranks have met and each group has exchanged once."""
        strategy = self._plan.strategy
        if strategy.ranks == 1:
            return Groups.alone(strategy, apart)
        groups = Groups.join(
            self._rank,
            strategy,
            self._backend,
            meeting,
            lends_table=self._graph.lends_table,
            muon=self._plan.training.optimizer.name == "muon",
        )
        groups.warm(self._device)
        return replace(groups, apart=apart)

    def step(self, checkpoint: Path | None = None) -> StepResult:
        """One optimizer step, and beside it a checkpoint into the folder `checkpoint`.

        Updates that wait for the gradients' norm run in the step after, so the checkpoint is of
        the state after the step before; without clipping, of the state after this step. It may
        end in the next step; StepResult.saved says when, and whether it failed.
        """
        parts = self._running()
        compute, update = parts.compute, parts.update
        compute.begin(self._steps)
        compute.losses.scale = update.begin(self._steps + 1)
        start = time.perf_counter()
        timeline = parts.executor.play(self._instructions(checkpoint))
        seconds = time.perf_counter() - start
        loss, rewards = parts.forwards.taken()
        self._steps += 1
        self._pending = self._graph.deferred
        verdict = update.verdict
        assert verdict is not None, "CLIP passes one, and begin() does where nothing waits for it"
        return StepResult(
            self._steps,
            loss,
            seconds,
            timeline,
            learning_rate=verdict.learning_rate,
            gradient_norm=verdict.gradient_norm,
            loss_scale=verdict.loss_scale,
            skipped=verdict.skipped,
            not_finite=update.not_finite,
            saved=parts.background.ended(),
            data_seconds=data_seconds(timeline),
            memory=self._measured_memory(parts.context.memory),
            rewards=rewards,
            counted=compute.losses.counted,
        )

    def _instructions(self, checkpoint: Path | None) -> tuple[Instruction, ...]:
        """The step's program; one that writes a checkpoint is told where."""
        program, deferred = self._program, self._graph.deferred
        plain = program.step if self._pending else program.first
        if checkpoint is None:
            return plain
        self._begin(checkpoint, self._steps if deferred else self._steps + 1)
        if deferred and not self._pending:
            return (*program.save, *plain)
        return program.checkpoint

    def _begin(self, folder: Path, step: int) -> None:
        parts, plan = self._running(), self._plan
        manifest = Manifest(
            step=step,
            model=plan.model,
            training=plan.training,
            plan=digest(plan),
            data=self._data,
            frozen=self._frozen,
            state=parts.update.scaling.state(),
            files=(),
        )
        parts.background.begin(folder, manifest)

    def save(self, folder: Path) -> Path:
        """Apply what is pending and write a checkpoint; nothing else goes on. Its path.

        Training may go on after it as if nothing had been. Raises CheckpointError.
        """
        parts, path = self._running(), checkpoint_path(folder, self._steps)
        self._flush()
        parts.background.settle()
        if not parts.background.holds(path):
            self._begin(folder, self._steps)
            parts.executor.play(self._program.save)
            parts.background.settle()
            saved = parts.background.taken(path)
            if saved is not None and saved.error:
                raise CheckpointError(saved.message)
        return path

    def _flush(self) -> None:
        """Apply the updates that wait for the next step."""
        if self._pending:
            self._running().executor.play(self._program.flush)
            self._pending = False

    def evaluate(self) -> float:
        """The mean loss over the validation's batches. What is pending is applied first."""
        return self.evaluate_pairs().loss

    def evaluate_pairs(self) -> Evaluated:
        """The same, with rewards where pairs are learned from."""
        self._flush()
        return self._running().forwards.evaluate()

    def pair_data(self) -> dict[Part, PairData]:
        """See Forwards."""
        return self._running().forwards.pair_data()

    def score(self, part: Part, step: int) -> Scored:
        """See Forwards; before the first step, so that the weights are those of the start."""
        assert self._steps == 0, "these are not the weights that training started from"
        return self._running().forwards.score(part, step)

    def refer(self, references: Mapping[Part, NDArray[np.float64]]) -> None:
        """See Forwards."""
        self._running().forwards.refer(references)

    def finish(self) -> Finished:
        """Apply what is pending; report memory and, for small models, a digest of the weights."""
        parts = self._running()
        self._flush()
        ended = parts.background.ended(wait=True)
        small = trained_count(self._plan.model, self._plan.training.lora) <= DIGEST_LIMIT
        sha256 = weights_digest(parts.context) if small else ""
        taken = notes_of(self._device, parts.context, self._nodes)
        notes = (*taken, *(saved.message for saved in ended if saved.error))
        return Finished(self._measured_memory(parts.context.memory), notes, sha256)

    def weights(self) -> Iterator[tuple[int, Tensor]]:
        """As `weights.weights`: the parameters of this rank's layers."""
        return weights(self._running().context)

    def _measured_memory(self, memory: Memory) -> dict[str, int]:
        """Bytes as the plan promises them: of tensors, without what pages round up to."""
        more = rounding(self._program)
        device, host = memory.arena.used - more.device, memory.slab.used - more.host
        if self._device.type == "cuda":
            device = torch.cuda.max_memory_allocated(self._device)
            host = self._host.lost() // self._ranks_here
        disk = memory.disk.size - more.disk if memory.disk else 0
        return {Tier.GPU: device, Tier.HOST: host, Tier.NVME: disk}

    def _running(self) -> _RunningParts:
        assert self._parts is not None, "start() comes first"
        return self._parts

    def progress(self) -> Progress:
        """How far the step is that runs; any thread may ask."""
        parts = self._parts
        return Progress() if parts is None else parts.executor.progress()

    def close(self) -> None:
        """Stop the lanes, give memory back, leave the group. May be called at any time."""
        if self._parts is not None:
            self._parts.close()
            self._parts.context.groups.close()
            self._parts = None


def same_bits(*, wanted: bool) -> None:
    """Whether torch only takes kernels that give the same bits every time.

    Of what a step runs on an H200 only the backward of torch's attention does not, by cuDNN or by
    flash attention, which add up the gradients by queries as their blocks come. The deterministic
    one takes 2.4 times as long, a twelfth of a step of 3.3B at 4,096 tokens
    (benchmarks/results/2026-11-23-h200-promises). On a CPU all bits are the same anyway.
    """
    if wanted:  # torch asks for it: of cuBLAS's workspaces each stream has its own here
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # Memory that nothing was written to is not read: filling it would take time for nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _limit_gpu(device: torch.device, nbytes: int) -> None:
    """Hold torch to the plan's GPU memory, so that a broken promise fails and is seen."""
    torch.cuda.set_device(device)
    _, total = torch.cuda.mem_get_info(device)
    allowed = min(1.0, nbytes / total)
    torch.cuda.set_per_process_memory_fraction(allowed, device)
