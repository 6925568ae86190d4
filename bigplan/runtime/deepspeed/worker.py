"""One rank of a run that DeepSpeed executes: the worker that a plan's launch asks for."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

from bigplan.cost.price import memory_of_torch
from bigplan.errors import CheckpointError, PreflightError
from bigplan.graph.graph import Recompute
from bigplan.installed import missing
from bigplan.placement import Tier
from bigplan.plan import Plan, digest
from bigplan.program import Lane
from bigplan.ranks import Coordinates
from bigplan.runtime import operators
from bigplan.runtime.checkpoint import Manifest, check_same, latest
from bigplan.runtime.data import Batch, BatchSource, Prefetcher
from bigplan.runtime.deepspeed import ops, state
from bigplan.runtime.deepspeed.clock import PassClock
from bigplan.runtime.deepspeed.config import (
    needed,
    pins_itself,
    settings,
    updates_on_cpu,
    uses_own_adam,
)
from bigplan.runtime.deepspeed.model import LayerModule, Model, Values, with_parameters
from bigplan.runtime.deepspeed.passes import DrivenEngine, Whole
from bigplan.runtime.deepspeed.saving import write_checkpoint
from bigplan.runtime.deepspeed.values import values_of
from bigplan.runtime.memory.host_memory import HostMemory
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.parallel.groups import COLLECTIVE_TIMEOUT, Groups, store_of
from bigplan.runtime.result import Finished, Progress, Saved, StepResult
from bigplan.runtime.weights.digest import digest_of_all
from bigplan.runtime.worker import DIGEST_LIMIT, same_bits
from bigplan.spec.optimizer import rules
from bigplan.spec.schedule import learning_rate

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class _EngineParts:
    """What a started worker consists of."""

    engine: Any  # deepspeed.DeepSpeedEngine
    model: Layered
    passes: DrivenEngine
    groups: Groups
    batches: Prefetcher


class Layered(Protocol):
    """A rank's layers: the whole model, or those of its stage."""

    def stored(self) -> Iterator[LayerModule]:
        """The layers that this rank writes to checkpoints."""

    def held(self) -> Iterator[LayerModule]:
        """Those, and copies that it has of others'."""


class DeepSpeedWorker:
    """DeepSpeed on one rank. Call preflight, start, step as often as wanted, finish, close."""

    def __init__(self, plan: Plan, rank: int, scratch: Path) -> None:
        self._plan, self._rank, self._scratch = plan, rank, scratch
        self._at = Coordinates.of(rank, plan.strategy)
        gpu = plan.cluster.group.gpu
        self._device = torch.device(gpu.device, 0) if gpu.device == "cuda" else torch.device("cpu")
        self._host = HostMemory()
        self._steps = 0
        self._data = ""  # fingerprint, once it is open
        self._saved: list[Saved] = []
        self._parts: _EngineParts | None = None
        self._clock: PassClock | None = None  # of the step that runs
        self._phases = 0  # of the steps before it
        self._counted = 0  # targets of the step

    def preflight(self) -> None:
        """Raise PreflightError where this machine lacks DeepSpeed, or an operator that it needs.

        InputError where the data is not there, or not for this model.
        """
        BatchSource.of(self._plan, self._at.data)
        if (validation := self._plan.training.validation) is not None:
            BatchSource.of(self._plan, self._at.data, validation.data, validation.batches)
        if why := missing(("deepspeed",), "launch,deepspeed"):
            raise PreflightError(f"the plan is for DeepSpeed: {why}")
        operators.leave_triton_out()
        ops.set_environment(self._device.type, native_pin=pins_itself(self._plan.config))
        ops.import_deepspeed()
        ops.load(needed(self._plan.config), self._device.type)

    def start(
        self, meeting: Path | Store, resume: Path | None = None, apart: Apart | None = None
    ) -> int:
        """Join the other ranks, make the engine, fill in first weights or a checkpoint's.

        Returns the steps done. As the native worker's.
        """
        plan, found, source = self._plan, None, BatchSource.of(self._plan, self._at.data)
        self._data = source.data.fingerprint()
        if resume is not None:
            found = latest(resume, place=apart.place if apart else None)
            check_same(found, plan, self._data)
            self._steps = found.manifest.step
        values = values_of(plan, found, apart)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            same_bits(wanted=plan.training.deterministic)
            _, total = torch.cuda.mem_get_info(self._device)
            allowed = memory_of_torch(plan.cluster.group.gpu, plan.strategy) / total
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed), self._device)
        groups = replace(self._join(meeting), apart=apart)
        engine, model, passes = self._made(values("master"))
        batches = Prefetcher(source, self._steps)
        self._parts = _EngineParts(engine, model, passes, groups, batches)
        if found is not None:
            self._take_empty_step()
        state.set_count(engine, 0)  # without ZeRO DeepSpeed has made moments by an update already
        kinds = state.KINDS[:1] if found is None else state.KINDS
        for layer, parameters in with_parameters(model.held()):
            for parameter, tensor in parameters:
                every = {kind: values(kind)(layer.kind, layer.layer, parameter) for kind in kinds}
                state.put(engine, tensor, every)
        if found is not None:
            state.set_count(engine, int(found.manifest.state["applied"]))
        return self._steps

    def _join(self, meeting: Path | Store) -> Groups:
        """A process group for DeepSpeed, and one through gloo for what ranks agree on."""
        strategy, ranks = self._plan.strategy, self._plan.strategy.ranks
        os.environ |= {"RANK": str(self._rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if ranks > 1:
            store = store_of(meeting, ranks)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT
        )
        control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        return Groups(self._at, strategy, _control=control)

    def _made(self, values: Values) -> tuple[Any, Layered, DrivenEngine]:
        """The engine, its layers, and how it is driven."""
        import deepspeed

        plan, config = self._plan, settings(self._plan.config, self._scratch)
        placed = plan.placement.stages[self._at.stage].kinds.get("block")
        again = placed.activations.get(Recompute.FULL, {}) if placed else {}
        recompute, chunk = bool(sum(again.values())), plan.placement.loss_chunk
        dtype = DTYPES[plan.training.precision]
        lane = Lane.CPU if updates_on_cpu(config) else Lane.GPU_UPDATE
        if plan.strategy.pp > 1:
            from bigplan.runtime.deepspeed import pipeline

            deepspeed.init_distributed()
            stage = pipeline.PipelineStage(
                plan.model, plan.strategy, values, dtype, recompute=recompute, chunk=chunk
            )
            engine = self._initialized(stage, stage.held(), config)
            return engine, stage, pipeline.Piped(engine, stage, self._device, lane)
        whole = config["zero_optimization"]["stage"] < 3
        # Tensors are made as asked meanwhile: first values are drawn in fp32 on the CPU, where
        # DeepSpeed would make every new tensor one of the GPU, in its precision.
        shared: Any = nullcontext()
        if not whole:
            shared = deepspeed.zero.Init(config_dict_or_path=config, tensor_overrides=set())
        with shared:
            model = Model(plan.model, values, dtype, recompute=recompute, chunk=chunk)
        engine = self._initialized(model, model.held(), config)
        return engine, model, Whole(engine, self._device, lane)

    def _initialized(
        self, module: nn.Module, held: Iterator[LayerModule], config: dict[str, Any]
    ) -> Any:
        """DeepSpeed's engine."""
        import deepspeed

        optimizer = self._optimizer(held, config)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        return engine

    def _optimizer(
        self, layers: Iterable[LayerModule], config: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """AdamW, a group for each weight decay and rate factor."""
        wanted = self._plan.training.optimizer
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for layer, parameters in with_parameters(layers):
            found = rules(wanted, self._plan.model, layer.layer)
            for parameter, tensor in parameters:
                rule = found[parameter.name]
                key = rule.weight_decay, rule.learning_rate_factor
                groups.setdefault(key, []).append(tensor)
        each = [
            {"params": tensors, "weight_decay": decay, "factor": factor}
            for (decay, factor), tensors in groups.items()
        ]
        constants: dict[str, Any] = {
            "lr": wanted.learning_rate,
            "betas": (wanted.beta1, wanted.beta2),
            "eps": wanted.epsilon,
        }
        if uses_own_adam(config):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            cpu: torch.optim.Optimizer = DeepSpeedCPUAdam(each, **constants)
            return cpu
        return torch.optim.AdamW(each, **constants, fused=True)

    def _take_empty_step(self) -> None:
        """An update at a rate of 0, which moves nothing: DeepSpeed makes moments in its first."""
        parts, source = self._running(), BatchSource.of(self._plan, self._at.data)
        state.set_rates(parts.engine, 0.0)
        clock = PassClock(self._device, self._at.stage)
        parts.passes.train(partial(source.batch, 0), parts.passes.at_least, 0.0, clock)
        state.link_moments(parts.engine)

    def step(self, checkpoint: Path | None = None) -> StepResult:
        """One optimizer step; a checkpoint is written whole before it, or after it.

        Before it where the native engine's updates would still be pending, as a launch asks for it.
        """
        parts, plan = self._running(), self._plan
        if checkpoint is not None and plan.training.deferred_updates:
            self._saved.append(self._write(checkpoint))
        engine, number = parts.engine, self._steps + 1
        training = plan.training
        rate = learning_rate(training.schedule, training.optimizer, number, training.steps)
        state.set_rates(engine, rate)
        start = time.perf_counter()
        self._clock = clock = PassClock(self._device, self._at.stage)
        waits: list[float] = []
        count = plan.strategy.micro_batches(training)
        # DeepSpeed divides by the micro-batches of a step and by the ranks that share samples out.
        factor = float(count * plan.strategy.dp)
        loss = parts.passes.train(partial(self._next, waits), count, factor, clock)
        timeline = clock.timeline()
        seconds = time.perf_counter() - start
        self._steps, self._clock = number, None
        self._phases += len(timeline.events)
        if checkpoint is not None and not training.deferred_updates:
            self._saved.append(self._write(checkpoint))
        norm = engine.get_global_grad_norm()
        saved, self._saved = tuple(self._saved), []
        return StepResult(
            number,
            float(parts.groups.sum_of_all(loss.cpu())),
            seconds,
            timeline,
            learning_rate=rate,
            gradient_norm=None if norm is None else float(norm),
            saved=saved,
            data_seconds=sum(waits),
            memory=self._memory(),
            counted=self._counted,
        )

    def progress(self) -> Progress:
        """How far the step is that runs; any thread may ask."""
        clock = self._clock
        return Progress(self._phases) if clock is None else clock.progress(self._phases)

    def _next(self, waits: list[float], index: int) -> Batch:
        """The step's micro-batch of that number; `waits` gets the seconds until it was there."""
        asked = time.perf_counter()
        batch = self._running().batches.take(self._steps, index)
        waits.append(time.perf_counter() - asked)
        self._counted = batch.counted
        return batch

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of the state now. Raises CheckpointError."""
        saved = self._write(folder)
        if saved.error:
            raise CheckpointError(saved.message)
        return saved.path

    def _write(self, folder: Path) -> Saved:
        parts, plan = self._running(), self._plan
        manifest = Manifest(
            step=self._steps,
            model=plan.model,
            training=plan.training,
            plan=digest(plan),
            data=self._data,
            state={"scale": 1.0, "good": 0, "applied": self._steps},
            files=(),
        )
        layers = parts.model.stored()
        return write_checkpoint(parts.engine, layers, parts.groups, folder, manifest)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the validation's batches."""
        wanted, parts = self._plan.training.validation, self._running()
        assert wanted is not None, "the plan has no validation"
        source = BatchSource.of(self._plan, self._at.data, wanted.data, wanted.batches)
        total = torch.zeros(())
        for step in range(source.steps or 0):
            batches = [source.batch(step, index) for index in range(source.micro_batches)]
            total += parts.passes.evaluate(batches).cpu()
        return float(parts.groups.sum_of_all(total))

    def finish(self) -> Finished:
        """Report memory and, for small models, a digest of the weights."""
        small = self._plan.model.parameter_count <= DIGEST_LIMIT
        return Finished(self._memory(), _notes(self._device), self._digest() if small else "")

    def _digest(self) -> str:
        """As weights.weights_digest."""
        parts, mine = self._running(), dict[int, str]()
        dtype = DTYPES[self._plan.training.precision]
        for layer, parameters in with_parameters(parts.model.stored()):
            masters = (state.get(parts.engine, tensor, "master") for _, tensor in parameters)
            flat = torch.cat([values.to(dtype).flatten() for values in masters])
            mine[layer.layer] = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
        return digest_of_all(parts.groups, mine)

    def _memory(self) -> dict[str, int]:
        """Bytes by tier; on a CPU device one process holds both GPU and host: neither is known."""
        swapped = sum(path.stat().st_size for path in self._scratch.rglob("*") if path.is_file())
        found: dict[str, int] = {Tier.NVME: swapped}
        if self._device.type == "cuda":
            sharing = self._plan.cluster.group.shared_by(self._plan.strategy.ranks)
            found[Tier.GPU] = torch.cuda.max_memory_allocated(self._device)
            found[Tier.HOST] = sharing.bytes_of_rank(self._host.lost())
        return found

    def _running(self) -> _EngineParts:
        assert self._parts is not None, "start() comes first"
        return self._parts

    def close(self) -> None:
        """Drop the engine and leave the process group. May be called at any time."""
        if self._parts is not None:
            self._parts.batches.close()
            self._parts.engine.destroy()
            self._parts = None
        self._leave()

    def _leave(self) -> None:
        """Leave the group: otherwise its ranks do not end cleanly.

        DeepSpeed's modules hold groups as well: until they let go, threads of gloo run on, and may
        abort a process whose Python finalises meanwhile (pytorch#179291).
        """
        if dist.is_initialized():
            from deepspeed import comm

            (comm if comm.is_initialized() else dist).destroy_process_group()


def _notes(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return ()
    return ("on this CPU device memory of GPU and host is not measured",)
