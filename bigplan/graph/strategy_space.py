"""Which strategies there are for a model, a training and so many GPUs, and which are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import ceil, lcm, prod
from typing import NamedTuple

from bigplan.graph.strategy import WIDEST_CUT, Cut, Strategy
from bigplan.spec.lora import packs, stored
from bigplan.spec.model import ModelSpec
from bigplan.spec.moments import sharing_scales
from bigplan.spec.training import Training

Ends = tuple[float, float]  # seconds of the embedding and of the head, in units of a block's

GROUPS_TRIED = 6  # accumulation groups 1, 2, 4, ... 32, and all of a step's micro-batches
# Nodes whose ranks share one copy of what ZeRO shards: one gathers over the links inside it alone,
# and a few where its memory is short.
NODES_TOGETHER = (1, 2, 4)
# Larger micro-batches gain nothing: at 64k tokens a GEMM is far beyond the size at which it
# reaches its best rate, and every activation buffer grows with it.
MAX_MICRO_BATCH_TOKENS = 65536
# The bubble shrinks as 1 / v, the messages grow as v: beyond 8 little is left to win.
MAX_VIRTUAL_STAGES = 8


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
    experts, as the native runtime has them. `hybrid`: ZeRO may shard over groups of ranks.
    """

    model: ModelSpec
    training: Training
    gpus: int
    gpus_per_node: int
    fixed: Mapping[str, int] = field(default_factory=dict)
    spreads: bool = False
    hybrid: bool = False

    def families(self) -> Iterator[StrategyFamily]:
        """Every family that may have a member."""
        for tp, cp in self._splits_of_tokens():
            for pp in self._tried("pp", divisors(self.gpus // (tp * cp))):
                dp, rest = divmod(self.gpus, tp * cp * pp)
                sequences = self.training.global_batch // max(1, dp)
                whole = rest == 0 and self.training.global_batch % dp == 0
                whole = whole and not (self.model.carries and tp > 1)
                if whole and pp <= self.model.layers and self.fixed.get("dp", dp) == dp:
                    tried = self._tried("micro_batch", self._micro_batches(sequences, cp))
                    spread = list(self._spread(dp * cp, tp))
                    for micro_batch in tried:
                        if sequences % micro_batch == 0:
                            for ep in spread:
                                yield StrategyFamily(dp, tp, pp, micro_batch, cp, ep)

    def _spread(self, shards: int, tp: int) -> Iterator[int]:
        """Ranks that may have all experts together: of one node, or of whole ones.

        `shards`: ranks of a pipeline stage at each of `tp` tensor-parallel places.
        """
        each, wanted = self.gpus_per_node // tp, self.fixed.get("zero_group")
        sharers = [shards, *self._of_nodes(shards, tp)] if wanted is None else [wanted or shards]
        for ep in self._tried("ep", divisors(shards)) if self.spreads else (1,):
            placed = "ep" in self.fixed or each % ep == 0 or ep % each == 0
            divides = placed and shards % ep == 0
            if divides and any(self._share_out(ranks, tp, ep) for ranks in sharers):
                yield ep

    def _share_out(self, ranks: int, tp: int, ep: int) -> bool:
        """Whether so many ranks of a tensor-parallel place may share out experts over `ep`."""
        return ranks % ep == 0 and spreads_experts(self.model, self.training, (ranks, tp), ep)

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
        plain, sharded = self._zero_groups(family)
        for vpp in self._tried("vpp", self._virtual_stages(pp, micro_batches)):
            if pp * vpp > self.model.layers or (vpp > 1 and (pp == 1 or micro_batches % pp)):
                continue
            if vpp > 1 and self.model.carries:
                continue
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
                        for ranks in sharded if zero else plain:
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

    def groups_tried(self, strategy: Strategy) -> list[int]:
        """Zero groups that the strategy may have in place of all ranks."""
        free = "zero_group" not in self.fixed and not strategy.zero_group
        if not (free and strategy.zero):
            return []
        tried = self._of_nodes(strategy.shards, strategy.tp)
        return [ranks for ranks in tried if ranks % strategy.ep == 0]

    def _of_nodes(self, shards: int, tp: int) -> list[int]:
        """Zero groups of a node's ranks, or those of a few nodes, out of so many.

        A smaller group would keep more on each GPU, and gather no faster than over a node's links.
        """
        tried = (nodes * (self.gpus_per_node // tp) for nodes in NODES_TOGETHER if self.hybrid)
        return [ranks for ranks in tried if 1 < ranks < shards and shards % ranks == 0]

    def hybrids(self, strategy: Strategy) -> Iterator[Strategy]:
        """The strategy with each of these zero groups."""
        for ranks in self.groups_tried(strategy):
            yield strategy.model_copy(update={"zero_group": ranks})

    def _zero_groups(self, family: StrategyFamily) -> tuple[list[int], list[int]]:
        """Zero groups without ZeRO and with it: all ranks in one (0), or what is wanted.

        Where not all ranks may share out experts, those of a few nodes may.
        """
        shards, tp, ep = family.dp * family.cp, family.tp, family.ep
        wanted = self.fixed.get("zero_group")
        if wanted:
            several = self.hybrid and wanted in divisors(shards)[1:-1] and wanted % ep == 0
            return [], [0] if wanted == shards else [wanted] * several
        if wanted == 0 or self._share_out(shards, tp, ep):
            return [0], [0]
        return [], [r for r in self._of_nodes(shards, tp) if self._share_out(r, tp, ep)]

    def strategies(self) -> Iterator[Strategy]:
        """Every strategy, without weights for the ends."""
        for family in self.families():
            yield from self.members(family)

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
        if pp > 1 and micro_batches % pp == 0:
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
    """Whether so many ranks have equal parts of all that they share out (undivided)."""
    return not undivided(model, tp)


def undivided(model: ModelSpec, tp: int) -> tuple[str, ...]:
    """What `tp` ranks have no equal parts of, each as name and number.

    `tp` divides heads, channels and the MLP's width, and key-value heads or is divided: where
    there are fewer key-value heads than ranks, neighbouring ranks hold the same head. Of a delta
    rule it divides key heads, of a state space heads and, of several, groups. Each rank adds the
    last biases of its part of the experts.
    """
    names = ("ffn", "shared_ffn", "dense_ffn")
    shared_out = {"heads": model.heads, **dict(zip(names, model.inner_widths, strict=True))}
    if model.mlp_bias:
        shared_out["experts"] = model.experts
    if model.convolution is not None:
        shared_out["hidden"] = model.hidden
    if model.delta_rule is not None:
        shared_out["delta_rule.key_heads"] = model.delta_rule.key_heads
    if (space := model.state_space) is not None:
        shared_out["state_space.heads"] = space.heads
        shared_out["state_space.groups"] = 0 if space.groups == 1 else space.groups
    odd = {name: width for name, width in shared_out.items() if width % tp}
    odd |= {key: n for key, n in _key_heads(model).items() if tp % n and n % tp}
    return tuple(f"{name} {width}" for name, width in odd.items())


def _key_heads(model: ModelSpec) -> dict[str, int]:
    """Key and value heads of all kinds of blocks, by key."""
    far = model.global_heads
    return {"kv_heads": model.kv_heads} | (
        {} if far is None else {"global_heads.kv_heads": far.kv_heads}
    )


def splits_over_context_parallel(model: ModelSpec, tp: int, cp: int) -> bool:
    """Whether `cp` ranks may have equal parts of a tensor-parallel rank's heads."""
    return not unexchanged(model, tp, cp)


def unexchanged(model: ModelSpec, tp: int, cp: int) -> tuple[str, ...]:
    """Heads of a tensor-parallel rank that `cp` ranks cannot exchange, as `name number`.

    `cp` divides the heads of attention, a delta rule and a state space. It goes with those that
    serve several of them each: where there are fewer than `cp`, neighbouring ranks get the same.
    """
    whole, shared = {"heads": model.heads}, _key_heads(model)
    if (rule := model.delta_rule) is not None:
        whole["delta_rule.value_heads"] = rule.value_heads
        shared["delta_rule.key_heads"] = rule.key_heads
    if (space := model.state_space) is not None:
        whole["state_space.heads"] = space.heads
        shared["state_space.groups"] = space.groups
    odd = {name: number for name, number in whole.items() if number // tp % cp}
    for name, number in shared.items():
        own = -(-number // tp)
        if own % cp and cp % own:
            odd[name] = number
    return tuple(f"{name} {number}" for name, number in odd.items())


def spreads_experts(model: ModelSpec, training: Training, ranks: tuple[int, int], ep: int) -> bool:
    """Whether `ep` ranks may have equal parts of the experts, of so many a tensor-parallel place.

    `ranks`: these, and tensor-parallel ones, which have a part of each expert. A rank's elements
    are then whole units for each rank that has the same, and lie before the rest.
    """
    if ep == 1:
        return True
    if not model.experts or model.experts % ep:
        return False
    shards, tp = ranks
    lora, size = training.lora, training.compute_bytes
    kinds = (stored(model, kind, lora, size) for kind in model.kinds())
    elements = (sum(prod(p.local(tp, ep)) for p in kind if p.experts) for kind in kinds)
    unit = lcm(WIDEST_CUT, sharing_scales(training.optimizer.moments))
    return all(of_a_kind % (shards // ep * unit) == 0 for of_a_kind in elements)


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


def _groups(micro_batches: int) -> list[int]:
    powers = [2**i for i in range(GROUPS_TRIED) if micro_batches % 2**i == 0]
    return sorted({*powers, micro_batches})
