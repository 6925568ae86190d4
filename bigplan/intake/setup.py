"""A tool's file as a training, before options fill in what it leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bigplan.cost.framework import Framework
from bigplan.engines.deepspeed.sizes import BufferSizes
from bigplan.graph.graph import Recompute
from bigplan.intake.copies import ONE_COPY, Copies
from bigplan.placement import Tier

ALL = 10**6  # blocks: more than any model has


@dataclass(frozen=True, slots=True)
class Given:
    """Command-line values that readers need where a file leaves them open."""

    environment: Mapping[str, str] = field(default_factory=dict)  # the tool's environment variables
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sequences of a micro-batch, and micro-batches a step; or sequences of the whole step."""

    micro: int | None = None
    accumulation: int | None = None
    whole: int | None = None
    alone: bool = False  # one micro-batch a step, unless stated otherwise


@dataclass(frozen=True, slots=True)
class Offload:
    """What leaves the GPU."""

    state: Tier = Tier.GPU
    parameters: Tier = Tier.GPU
    on_cpu: float = 1.0  # share of the state in host memory that the CPU keeps


@dataclass(frozen=True, slots=True)
class Recomputation:
    """How blocks are recomputed, and how many of each chunk; or one of each `every`."""

    policy: Recompute = Recompute.NONE
    blocks: int = ALL
    every: int = 1


@dataclass(frozen=True)
class Setup:
    """One training, for the engine that prices it."""

    engine: str
    training: Mapping[str, Any] = field(default_factory=dict)  # keys of an experiment's training
    batch: BatchSizes = BatchSizes()
    # Fields of Strategy. `zero` is dropped where there is one rank, which cannot shard.
    split: Mapping[str, int] = field(default_factory=dict)
    offload: Offload = Offload()
    again: Recomputation | None = Recomputation()
    processes: int | None = None
    model: Mapping[str, str | int] = field(default_factory=dict)  # fields of ModelSpec, to compare
    billions: float | None = None  # of parameters, by the name of a model's size
    copies: Copies = ONE_COPY
    # Fields of Framework that differ from the engine's.
    behaviour: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)  # fields of BufferSizes
    own_pinning: bool = False
    assumed: tuple[str, ...] = ()  # sentences on what the price assumes
    unpriced: tuple[str, ...] = ()  # settings that bigplan cannot express or price
    ignored: tuple[str, ...] = ()  # keys without effect on time and memory

    def with_told(
        self,
        assumed: Iterable[str] = (),
        unpriced: Iterable[str] = (),
        ignored: Iterable[str] = (),
    ) -> Setup:
        """The setup with more to report."""
        return replace(
            self,
            assumed=(*self.assumed, *assumed),
            unpriced=(*self.unpriced, *unpriced),
            ignored=(*self.ignored, *ignored),
        )

    def behaving(self, framework: Framework) -> Framework:
        """The engine's framework with this file's behaviour."""
        return replace(framework, **self.behaviour)

    def sized(self, sizes: BufferSizes) -> BufferSizes:
        """Buffers with this file's sizes, but no larger than their contents."""
        stated: dict[str, Any] = dict(self.sizes)
        for key, most in (("bucket", sizes.parameters), ("live", sizes.parameters)):
            if key in stated:
                stated[key] = min(stated[key], most)
        if "sub_group" in stated:
            stated["sub_group"] = min(stated["sub_group"], sizes.owned)
        return replace(sizes, **stated)
