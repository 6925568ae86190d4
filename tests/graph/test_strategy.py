from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bigplan.graph.strategy import MAX_MICRO_BATCH_TOKENS, Strategy, divisors, legal_strategies
from bigplan.spec.catalog import find_model
from bigplan.spec.training import Training

MODEL = find_model("llama-3-8b")  # 32 layers, 32 heads, 8 key-value heads


@given(st.integers(1, 3000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize("gpus", [1, 8, 16])
@pytest.mark.parametrize("global_batch", [1, 24, 512])
def test_legal_strategies_use_every_gpu_and_split_evenly(gpus: int, global_batch: int) -> None:
    training = Training(sequence_length=8192, global_batch=global_batch)
    legal = list(legal_strategies(MODEL, training, gpus, min(gpus, 8)))
    assert len(set(legal)) == len(legal)
    for s in legal:
        assert s.ranks == s.dp * s.tp * s.pp == gpus
        assert min(gpus, 8) % s.tp == MODEL.kv_heads % s.tp == MODEL.layers % s.pp == 0
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
        alike = [s for s in legal if (s.tp, s.pp, s.micro_batch) == (2, 1, 1)]
        assert {s.zero for s in alike} == {0, 1, 2, 3}
        assert {s.accumulation_group for s in alike} == {1, 2, 4, 8, 16, 32, 64}


def test_one_gpu_has_no_parallelism() -> None:
    training = Training(sequence_length=128, global_batch=4)
    legal = list(legal_strategies(MODEL, training, 1, 1))
    assert {(s.dp, s.tp, s.pp, s.zero) for s in legal} == {(1, 1, 1, 0)}
    schedules = {(s.micro_batch, s.accumulation_group) for s in legal}
    assert schedules == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 1, "zero": 1}, "zero 1 shards over data-parallel ranks; dp is 1: use zero 0"),
        ({"dp": 0}, "greater than or equal to 1"),
        ({"dp": 1, "vpp": 2}, "less than or equal to 1"),
        ({"dp": 2, "zero": 4}, "less than or equal to 3"),
    ],
)
def test_impossible_strategies(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        Strategy.model_validate(fields)
    assert message in str(error.value)
