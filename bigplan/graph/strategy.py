"""How one optimizer step is split over devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from bigplan.spec.files.document import Spec
from bigplan.spec.training import Training

EVERY_EXPERT = "each zero group has a copy of all experts, and those are spread over ep ranks"
WIDEST_CUT = 64  # elements: a cache line of 16-bit ones is 32; layers are cut between so many


class Cut(NamedTuple):
    """Chunks of blocks: their number, and blocks of the first and the last; 0: as the others."""

    chunks: int
    first: int = 0
    last: int = 0

    def blocks(self, every: int) -> tuple[int, ...]:
        """Blocks of each chunk, first to last; inner chunks share evenly, larger ones first."""
        first, last = self.first, self.last
        alike = self.chunks - (first > 0) - (last > 0)
        each, more = divmod(every - first - last, alike) if alike > 0 else (0, 0)
        shared = [each + (i < more) for i in range(alike)]
        return (*([first] if first else []), *shared, *([last] if last else []))


class Replicas(Spec):
    """Replicas with consecutive numbers whose micro-batches have one size."""

    number: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    """sequences"""


class Strategy(Spec):
    """Degrees of parallelism and the batch schedule of one step.

    `dp * cp * tp * pp` is the number of GPUs. A rank passes `accumulation_group` micro-batches
    through a layer before it goes on to the next layer (1: micro-batch-major; all: layer-major).

    `cp` neighbouring ranks of one replica have consecutive parts of its sequences. Within attention
    each has whole sequences of its part of the heads (DeepSpeed Ulysses: Jacobs et al. 2023).

    The model's blocks are cut into `pp * vpp` chunks; stage s has chunks s, pp + s, 2 pp + s, ...
    (Narayanan et al. 2021, section 2.2). The first and the last chunk may have other numbers of
    blocks, because they also hold embedding and head.
    """

    dp: int = Field(ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    vpp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    """neighbouring ranks that have an equal part of the experts each, whole ones"""
    zero: int = Field(default=0, ge=0, le=3)
    zero_group: int = Field(default=0, ge=0, exclude_if=lambda ranks: not ranks)
    """neighbouring ranks, of those that have the same parameters, that share one copy of what ZeRO
    shards; 0: all of them. Every other such group has a copy, too (hybrid sharding)"""
    micro_batch: int = Field(default=1, ge=1)
    accumulation_group: int = Field(default=1, ge=1)
    first_blocks: int = Field(default=0, ge=0)
    """blocks in the first chunk; 0: as many as the others"""
    last_blocks: int = Field(default=0, ge=0)
    """blocks in the last chunk; 0: as many as the others"""
    sequence_parallel: bool = True
    """with tp > 1: norms and residuals are split by sequence over the tensor-parallel ranks"""
    replicas: tuple[Replicas, ...] = Field(default=(), exclude_if=lambda groups: not groups)
    """where replicas on unlike nodes have micro-batches of unlike sizes: all of them in turn;
    `micro_batch` is the largest. Absent: all are alike"""

    @model_validator(mode="after")
    def _replicas_are_all(self) -> Self:
        sizes = {group.micro_batch for group in self.replicas}
        if not sizes:
            return self
        number = sum(group.number for group in self.replicas)
        if number != self.dp or max(sizes) != self.micro_batch or len(sizes) == 1:
            raise ValueError(
                f"replicas: {number} with micro-batches of {', '.join(map(str, sorted(sizes)))}; "
                f"there are dp {self.dp}, the largest micro-batch is micro_batch "
                f"{self.micro_batch}, and replicas that are all alike are left out"
            )
        return self

    @model_validator(mode="after")
    def _zero_needs_data_parallelism(self) -> Self:
        if self.zero and self.shards == 1:
            raise ValueError(
                f"zero {self.zero} shards over data-parallel ranks; dp is 1: use zero 0"
            )
        return self

    @model_validator(mode="after")
    def _zero_groups_are_alike(self) -> Self:
        if not self.zero_group:
            return self
        if not self.zero:
            raise ValueError(
                f"zero_group {self.zero_group} says how many ranks share what ZeRO shards; zero is "
                "0: use zero 1, 2 or 3, or leave zero_group out"
            )
        if self.zero_group in (1, self.shards) or self.shards % self.zero_group:
            raise ValueError(
                f"zero_group {self.zero_group}: the {self.shards} ranks with the same parameters "
                f"(dp {self.dp} x cp {self.cp}) need several groups of several ranks; use a "
                "divisor between the two, or leave zero_group out for one group of all"
            )
        if self.replicas:
            raise ValueError(
                f"zero_group {self.zero_group} with replicas of unlike micro-batches: leave "
                "zero_group out"
            )
        if self.zero_group % self.ep:
            raise ValueError(
                f"zero_group {self.zero_group} with ep {self.ep}: {EVERY_EXPERT}; use a multiple "
                "of ep, or leave zero_group out"
            )
        return self

    @model_validator(mode="after")
    def _virtual_stages_need_a_pipeline(self) -> Self:
        if self.vpp > 1 and (self.pp == 1 or self.accumulation_group > 1 or self.zero > 1):
            raise ValueError(
                f"vpp {self.vpp} interleaves single micro-batches of a pipeline and keeps "
                f"gradients whole; pp is {self.pp}, accumulation_group {self.accumulation_group}, "
                f"zero {self.zero}: use pp > 1, groups of 1 and zero 0 or 1"
            )
        return self

    @model_validator(mode="after")
    def _experts_need_ranks(self) -> Self:
        if self.shards * self.tp % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {self.shards * self.tp} ranks of a pipeline "
                f"stage (dp {self.dp} x cp {self.cp} x tp {self.tp}): use an ep that does"
            )
        return self

    @property
    def ranks(self) -> int:
        """GPUs used."""
        return self.shards * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Ranks that have the same parameters: they share states, and sum gradients.

        Their places are numbers `replica * cp + part`: of a replica and a part of sequences.
        """
        return self.dp * self.cp

    @property
    def zero_ranks(self) -> int:
        """Ranks that share one copy of optimizer states out; without ZeRO each has all of them."""
        return (self.zero_group or self.shards) if self.zero else 1

    @property
    def zero_copies(self) -> int:
        """Groups of ranks with a copy each of what ZeRO shards."""
        return self.shards // self.zero_group if self.zero_group else 1

    def expert_shards(self, *, folded: bool = False) -> int:
        """Ranks that share out the same experts, or the same part of each (`ep`).

        They are of one zero group, where there are several. `folded`: experts are whole on each of
        a stage's ranks, tensor-parallel ones among them, as Megatron Core has them with
        expert_tensor_parallel_size 1.
        """
        return (self.zero_group or self.shards) * (self.tp if folded else 1) // self.ep

    def rank_length(self, training: Training) -> int:
        """Tokens of a sequence that a rank has."""
        return training.sequence_length // self.cp

    def rank_tokens(self, training: Training) -> int:
        """Tokens of a micro-batch that a rank has; tensor-parallel ranks have the same."""
        return self.micro_batch * self.rank_length(training)

    @property
    def whole_passes(self) -> bool:
        """Whether a rank passes a micro-batch through all layers without any other rank."""
        return self.ranks == self.dp

    @property
    def cut(self) -> Cut:
        """How the model's blocks are cut into chunks."""
        return Cut(self.pp * self.vpp, self.first_blocks, self.last_blocks)

    @property
    def sequences(self) -> int:
        """Sequences in one micro-batch of every replica together."""
        if not self.replicas:
            return self.dp * self.micro_batch
        return sum(group.number * group.micro_batch for group in self.replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences in a micro-batch, by replica."""
        alike = self.replicas or (Replicas(number=self.dp, micro_batch=self.micro_batch),)
        return tuple(group.micro_batch for group in alike for _ in range(group.number))

    def group_of(self, replica: int) -> int:
        """Which of `replicas` the replica is in; 0 where all are alike."""
        numbers = [n for n, group in enumerate(self.replicas) for _ in range(group.number)]
        return numbers[replica] if numbers else 0

    def micro_batches(self, training: Training) -> int:
        """Micro-batches of one data-parallel rank in one step."""
        return training.global_batch // self.sequences

    def units(self, training: Training) -> int:
        """Accumulation groups of one data-parallel rank in one step."""
        return self.micro_batches(training) // self.accumulation_group


def chunk_blocks(blocks: int, strategy: Strategy) -> tuple[int, ...]:
    """Blocks of every chunk, first to last; inner chunks share evenly, larger ones first."""
    return strategy.cut.blocks(blocks)


def chunk_ranges(counts: Iterable[int]) -> tuple[range, ...]:
    """The numbers of each chunk's blocks, where the first chunk has so many, and so on."""
    return tuple(range(*bounds) for bounds in pairwise(accumulate(counts, initial=0)))
