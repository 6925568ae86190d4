"""How one optimizer step is split over devices: the strategy, and which strategies are legal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from math import ceil
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from bigplan.spec.files.document import Spec
from bigplan.spec.layers import BLOCK
from bigplan.spec.lora import packs
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

Ends = tuple[float, float]  # seconds of the embedding and of the head, in units of a block's

WIDEST_CUT = 64  # elements: a cache line of 16-bit ones is 32; layers are cut between so many
GROUPS_TRIED = 6  # accumulation groups 1, 2, 4, ... 32, and all of a step's micro-batches


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
        if self.ep > 1:
            raise ValueError(
                f"zero_group {self.zero_group} with ep {self.ep}: experts that are spread over "
                "ranks are shared by all ranks that have them; use ep 1, or leave zero_group out"
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

    @property
    def expert_shards(self) -> int:
        """Ranks that have the same experts where a tool keeps experts whole (`ep`).

        Megatron Core's expert-data-parallel ranks, with expert_tensor_parallel_size 1.
        """
        return self.shards * self.tp // self.ep

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


def balanced_ends(blocks: int, chunks: int, ends: Ends) -> tuple[int, int]:
    """Blocks of the first and last chunk with which the slowest chunk takes least.

    `ends`: seconds of embedding and head in units of a block's. Among equals the last chunk is the
    larger, because the first holds the most activations.
    """

    def slowest(split: tuple[int, int]) -> tuple[float, int]:
        first, last = split
        others = ceil((blocks - first - last) / (chunks - 2)) if chunks > 2 else 0
        return max(first + ends[0], others, last + ends[1]), first

    each = ceil((blocks + sum(ends)) / chunks)
    if chunks == 2:
        splits = [(blocks - last, last) for last in range(1, blocks)]
    else:
        tried = range(1, min(each + 2, blocks))
        splits = [(f, n) for f, n in product(tried, tried) if blocks - f - n >= chunks - 2]
    return min(splits, key=slowest)


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class StrategyFamily(NamedTuple):
    """Strategies with the same compute on every GPU; they differ in schedule and sharding."""

    dp: int
    tp: int
    pp: int
    micro_batch: int
    cp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Space:
    """All strategies that use all `gpus`, keep tensor parallelism in a node and split evenly.

    Context parallelism stays in a node, too. It is tried where one sequence has more tokens than a
    micro-batch that is worth trying.

    `fixed` holds values of `Strategy` that the user wants. Any legal value is then in the space,
    even one that would not be tried otherwise. `spreads`: data-parallel ranks may have whole
    experts, as the native runtime has them. `unlike_chunks`: virtual stages may differ in kinds of
    blocks. `hybrid`: ZeRO may shard over groups of ranks (`hybrids`).
    """

    model: ModelSpec
    training: Training
    gpus: int
    gpus_per_node: int
    fixed: Mapping[str, int] = field(default_factory=dict)
    spreads: bool = False
    unlike_chunks: bool = False
    hybrid: bool = False

    def families(self) -> Iterator[StrategyFamily]:
        """Every family that may have a member."""
        for tp, cp in self._splits_of_tokens():
            for pp in self._tried("pp", divisors(self.gpus // (tp * cp))):
                dp, rest = divmod(self.gpus, tp * cp * pp)
                sequences = self.training.global_batch // max(1, dp)
                whole = rest == 0 and self.training.global_batch % dp == 0
                if whole and pp <= self.model.layers and self.fixed.get("dp", dp) == dp:
                    tried = self._tried("micro_batch", self._micro_batches(sequences, cp))
                    spread = list(self._spread(dp, tp * cp))
                    for micro_batch in tried:
                        if sequences % micro_batch == 0:
                            for ep in spread:
                                yield StrategyFamily(dp, tp, pp, micro_batch, cp, ep)

    def _spread(self, dp: int, split: int) -> Iterator[int]:
        """Ranks that may have all experts together: of one node, or of whole ones.

        `split`: ranks that split the tokens of a sequence.
        """
        each = self.gpus_per_node
        for ep in self._tried("ep", divisors(dp)) if self.spreads else (1,):
            alone = ep == 1 or (split == 1 and self.training.lora is None)
            placed = "ep" in self.fixed or each % ep == 0 or ep % each == 0
            if alone and placed and dp % ep == 0 and spreads_experts(self.model, dp, ep):
                yield ep

    def _splits_of_tokens(self) -> Iterator[tuple[int, int]]:
        """Tensor- and context-parallel ranks, which exchange tokens within every layer."""
        length = self.training.sequence_length
        for tp in self._tried("tp", divisors(self.gpus)):
            if self.gpus % tp or self.gpus_per_node % tp:
                continue
            if not splits_over_tensor_parallel(self.model, tp):
                continue
            if not packs(self.model, self.training.lora, tp):
                continue
            tried = divisors(self.gpus_per_node // tp) if length > MAX_MICRO_BATCH_TOKENS else [1]
            for cp in self._tried("cp", tried):
                within = "cp" in self.fixed or self.gpus_per_node % (tp * cp) == 0
                whole = self.gpus % (tp * cp) == 0 and length % cp == 0
                if within and whole and splits_over_context_parallel(self.model, tp, cp):
                    yield tp, cp

    def members(self, family: StrategyFamily, ends: Ends | None = None) -> Iterator[Strategy]:
        """The family's strategies; `ends` weigh embedding and head against a block."""
        dp, tp, pp, micro_batch, cp, ep = family
        micro_batches = self.training.global_batch // (dp * micro_batch)
        for vpp in self._tried("vpp", self._virtual_stages(pp, micro_batches)):
            if pp * vpp > self.model.layers or (vpp > 1 and (pp == 1 or micro_batches % pp)):
                continue
            if vpp > 1 and not self._interleaves:
                continue  # rows of memory hold where first chunks keep no less than later ones
            for first, last in self._splits(pp * vpp, ends if vpp == 1 else None):
                for group in self._tried("accumulation_group", _groups(micro_batches)):
                    if micro_batches % group or (vpp > 1 and group > 1):
                        continue
                    # Frozen layers have nothing that stages 1 and 2 shard.
                    stages = (0, 3) if self.training.lora else (0, 1, 2, 3)
                    for zero in self._tried("zero", stages if dp * cp > 1 else (0,)):
                        if zero not in stages:
                            continue
                        if (zero and dp * cp == 1) or (vpp > 1 and zero > 1):
                            continue
                        for ranks in self._zero_groups(family, zero):
                            yield Strategy(
                                dp=dp,
                                tp=tp,
                                pp=pp,
                                vpp=vpp,
                                cp=cp,
                                ep=ep,
                                zero=zero,
                                zero_group=ranks,
                                micro_batch=micro_batch,
                                accumulation_group=group,
                                first_blocks=first,
                                last_blocks=last,
                                sequence_parallel=bool(self.fixed.get("sequence_parallel", 1)),
                            )

    def hybrids(self, strategy: Strategy) -> Iterator[Strategy]:
        """The strategy with zero groups of a node's ranks, or of a few nodes'.

        A smaller group would keep more on each GPU, and gather no faster than over a node's links.
        """
        free = "zero_group" not in self.fixed and not strategy.zero_group
        if not (free and strategy.zero and self.hybrid and strategy.ep == 1):
            return
        of_node = self.gpus_per_node // strategy.tp
        for ranks in (nodes * of_node for nodes in NODES_TOGETHER):
            if 1 < ranks < strategy.shards and strategy.shards % ranks == 0:
                yield strategy.model_copy(update={"zero_group": ranks})

    def _zero_groups(self, family: StrategyFamily, zero: int) -> Iterator[int]:
        """All ranks in one (0), unless another number is wanted and may be."""
        shards, wanted = family.dp * family.cp, self.fixed.get("zero_group", 0)
        if not wanted or (zero and wanted == shards):
            yield 0
        elif zero and self.hybrid and family.ep == 1 and wanted in divisors(shards)[1:-1]:
            yield wanted

    def strategies(self) -> Iterator[Strategy]:
        """Every strategy, without weights for the ends."""
        for family in self.families():
            yield from self.members(family)

    @property
    def _interleaves(self) -> bool:
        return self.unlike_chunks or not self.model.dense_blocks

    def _tried(self, name: str, values: Iterable[int]) -> Iterable[int]:
        return (self.fixed[name],) if name in self.fixed else values

    def _micro_batches(self, sequences: int, cp: int) -> Iterator[int]:
        length = self.training.sequence_length // cp
        return (m for m in divisors(sequences) if m == 1 or m * length <= MAX_MICRO_BATCH_TOKENS)

    def _virtual_stages(self, pp: int, micro_batches: int) -> Iterator[int]:
        """One, and where micro-batches fill the pipeline evenly those that no stage grows by.

        The fullest stage has as many blocks as without: where stages are alike, their divisors.
        """
        yield 1
        if self._interleaves and pp > 1 and micro_batches % pp == 0:
            blocks = self.model.layers
            fullest = ceil(blocks / pp)
            for v in range(2, min(MAX_VIRTUAL_STAGES, blocks // pp) + 1):
                if v * ceil(blocks / (pp * v)) == fullest:
                    yield v

    def _splits(self, chunks: int, ends: Ends | None) -> Iterator[tuple[int, int]]:
        """Blocks of the first and last chunk: even, and balanced with embedding and head."""
        blocks = self.model.layers
        wanted = self.fixed.get("first_blocks", 0), self.fixed.get("last_blocks", 0)
        tried = [wanted]
        if (
            ends is not None
            and chunks > 1
            and not {"first_blocks", "last_blocks"} & set(self.fixed)
        ):
            tried.append(balanced_ends(blocks, chunks, ends))
        by_split = {Cut(chunks, *each).blocks(blocks): each for each in reversed(tried)}
        for split, each in reversed(by_split.items()):
            if min(split) > 0 and len(split) == chunks and sum(split) == blocks:
                yield each


def splits_over_tensor_parallel(model: ModelSpec, tp: int) -> bool:
    """Whether `tp` divides heads and the MLP's width, and key-value heads divide or are divided.

    Where there are fewer key-value heads than ranks, neighbouring ranks hold the same head. Each
    rank adds the last biases of its part of the experts.
    """
    repeats = tp % model.kv_heads == 0
    heads = model.heads % tp == 0 and (repeats or model.kv_heads % tp == 0)
    biased = model.experts if model.mlp_bias else 0
    return heads and not any(width % tp for width in (*model.inner_widths, biased))


def splits_over_context_parallel(model: ModelSpec, tp: int, cp: int) -> bool:
    """Whether `cp` divides a tensor-parallel rank's heads, and goes with key-value heads.

    Where a rank has fewer key-value heads than `cp`, neighbouring context ranks get the same head.
    """
    kv_heads = -(-model.kv_heads // tp)
    return model.heads // tp % cp == 0 and (kv_heads % cp == 0 or cp % kv_heads == 0)


def spreads_experts(model: ModelSpec, dp: int, ep: int) -> bool:
    """Whether `ep` of `dp` ranks may have equal parts of the experts.

    Their elements are then whole units for each rank that shares them, and lie before the rest.
    """
    if ep == 1:
        return True
    if not model.experts or model.experts % ep:
        return False
    elements = sum(p.count for p in model.kinds()[BLOCK] if p.experts) // ep
    return elements % (dp // ep * WIDEST_CUT) == 0


# Nodes whose ranks share one copy of what ZeRO shards: one gathers over the links inside it alone,
# and a few where its memory is short.
NODES_TOGETHER = (1, 2, 4)
# Larger micro-batches gain nothing: at 64k tokens a GEMM is far beyond the size at which it
# reaches its best rate, and every activation buffer grows with it.
MAX_MICRO_BATCH_TOKENS = 65536
# The bubble shrinks as 1 / v, the messages grow as v: beyond 8 little is left to win.
MAX_VIRTUAL_STAGES = 8


def _groups(micro_batches: int) -> list[int]:
    powers = [2**i for i in range(GROUPS_TRIED) if micro_batches % 2**i == 0]
    return sorted({*powers, micro_batches})
