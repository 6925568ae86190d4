"""How one optimizer step is split over devices: the strategy, and which strategies are legal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import Field, model_validator

from bigplan.spec.document import Spec
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

GROUPS_TRIED = 6  # accumulation groups 1, 2, 4, ... 32, and all of a step's micro-batches


class Strategy(Spec):
    """Degrees of parallelism and the batch schedule of one step.

    `dp * tp * pp` is the number of GPUs. A rank passes `accumulation_group` micro-batches through
    a layer before it goes on to the next layer (1: micro-batch-major; all: layer-major).
    """

    dp: int = Field(ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    vpp: int = Field(default=1, ge=1, le=1)
    cp: int = Field(default=1, ge=1, le=1)
    ep: int = Field(default=1, ge=1, le=1)
    zero: int = Field(default=0, ge=0, le=3)
    micro_batch: int = Field(default=1, ge=1)
    accumulation_group: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _zero_needs_data_parallelism(self) -> Self:
        if self.zero and self.dp == 1:
            raise ValueError(
                f"zero {self.zero} shards over data-parallel ranks; dp is 1: use zero 0"
            )
        return self

    @property
    def ranks(self) -> int:
        """GPUs used."""
        return self.dp * self.tp * self.pp

    def micro_batches(self, training: Training) -> int:
        """Micro-batches of one data-parallel rank in one step."""
        return training.global_batch // (self.dp * self.micro_batch)

    def units(self, training: Training) -> int:
        """Accumulation groups of one data-parallel rank in one step."""
        return self.micro_batches(training) // self.accumulation_group


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def legal_strategies(
    model: ModelSpec, training: Training, gpus: int, gpus_per_node: int
) -> Iterator[Strategy]:
    """Every strategy that uses all `gpus`, splits evenly and keeps tensor parallelism in a node."""
    for tp in divisors(gpus):
        if gpus_per_node % tp or not splits_over_tensor_parallel(model, tp):
            continue
        for pp in divisors(gpus // tp):
            if model.layers % pp:
                continue
            dp = gpus // (tp * pp)
            if training.global_batch % dp == 0:
                yield from _batch_schedules(training, dp, tp, pp)


def splits_over_tensor_parallel(model: ModelSpec, tp: int) -> bool:
    """Whether heads, key-value heads and the MLP's width divide by `tp`."""
    return model.heads % tp == 0 and model.kv_heads % tp == 0 and model.ffn % tp == 0


def _batch_schedules(training: Training, dp: int, tp: int, pp: int) -> Iterator[Strategy]:
    sequences = training.global_batch // dp
    for micro_batch in divisors(sequences):
        if micro_batch > 1 and micro_batch * training.sequence_length > MAX_MICRO_BATCH_TOKENS:
            break
        for group in _groups(sequences // micro_batch):
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                yield Strategy(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    zero=zero,
                    micro_batch=micro_batch,
                    accumulation_group=group,
                )


# Larger micro-batches gain nothing: at 64k tokens a GEMM is far beyond the size at which it
# reaches its best rate, and every activation buffer grows with it.
MAX_MICRO_BATCH_TOKENS = 65536


def _groups(micro_batches: int) -> list[int]:
    powers = [2**i for i in range(GROUPS_TRIED) if micro_batches % 2**i == 0]
    return sorted({*powers, micro_batches})
