"""What a tool's file says of a training, before options fill in what it leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bigplan.cost.framework import Framework
from bigplan.engines.deepspeed.sizes import BufferSizes
from bigplan.graph.graph import Recompute
from bigplan.placement import Tier

ALL = 10**6  # blocks: more than any model has


@dataclass(frozen=True, slots=True)
class Given:
    """What readers need of the command line, where a file leaves it open."""

    environment: Mapping[str, str] = field(default_factory=dict)  # that the tool runs with
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sequences: of a micro-batch, and micro-batches a step; or of the whole step."""

    micro: int | None = None
    accumulation: int | None = None
    whole: int | None = None
    alone: bool = False  # one micro-batch a step, where nothing else is said


@dataclass(frozen=True, slots=True)
class Offload:
    """What leaves the GPU."""

    state: Tier = Tier.GPU
    parameters: Tier = Tier.GPU
    on_cpu: float = 1.0  # of the state, where it is in host memory


@dataclass(frozen=True, slots=True)
class Again:
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
    # Of Strategy. Where `zero` needs ranks to shard over, one rank has none.
    split: Mapping[str, int] = field(default_factory=dict)
    offload: Offload = Offload()
    again: Again | None = Again()
    processes: int | None = None
    model: Mapping[str, int] = field(default_factory=dict)  # of ModelSpec, to compare
    behaviour: Mapping[str, Any] = field(default_factory=dict)  # of Framework, unlike the engine's
    sizes: Mapping[str, int] = field(default_factory=dict)  # of DeepSpeed's Sizes
    own_pinning: bool = False
    assumed: tuple[str, ...] = ()  # in sentences, what the price takes for given
    unpriced: tuple[str, ...] = ()  # what the file does that bigplan cannot express or price
    ignored: tuple[str, ...] = ()  # keys without effect on time and memory

    def with_told(
        self,
        assumed: Iterable[str] = (),
        unpriced: Iterable[str] = (),
        ignored: Iterable[str] = (),
    ) -> Setup:
        """With more to tell."""
        return replace(
            self,
            assumed=(*self.assumed, *assumed),
            unpriced=(*self.unpriced, *unpriced),
            ignored=(*self.ignored, *ignored),
        )

    def behaving(self, framework: Framework) -> Framework:
        """The engine's framework, as this file has it."""
        return replace(framework, **self.behaviour)

    def sized(self, sizes: BufferSizes) -> BufferSizes:
        """Buffers as this file has them; no more than there is to hold."""
        stated = dict(self.sizes)
        for key, most in (("bucket", sizes.parameters), ("live", sizes.parameters)):
            if key in stated:
                stated[key] = min(stated[key], most)
        if "sub_group" in stated:
            stated["sub_group"] = min(stated["sub_group"], sizes.owned)
            # The largest group is so many elements and a part of a parameter, whatever the limit.
            rest = max(0, sizes.swapped - sizes.sub_group)
            stated["swapped"] = min(stated["sub_group"] + rest, sizes.owned)
        return replace(sizes, **stated)
