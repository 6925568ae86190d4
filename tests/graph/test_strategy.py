from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bigplan.graph.strategy import Strategy, chunk_blocks
from bigplan.graph.strategy_space import (
    MAX_MICRO_BATCH_TOKENS,
    Space,
    balanced_ends,
    divisors,
    splits_over_context_parallel,
    splits_over_tensor_parallel,
)
from bigplan.spec.catalog import find_model
from bigplan.spec.training import Training

MODEL = find_model("llama-3-8b")  # 32 layers, 32 heads, 8 key-value heads


@pytest.mark.parametrize(
    ("kv_heads", "tp", "splits"),
    [(8, 4, True), (4, 4, True), (2, 4, True), (1, 8, True), (6, 4, False), (3, 8, False)],
)
def test_key_value_heads_are_shared_out_or_repeated_evenly(
    kv_heads: int, tp: int, splits: bool
) -> None:
    model = MODEL.model_copy(update={"heads": 48, "kv_heads": kv_heads})
    assert splits_over_tensor_parallel(model, tp) is splits


@pytest.mark.parametrize(
    ("tp", "cp", "splits"),
    [(1, 2, True), (1, 16, True), (1, 12, False), (4, 8, True), (4, 3, False), (8, 3, False)],
)
def test_context_parallel_ranks_have_whole_heads(tp: int, cp: int, splits: bool) -> None:
    """32 heads of queries, and 8 of keys: shared out, or the same for neighbours."""
    assert splits_over_context_parallel(MODEL, tp, cp) is splits


def test_a_sequence_is_split_where_it_has_more_tokens_than_a_micro_batch() -> None:
    usual = Training(sequence_length=MAX_MICRO_BATCH_TOKENS, global_batch=8)
    assert {s.cp for s in Space(MODEL, usual, 16, 8).strategies()} == {1}
    longer = Training(sequence_length=2 * MAX_MICRO_BATCH_TOKENS, global_batch=2)
    legal = list(Space(MODEL, longer, 16, 8).strategies())
    assert {(s.cp, s.tp) for s in legal} == {
        (cp, tp) for cp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if cp * tp <= 8
    }
    for s in legal:
        assert s.ranks == s.dp * s.cp * s.tp * s.pp == 16
        assert s.shards == s.dp * s.cp
        assert not s.zero or s.shards > 1
        assert s.rank_tokens(longer) * s.cp == s.micro_batch * longer.sequence_length
        assert s.micro_batch == 1 or s.rank_tokens(longer) <= MAX_MICRO_BATCH_TOKENS
    # Two sequences of 131,072 tokens, of which a rank has half.
    assert not any(s.micro_batch == 2 for s in legal if s.cp < 4)


def test_experts_are_spread_over_ranks_of_a_node_or_of_whole_ones() -> None:
    model = find_model("qwen3-30b-a3b")
    training = Training(sequence_length=4096, global_batch=48)
    legal = list(Space(model, training, 24, 8, spreads=True).strategies())
    assert {s.ep for s in legal if s.dp == 24} == {1, 2, 4, 8}  # 24 does not divide 128 experts
    # Of four ranks at each tensor-parallel place of a node.
    assert {s.ep for s in legal if s.tp == 2} == {1, 2, 4}
    assert all(s.dp % s.ep == 0 for s in legal)
    assert {s.ep for s in Space(model, training, 24, 8).strategies()} == {1}
    assert {s.ep for s in Space(MODEL, training, 24, 8, spreads=True).strategies()} == {1}
    wanted = Space(model, training, 24, 8, {"ep": 4}, spreads=True)
    assert {s.ep for s in wanted.strategies()} == {4}
    longer = Training(sequence_length=2 * MAX_MICRO_BATCH_TOKENS, global_batch=48)
    split = [s for s in Space(model, longer, 24, 8, spreads=True).strategies() if s.cp > 1]
    assert {(s.cp, s.ep) for s in split if s.dp == 1 and s.tp == 1} == {
        (cp, ep) for cp in (2, 4, 8) for ep in (1, 2, 4, 8) if cp % ep == 0
    }
    assert all(s.shards % s.ep == 0 for s in split)


def test_a_pinned_split_of_sequences_may_be_any_that_divides() -> None:
    short = Training(sequence_length=96, global_batch=1)
    assert {s.cp for s in Space(MODEL, short, 16, 8, {"cp": 16}).strategies()} == {16}
    odd = Training(sequence_length=100, global_batch=1)
    assert not list(Space(MODEL, odd, 16, 8, {"cp": 8}).strategies())
    assert not list(Space(MODEL, short, 12, 12, {"cp": 12}).strategies())  # 32 heads


@given(st.integers(1, 3000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize("gpus", [1, 8, 16])
@pytest.mark.parametrize("global_batch", [1, 24, 512])
def test_legal_strategies_use_every_gpu_and_split_evenly(gpus: int, global_batch: int) -> None:
    training = Training(sequence_length=8192, global_batch=global_batch)
    legal = list(Space(MODEL, training, gpus, min(gpus, 8)).strategies())
    assert len(set(legal)) == len(legal)
    for s in legal:
        assert s.ranks == s.dp * s.tp * s.pp == gpus
        assert min(gpus, 8) % s.tp == MODEL.kv_heads % s.tp == 0
        assert min(chunk_blocks(MODEL.layers, s)) > 0
        assert s.dp * s.micro_batch * s.accumulation_group * s.units(training) == global_batch
        assert s.micro_batch == 1 or s.micro_batch * 8192 <= MAX_MICRO_BATCH_TOKENS
        assert not s.zero or s.dp > 1
    degrees = {(s.tp, s.pp) for s in legal}
    expected = {
        (tp, pp)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8, 16)
        if gpus % (tp * pp) == 0 and global_batch % (gpus // (tp * pp)) == 0
    }
    assert degrees == expected
    if gpus == 16 and global_batch == 512:
        alike = [s for s in legal if (s.tp, s.pp, s.vpp, s.micro_batch) == (2, 1, 1, 1)]
        assert {s.zero for s in alike} == {0, 1, 2, 3}
        assert {s.accumulation_group for s in alike} == {1, 2, 4, 8, 16, 32, 64}


def test_one_gpu_has_no_parallelism() -> None:
    training = Training(sequence_length=128, global_batch=4)
    legal = list(Space(MODEL, training, 1, 1).strategies())
    assert {(s.dp, s.tp, s.pp, s.zero) for s in legal} == {(1, 1, 1, 0)}
    schedules = {(s.micro_batch, s.accumulation_group) for s in legal}
    assert schedules == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}


@pytest.mark.parametrize(
    ("blocks", "fields", "chunks"),
    [
        (8, {"pp": 4}, (2, 2, 2, 2)),
        (10, {"pp": 4}, (3, 3, 2, 2)),
        (10, {"pp": 4, "first_blocks": 2, "last_blocks": 1}, (2, 4, 3, 1)),
        (10, {"pp": 4, "last_blocks": 1}, (3, 3, 3, 1)),
        (8, {"pp": 2, "vpp": 2}, (2, 2, 2, 2)),
        (7, {"pp": 1}, (7,)),
        (7, {"pp": 2, "first_blocks": 4, "last_blocks": 3}, (4, 3)),
    ],
)
def test_blocks_are_cut_into_chunks(
    blocks: int, fields: dict[str, int], chunks: tuple[int, ...]
) -> None:
    assert chunk_blocks(blocks, Strategy(dp=1, **fields)) == chunks


@given(
    st.integers(2, 30),
    st.integers(2, 6),
    st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    st.sampled_from((0.0, 0.4, 1.7, 3.0, 40.0)),
)
def test_no_split_is_better_balanced(blocks: int, chunks: int, first: float, last: float) -> None:
    if blocks < chunks:
        return

    def slowest(split: tuple[int, int]) -> float:
        strategy = Strategy(dp=1, pp=chunks, first_blocks=split[0], last_blocks=split[1])
        parts = chunk_blocks(blocks, strategy)
        ends = parts[0] + first, parts[-1] + last
        return max(*ends, *parts[1:-1])

    every = [(f, n) for f in range(1, blocks) for n in range(1, blocks)]
    if chunks == 2:
        legal = [split for split in every if sum(split) == blocks]
    else:
        legal = [split for split in every if blocks - sum(split) >= chunks - 2]
    found = balanced_ends(blocks, chunks, (first, last))
    assert found in legal
    assert slowest(found) == min(slowest(split) for split in legal)


def test_virtual_stages_need_full_rounds() -> None:
    training = Training(sequence_length=8192, global_batch=24)
    legal = [s for s in Space(MODEL, training, 8, 8).strategies() if s.vpp > 1]
    assert legal
    for s in legal:
        assert (s.accumulation_group, s.first_blocks, s.last_blocks) == (1, 0, 0)
        assert s.zero <= 1
        assert MODEL.layers % (s.pp * s.vpp) == 0  # as many as divide, where stages are alike
        assert s.micro_batches(training) % s.pp == 0


def test_virtual_stages_where_stages_are_not_alike_make_none_larger() -> None:
    """126 blocks over 16 stages: chunks of 4 and 3, or of 2 and 1, at most 8 blocks a stage."""
    model = MODEL.model_copy(update={"layers": 126})
    training = Training(sequence_length=8192, global_batch=32)
    space = Space(model, training, 16, 16, {"pp": 16})
    assert {s.vpp for s in space.strategies()} == {1, 2, 4}
    for s in space.strategies():
        chunks = chunk_blocks(126, s)
        assert max(sum(chunks[stage :: s.pp]) for stage in range(16)) == 8


@pytest.mark.parametrize(
    "fixed",
    [
        {"accumulation_group": 3},
        {"pp": 4, "first_blocks": 5, "last_blocks": 7},
        {"pp": 3, "dp": 2, "tp": 1},
        {"sequence_parallel": 0},
        {"micro_batch": 6},
    ],
)
def test_fixed_values_need_only_be_legal(fixed: dict[str, int]) -> None:
    training = Training(sequence_length=1024, global_batch=24)
    gpus = 6 if fixed.get("pp") == 3 else 8
    legal = list(Space(MODEL, training, gpus, gpus, fixed).strategies())
    assert legal
    for strategy in legal:
        assert all(getattr(strategy, name) == value for name, value in fixed.items())
    assert not list(Space(MODEL, training, 8, 8, {"accumulation_group": 5}).strategies())
    assert not list(Space(MODEL, training, 8, 8, {"pp": 8, "first_blocks": 30}).strategies())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 1, "zero": 1}, "zero 1 shards over data-parallel ranks; dp is 1: use zero 0"),
        ({"dp": 0}, "greater than or equal to 1"),
        ({"dp": 1, "vpp": 2}, "pp is 1, accumulation_group 1, zero 0: use pp > 1"),
        ({"dp": 1, "pp": 2, "vpp": 2, "accumulation_group": 2}, "use pp > 1, groups of 1"),
        ({"dp": 2, "pp": 2, "vpp": 2, "zero": 2}, "and zero 0 or 1"),
        ({"dp": 2, "zero": 4}, "less than or equal to 3"),
    ],
)
def test_impossible_strategies(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        Strategy.model_validate(fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dp": 8, "zero": 0, "zero_group": 2}, "zero is 0"),
        ({"dp": 8, "zero": 3, "zero_group": 3}, "8 ranks with the same parameters"),
        ({"dp": 8, "zero": 3, "zero_group": 8}, "leave zero_group out for one group of all"),
        ({"dp": 8, "zero": 3, "zero_group": 1}, "several groups of several ranks"),
        ({"dp": 8, "zero": 2, "zero_group": 2, "ep": 4}, "use a multiple of ep"),
        ({"dp": 12, "zero": 2, "zero_group": 6, "ep": 4}, "use a multiple of ep"),
    ],
)
def test_zero_groups_are_several_of_several_ranks(given: dict[str, int], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Strategy(**given)


def test_ranks_of_a_zero_group_share_one_copy() -> None:
    hybrid = Strategy(dp=4, cp=2, zero=3, zero_group=4)
    assert (hybrid.zero_ranks, hybrid.zero_copies) == (4, 2)
    usual = Strategy(dp=4, cp=2, zero=3)
    assert (usual.zero_ranks, usual.zero_copies) == (8, 1)
    assert Strategy(dp=8).zero_ranks == 1
    assert "zero_group" not in usual.model_dump()  # plans of before stay as they are


def test_ranks_of_a_zero_group_share_out_experts_of_their_own() -> None:
    ways = ((0, 4), (8, 2), (4, 1))
    shared = [Strategy(dp=16, ep=4, zero=2, zero_group=group).expert_shards() for group, _ in ways]
    assert shared == [ranks for _, ranks in ways]
