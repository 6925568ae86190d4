"""What the native runtime refuses, and that it says why."""

from __future__ import annotations

import pytest

from bigplan.engines import executable, native_refusal
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec

LENGTH = 64
DATA_PARALLEL = Strategy(dp=2)


def _model(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(find_model("tiny-llama-test").model_dump() | changes)


def test_llama_blocks_and_data_parallelism_are_executed() -> None:
    model = _model(tied_embeddings=True, qk_norm=True, qkv_bias=True)
    assert native_refusal(model, DATA_PARALLEL, LENGTH) is None
    assert executable(model, DATA_PARALLEL, LENGTH)["native"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "layernorm"}, "norm layernorm"),
        ({"mlp": "gelu"}, "mlp gelu"),
        ({"positions": "learned"}, "positions learned"),
        ({"sliding_window": 32}, "sequence_length of at most 32"),
    ],
)
def test_other_architectures_are_named(changes: dict[str, object], words: str) -> None:
    model = _model(**changes)
    assert words in (native_refusal(model, DATA_PARALLEL, LENGTH) or "")
    assert words in str(executable(model, DATA_PARALLEL, LENGTH)["native"])


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Strategy(dp=1, tp=2), "tp 2"),
        (Strategy(dp=1, pp=2), "pp 2"),
        (Strategy(dp=2, zero=3), "zero 3"),
        (Strategy(dp=2, tp=2, zero=1), "tp 2, zero 1"),
    ],
)
def test_other_strategies_are_named(strategy: Strategy, words: str) -> None:
    assert words in (native_refusal(_model(), strategy, LENGTH) or "")


def test_a_window_as_long_as_the_sequence_is_executed() -> None:
    model = _model(sliding_window=32)
    assert native_refusal(model, DATA_PARALLEL, 32) is None
    assert native_refusal(model, DATA_PARALLEL, 33) is not None
