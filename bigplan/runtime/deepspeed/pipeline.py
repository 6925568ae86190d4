"""A pipeline as DeepSpeed runs it: a stage's layers in its PipelineModule, driven step by step.

This module imports deepspeed, so a worker imports it once its environment is set.
"""

from __future__ import annotations

import io
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigplan.graph.strategy import Strategy, chunk_blocks
from bigplan.program import Lane, Op
from bigplan.runtime.data import Batch
from bigplan.runtime.deepspeed.clock import PassClock
from bigplan.runtime.deepspeed.model import (
    BlockModule,
    EmbeddingModule,
    HeadModule,
    LayerModule,
    Values,
    attribute,
)
from bigplan.runtime.deepspeed.passes import Take
from bigplan.runtime.mixers.positions import Positions, position_tables
from bigplan.spec.layers import TABLE
from bigplan.spec.model import ModelSpec

TIED = "table"  # the name of the parameters that two stages hold


class StageBlock(BlockModule):
    """A block that makes its own position tables: nothing but hidden states passes stages."""

    positions: Positions | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[b, s, h] to the same."""
        if self.positions is None:
            self.positions = position_tables(
                self._model, x.shape[1], x.device, x.dtype, attends=self.attends
            )
        return super().forward(x, *self.positions.tables)


class Due(NamedTuple):
    """A micro-batch whose loss is due."""

    targets: Tensor  # on the device
    factor: float  # of the loss that the backward begins with


class StageEnd(nn.Module):
    """The last layer with its loss, within the module: DeepSpeed clears gradients of what is not.

    A layer takes hidden states alone, so targets come to it beside them.
    """

    def __init__(self, model: ModelSpec, layer: int, values: Values, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = HeadModule(model, layer, values, dtype)
        self.due: deque[Due] = deque()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """What the backward begins with; the sum of the losses goes to `losses`."""
        targets, factor = self.due.popleft()
        loss: Tensor = self.head(x, targets)
        self.losses.append(loss.detach())
        return loss * factor


class PipelineStage(PipelineModule):  # type: ignore[misc]
    """The layers of this rank's stage, cut as the plan says."""

    def __init__(
        self,
        model: ModelSpec,
        strategy: Strategy,
        values: Values,
        dtype: torch.dtype,
        *,
        recompute: bool,
        chunk: int,
    ) -> None:
        """As Model's; all ranks make theirs together, with the process group joined."""
        self._stops = _stops(model, strategy)
        with redirect_stdout(io.StringIO()):  # it prints every layer
            super().__init__(
                list(_specs(model, values, dtype)),
                num_stages=strategy.pp,
                activation_checkpoint_interval=int(recompute),
                activation_checkpoint_func=partial(checkpoint, use_reentrant=True),
                checkpointable_layers=[StageBlock.__name__],
            )
        for parameter in self.parameters():
            # Else norms without ZeRO count the first stage's gradients alone (0.19.8).
            parameter.model_parallel = not parameter.ds_pipe_replicated
        for end in self.ends:
            end.head.chunk = chunk
            if model.tied_embeddings:
                end.head.share(self.tied_modules[TIED])

    @property
    def ends(self) -> list[StageEnd]:
        """The last layer, where it is this stage's."""
        return [found for found in self.forward_funcs if isinstance(found, StageEnd)]

    def _partition_layers(self, method: str = "") -> None:
        """Where DeepSpeed would balance parameters."""
        self.parts = [0, *self._stops]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def stored(self) -> Iterator[LayerModule]:
        """The layers that this stage writes to checkpoints, first to last."""
        return (layer for layer in self.held() if not self._is_copy(layer))

    def held(self) -> Iterator[LayerModule]:
        """The stored layers, and the copy of another stage's table."""
        for found in self.forward_funcs:
            if isinstance(found, partial):
                yield self.tied_modules[TIED]
            else:
                yield found.head if isinstance(found, StageEnd) else found

    def _is_copy(self, layer: LayerModule) -> bool:
        return bool(self.ends) and layer.kind == "embedding"


def _specs(model: ModelSpec, values: Values, dtype: torch.dtype) -> Iterator[LayerSpec]:
    """A stage makes the layers of its own alone."""
    last, tied = model.layers + 1, attribute(TABLE)
    if model.tied_embeddings:
        yield TiedLayerSpec(TIED, EmbeddingModule, model, 0, values, dtype, tied_weight_attr=tied)
    else:
        yield LayerSpec(EmbeddingModule, model, 0, values, dtype)
    for layer in range(1, last):
        yield LayerSpec(StageBlock, model, layer, values, dtype)
    if model.tied_embeddings:
        yield TiedLayerSpec(
            TIED,
            EmbeddingModule,
            model,
            0,
            values,
            dtype,
            (TABLE,),
            forward_fn=_passed,
            tied_weight_attr=tied,
        )
    yield LayerSpec(StageEnd, model, last, values, dtype)


def _passed(table: EmbeddingModule, x: Tensor) -> Tensor:
    """The last stage's copy of the table computes nothing: the head reads it."""
    return x


def _stops(model: ModelSpec, strategy: Strategy) -> list[int]:
    """Behind each stage's last item of _specs."""
    stops = list(accumulate(chunk_blocks(model.layers, strategy), initial=1))[1:]
    stops[-1] += 1 + model.tied_embeddings
    return stops


_TIMED: dict[type, tuple[Op, Lane]] = {
    schedule.ForwardPass: (Op.FORWARD, Lane.COMPUTE),
    schedule.BackwardPass: (Op.BACKWARD, Lane.COMPUTE),
    schedule.SendActivation: (Op.SEND, Lane.SEND),
    schedule.SendGrad: (Op.SEND, Lane.SEND),
    schedule.RecvActivation: (Op.RECV, Lane.RECV),
    schedule.RecvGrad: (Op.RECV, Lane.RECV),
}


class Piped:
    """The engine of a pipeline: it takes all of a step's micro-batches itself (Passes)."""

    def __init__(
        self, engine: Any, stage: PipelineStage, device: torch.device, updates: Lane
    ) -> None:
        """`engine`: deepspeed's PipelineEngine; `updates`: the optimizer's lane."""
        self._engine, self._stage, self._device = engine, stage, device
        self._clock: PassClock | None = None
        self._count = Counter[type]()  # instructions of a kind in this step
        timed = {**_TIMED, schedule.OptimizerStep: (Op.UPDATE, updates)}
        if engine.is_data_parallel:
            timed[schedule.ReduceGrads] = Op.REDUCE, Lane.COMM
        elif updates is Lane.CPU:  # ZeRO-1 takes them there where others reduce
            timed[schedule.ReduceGrads] = Op.GRAD_OUT, Lane.D2H
        if stage.tied_comms:
            timed[schedule.ReduceTiedGrads] = Op.TENSOR_REDUCE, Lane.COMM
        engine._INSTRUCTION_MAP = {
            kind: self._timed(kind, execute, *timed[kind]) if kind in timed else execute
            for kind, execute in engine._INSTRUCTION_MAP.items()
        }

    @property
    def at_least(self) -> int:
        """See Passes."""
        return int(self._engine.micro_batches)

    def _timed(
        self, kind: type, execute: Callable[..., None], op: Op, lane: Lane
    ) -> Callable[..., None]:
        def timed(engine: Any, **arguments: Any) -> None:
            number = self._count[kind]
            self._count[kind] += 1
            clock = self._clock
            with nullcontext() if clock is None else clock.phase(op, number, lane):
                execute(engine, **arguments)

        return timed

    def train(self, take: Take, count: int, factor: float, clock: PassClock) -> Tensor:
        """See Passes."""
        assert count == self.at_least, (count, self.at_least)
        self._clock = clock
        self._count.clear()
        loaded = _Loaded(map(take, range(count)), factor, self._stage, self._device)
        self._engine.train_batch(loaded)
        self._clock = None
        return loaded.mean()

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """See Passes."""
        loaded = _Loaded(iter(batches), 0.0, self._stage, self._device)
        self._engine.eval_batch(
            loaded, reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )
        return loaded.mean()


class _Loaded(Iterator[tuple[Tensor, Tensor]]):
    """Micro-batches as DeepSpeed asks for them: on the first stage and on the last one."""

    def __init__(
        self, batches: Iterator[Batch], factor: float, stage: PipelineStage, device: torch.device
    ) -> None:
        self._batches, self._factor = batches, factor
        self._ends, self._device = stage.ends, device
        self._divisors: list[int] = []

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Tokens, of which the first stage takes a copy, and targets."""
        batch = next(self._batches)
        for end in self._ends:
            targets = batch.targets.to(self._device, non_blocking=True)
            end.due.append(Due(targets, self._factor / batch.divisor))
            self._divisors.append(batch.divisor)
        return batch.tokens, batch.targets[:0]  # whoever is no last stage asks for none

    def mean(self) -> Tensor:
        """The losses over the targets that count; 0 where the last layer is not here."""
        total = torch.zeros((), device=self._device)
        for end in self._ends:
            for loss, divisor in zip(end.losses, self._divisors, strict=True):
                total += loss / divisor
            end.losses.clear()
        return total
