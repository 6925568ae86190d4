"""One rank of a run that DeepSpeed executes: the worker that a plan's launch asks for."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from bigplan.cost.price import memory_of_torch
from bigplan.data.prepared import check_vocabulary
from bigplan.errors import CheckpointError, PreflightError
from bigplan.graph.graph import Recompute
from bigplan.placement import Tier
from bigplan.plan import Plan, digest
from bigplan.program import Lane, Op
from bigplan.ranks import Coordinates
from bigplan.rectangle import all_of
from bigplan.runtime import operators
from bigplan.runtime.checkpoint import Found, Manifest, Reader, check_same, latest
from bigplan.runtime.data import Batch, BatchSource, Prefetcher, data_path
from bigplan.runtime.deepspeed import ops, state
from bigplan.runtime.deepspeed.clock import Clock
from bigplan.runtime.deepspeed.config import (
    needed,
    pins_itself,
    settings,
    updates_on_cpu,
    uses_own_adam,
)
from bigplan.runtime.deepspeed.model import Model, Values
from bigplan.runtime.deepspeed.saving import layers_of, write_checkpoint
from bigplan.runtime.first_values import first_values, whole_values
from bigplan.runtime.groups import COLLECTIVE_TIMEOUT, Groups, store_of
from bigplan.runtime.host_memory import HostMemory, resident_bytes
from bigplan.runtime.result import Finished, Progress, Saved, StepResult
from bigplan.runtime.worker import DIGEST_LIMIT, same_bits
from bigplan.spec.optimizer import rules
from bigplan.spec.schedule import learning_rate
from bigplan.spec.step import Parameter

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a started worker consists of."""

    engine: Any  # deepspeed.DeepSpeedEngine
    model: Model
    groups: Groups
    batches: Prefetcher


class Worker:
    """DeepSpeed on one rank. Call preflight, start, step as often as wanted, finish, close."""

    def __init__(self, plan: Plan, rank: int, scratch: Path) -> None:
        self._plan, self._rank, self._scratch = plan, rank, scratch
        self._at = Coordinates.of(rank, plan.strategy)
        gpu = plan.cluster.group.gpu
        self._device = torch.device(gpu.device, 0) if gpu.device == "cuda" else torch.device("cpu")
        self._host = HostMemory()
        self._steps = 0
        self._saved: list[Saved] = []
        self._parts: _Parts | None = None
        self._clock: Clock | None = None  # of the step that runs
        self._phases = 0  # of the steps before it

    def preflight(self) -> None:
        """Raise PreflightError where this machine lacks DeepSpeed, or an operator that it needs.

        InputError where the data is not there, or not for this model.
        """
        self._source()
        if (validation := self._plan.training.validation) is not None:
            self._source(validation.data, validation.batches)
        if find_spec("deepspeed") is None:
            raise PreflightError(
                "the plan is for DeepSpeed, which is not installed; "
                "run: pip install 'bigplan[launch,deepspeed]'"
            )
        operators.leave_triton_out()
        ops.set_environment(self._device.type, native_pin=pins_itself(self._plan.config))
        ops.import_deepspeed()
        ops.load(needed(self._plan.config), self._device.type)

    def start(self, meeting: Path | Store, resume: Path | None = None) -> int:
        """Join the other ranks, make the engine, fill in first weights or a checkpoint's.

        Returns the steps done. As the native worker's.
        """
        plan, found = self._plan, None
        if resume is not None:
            found = latest(resume)
            check_same(found, plan)
            self._steps = found.manifest.step
        values = _values(plan, found)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            same_bits(wanted=plan.training.deterministic)
            _, total = torch.cuda.mem_get_info(self._device)
            allowed = memory_of_torch(plan.cluster.group.gpu, plan.strategy) / total
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed), self._device)
        groups = self._join(meeting)
        engine, model = self._made(values("master"))
        batches = Prefetcher(self._source(), self._steps)
        self._parts = _Parts(engine, model, groups, batches)
        if found is not None:
            self._take_empty_step()
        state.set_count(engine, 0)  # without ZeRO DeepSpeed has made moments by an update already
        kinds = state.KINDS[:1] if found is None else state.KINDS
        for layer, described in layers_of(model):
            for parameter, tensor in described:
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

    def _made(self, values: Values) -> tuple[Any, Model]:
        """The engine and its model."""
        import deepspeed

        plan, config = self._plan, settings(self._plan.config, self._scratch)
        placed = plan.placement.stages[self._at.stage].kinds["block"].activations
        whole = config["zero_optimization"]["stage"] < 3
        shared = nullcontext() if whole else deepspeed.zero.Init(config_dict_or_path=config)
        with shared:
            model = Model(
                plan.model,
                values,
                DTYPES[plan.training.precision],
                recompute=bool(sum(placed.get(Recompute.FULL, {}).values())),
                chunk=plan.placement.loss_chunk,
            )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=self._optimizer(model, config), config=config
        )
        return engine, model

    def _optimizer(self, model: Model, config: Mapping[str, Any]) -> torch.optim.Optimizer:
        """AdamW, a group for each weight decay and rate factor."""
        wanted = self._plan.training.optimizer
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for layer, described in layers_of(model):
            found = rules(wanted, self._plan.model, layer.layer)
            for parameter, tensor in described:
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
        engine, source = self._running().engine, self._source()
        state.set_rates(engine, 0.0)
        batch = source.batch(0, 0)
        engine.set_gradient_accumulation_boundary(is_boundary=True)
        engine.backward(0.0 * self._forward(batch))
        engine.step()
        state.link_moments(engine)

    def _source(self, data: str = "", batches: int | None = None) -> BatchSource:
        """The training's data, or another's so many global batches. Raises InputError."""
        training, strategy, model = self._plan.training, self._plan.strategy, self._plan.model
        source = BatchSource(
            data_path(data or training.data),
            training.sequence_length,
            strategy.micro_batch,
            self._at.data,
            strategy.dp,
            training.seed,
            training.global_batch,
            batches,
        )
        check_vocabulary(source.data, model.vocab, model.name)
        return source

    def _forward(self, batch: Batch) -> Tensor:
        """The sum of the losses of this rank's micro-batch."""
        there = (each.to(self._device, non_blocking=True) for each in (batch.tokens, batch.targets))
        loss: Tensor = self._running().engine(*there)
        return loss

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
        self._clock = clock = Clock(self._device, self._at.stage)
        losses: list[Tensor] = []
        waited = self._micro_batches(clock, losses)
        lane = Lane.CPU if updates_on_cpu(settings(plan.config)) else Lane.GPU_UPDATE
        with clock.phase(Op.UPDATE, 0, lane):
            engine.step()
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
            float(parts.groups.sum_of_all(torch.stack(losses).sum().cpu())),
            seconds,
            timeline,
            learning_rate=rate,
            gradient_norm=None if norm is None else float(norm),
            saved=saved,
            data_seconds=waited,
            memory=self._memory(),
        )

    def progress(self) -> Progress:
        """How far the step is that runs; any thread may ask."""
        clock = self._clock
        return Progress(self._phases) if clock is None else clock.progress(self._phases)

    def _micro_batches(self, clock: Clock, losses: list[Tensor]) -> float:
        """Forward and backward of all; `losses` get their parts. Seconds waited for data."""
        parts, waited = self._running(), 0.0
        count = self._plan.strategy.micro_batches(self._plan.training)
        engine = parts.engine
        for index in range(count):
            asked = time.perf_counter()
            batch = parts.batches.take(self._steps, index)
            waited += time.perf_counter() - asked
            with clock.phase(Op.FORWARD, index):
                loss = self._forward(batch)
            losses.append(loss.detach() / batch.counted)
            # DeepSpeed divides by the micro-batches of a step and by the ranks.
            share = count * self._plan.strategy.dp / batch.counted
            engine.set_gradient_accumulation_boundary(is_boundary=index == count - 1)
            with clock.phase(Op.BACKWARD, index):
                engine.backward(loss * share)
            if index < count - 1:
                engine.step()  # counts the micro-batch
        return waited

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
            state={"scale": 1.0, "good": 0, "applied": self._steps, "skipped": 0},
            files=(),
        )
        return write_checkpoint(
            parts.engine, parts.model, parts.groups, self._rank, folder, manifest
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the validation's batches."""
        wanted, parts = self._plan.training.validation, self._running()
        assert wanted is not None, "the plan has no validation"
        source = self._source(wanted.data, wanted.batches)
        total = torch.zeros(())
        parts.engine.eval()
        for step in range(source.steps or 0):
            for index in range(source.micro_batches):
                batch = source.batch(step, index)
                total += self._forward(batch).cpu() / batch.counted
        parts.engine.train()
        return float(parts.groups.sum_of_all(total))

    def finish(self) -> Finished:
        """Report memory and, for small models, a digest of the weights."""
        small = self._plan.model.parameter_count <= DIGEST_LIMIT
        return Finished(self._memory(), _notes(self._device), self._digest() if small else "")

    def _digest(self) -> str:
        """As weights.weights_digest."""
        parts, every = self._running(), ""
        dtype = DTYPES[self._plan.training.precision]
        for _, described in layers_of(parts.model):
            flat = torch.cat(
                [state.get(parts.engine, t, "master").to(dtype).flatten() for _, t in described]
            )
            every += hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
        return hashlib.sha256(every.encode()).hexdigest()

    def _memory(self) -> dict[str, int]:
        ranks = min(self._plan.strategy.ranks, self._plan.cluster.group.gpus_per_node)
        device, host = 0, resident_bytes() - self._host.before
        if self._device.type == "cuda":
            device = torch.cuda.max_memory_allocated(self._device)
            host = self._host.lost() // ranks
        swapped = sum(path.stat().st_size for path in self._scratch.rglob("*") if path.is_file())
        return {Tier.GPU: device, Tier.HOST: host, Tier.NVME: swapped}

    def _running(self) -> _Parts:
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
        """A group that nobody leaves keeps its ranks from ending cleanly.

        DeepSpeed's modules hold groups as well: until they let go, threads of gloo run on, and may
        abort a process whose Python finalises meanwhile (pytorch#179291).
        """
        if dist.is_initialized():
            from deepspeed import comm

            (comm if comm.is_initialized() else dist).destroy_process_group()


def _values(plan: Plan, found: Found | None) -> Callable[[state.Kind], Values]:
    """By kind ("master" or a moment): what gives a parameter's first value, or a checkpoint's."""
    if found is None:
        first = first_values(plan.model, plan.training)

        def made(kind: str, layer: int, parameter: Parameter) -> Tensor:
            return whole_values(first, kind, layer, parameter)

        return lambda wanted: made
    reader = Reader(found.path, found.manifest)

    def stored(wanted: state.Kind) -> Values:
        def read(kind: str, layer: int, parameter: Parameter) -> Tensor:
            if wanted == "master":
                return reader.parameter(layer, parameter.name)
            values = torch.empty(parameter.shape)
            reader.read(layer, wanted, all_of(parameter), values.view(-1))
            return values

        return read

    return stored


def _notes(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return ()
    return (
        "on this CPU device GPU memory is not measured, and host memory is all that a process took",
    )
