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
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigplan.graph.strategy import Strategy, chunk_blocks
from bigplan.program import Lane, Op
from bigplan.runtime import blocks
from bigplan.runtime.data import Batch
from bigplan.runtime.deepspeed.clock import Clock
from bigplan.runtime.deepspeed.model import Block, Embedding, Head, Layer, Values, attribute
from bigplan.runtime.deepspeed.passes import Take, mean
from bigplan.spec.layers import TABLE
from bigplan.spec.model import ModelSpec

TIED = "table"  # the name of the parameters that two stages hold


class StageBlock(Block):
    """A block that makes its own position tables: nothing but hidden states passes stages."""

    tables: blocks.Tables | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[b, s, h] to the same."""
        if self.tables is None:
            self.tables = blocks.position_tables(self._model, x.shape[1], x.device, x.dtype)
        return super().forward(x, *self.tables)


class StageEnd(nn.Module):
    """The last layer: its loss needs targets, which DeepSpeed gives to the loss function alone."""

    def __init__(self, model: ModelSpec, layer: int, values: Values, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = Head(model, layer, values, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return x


class Stage(PipelineModule):  # type: ignore[misc]
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
                loss_fn=self._loss,
                activation_checkpoint_interval=int(recompute),
                activation_checkpoint_func=partial(checkpoint, use_reentrant=True),
                checkpointable_layers=[StageBlock.__name__],
            )
        for parameter in self.parameters():
            # Else norms without ZeRO count the first stage's gradients alone (0.19.8).
            parameter.model_parallel = not parameter.ds_pipe_replicated
        # In a list, so that it is no second name of the module.
        self._heads = [found.head for found in self.forward_funcs if isinstance(found, StageEnd)]
        for head in self._heads:
            head.chunk = chunk
            if model.tied_embeddings:
                head.share(self.tied_modules[TIED])
        self.targets: deque[Batch] = deque()  # whose losses are due
        self.factor = 1.0  # of the losses, see Passes.train
        self.losses: list[tuple[Tensor, Batch]] = []

    def _partition_layers(self, method: str = "") -> None:
        """Where DeepSpeed would balance parameters."""
        self.parts = [0, *self._stops]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        (head,) = self._heads
        batch = self.targets.popleft()
        loss: Tensor = head(x, targets)
        self.losses.append((loss.detach(), batch))
        return loss * (self.factor / batch.counted)

    def stored(self) -> Iterator[Layer]:
        """The layers that this stage writes to checkpoints, first to last."""
        return (layer for layer in self.held() if not self._is_copy(layer))

    def held(self) -> Iterator[Layer]:
        """Those and the copy of another's table."""
        for found in self.forward_funcs:
            if isinstance(found, partial):
                yield self.tied_modules[TIED]
            else:
                yield found.head if isinstance(found, StageEnd) else found

    def _is_copy(self, layer: Layer) -> bool:
        return bool(self._heads) and layer.kind == "embedding"


def _specs(model: ModelSpec, values: Values, dtype: torch.dtype) -> Iterator[LayerSpec]:
    """A stage makes the layers of its own alone."""
    last, tied = model.layers + 1, attribute(TABLE)
    if model.tied_embeddings:
        yield TiedLayerSpec(TIED, Embedding, model, 0, values, dtype, tied_weight_attr=tied)
    else:
        yield LayerSpec(Embedding, model, 0, values, dtype)
    for layer in range(1, last):
        yield LayerSpec(StageBlock, model, layer, values, dtype)
    if model.tied_embeddings:
        yield TiedLayerSpec(
            TIED,
            Embedding,
            model,
            0,
            values,
            dtype,
            (TABLE,),
            forward_fn=_passed,
            tied_weight_attr=tied,
        )
    yield LayerSpec(StageEnd, model, last, values, dtype)


def _passed(table: Embedding, x: Tensor) -> Tensor:
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
    schedule.OptimizerStep: (Op.UPDATE, Lane.GPU_UPDATE),
}


class Piped:
    """The engine of a pipeline: it takes all of a step's micro-batches itself (Passes)."""

    def __init__(self, engine: Any, stage: Stage, device: torch.device) -> None:
        """`engine`: deepspeed's PipelineEngine."""
        self._engine, self._stage, self._device = engine, stage, device
        self._clock: Clock | None = None
        self._count = Counter[type]()  # instructions of a kind in this step
        timed = dict(_TIMED)
        if engine.is_data_parallel:
            timed[schedule.ReduceGrads] = Op.REDUCE, Lane.COMM
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

    def train(self, take: Take, count: int, factor: float, clock: Clock) -> Tensor:
        """See Passes."""
        assert count == self.at_least, (count, self.at_least)
        self._clock, self._stage.factor = clock, factor
        self._count.clear()
        self._engine.train_batch(self._loaded(map(take, range(count))))
        self._clock = None
        return self._lost()

    def _loaded(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Asked by the first and by the last stage."""
        for batch in batches:
            if self._engine.is_last_stage():
                self._stage.targets.append(batch)
            yield batch.tokens, batch.targets

    def _lost(self) -> Tensor:
        found, self._stage.losses = self._stage.losses, []
        return mean(found, self._device)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """See Passes."""
        self._engine.eval_batch(
            self._loaded(iter(batches)),
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=len(batches),
        )
        return self._lost()


def made(
    stage: Stage, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device
) -> tuple[Any, Piped]:
    """DeepSpeed's engine of a stage, and how it is driven."""
    engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
    return engine, Piped(engine, stage, device)
