"""Dimensions that a model would rather have: as little larger as helps, at the price they have."""

from __future__ import annotations

import pytest

from bigplan.planner import Request, make_plan
from bigplan.report.shapes import Rounding, roundings
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

FLASH = Training(sequence_length=2048, global_batch=2)
MATERIALISED = FLASH.model_copy(update={"attention": "materialised"})
GOOD = {"layers": 4, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}


def found(training: Training = FLASH, **dimensions: int) -> dict[str, Rounding]:
    shape = {**GOOD, "head_dim": 128, "max_sequence_length": 4096, **dimensions}
    model = find_model("tiny-llama-test").model_copy(update=shape)
    settings: dict[str, str | int | float] = {"tp": 1, "micro_batch": 1, "recompute": "none"}
    plan = make_plan(Request(model, training, find_cluster("h200-1x"), settings))
    return {rounding.dimension: rounding for rounding in roundings(plan)}


def test_good_dimensions_are_left_alone() -> None:
    assert found() == {}


@pytest.mark.parametrize(
    ("dimension", "value", "rounded"),
    [
        ("vocab", 32003, 32064),
        ("ffn", 14341, 14344),
        ("hidden", 4100, 4104),
    ],
)
def test_an_odd_dimension_is_rounded_as_little_as_helps(
    dimension: str, value: int, rounded: int
) -> None:
    every = found(FLASH, **{dimension: value})
    rounding = every[dimension]
    assert rounding.value == value
    assert rounding.rounded >= rounded
    assert rounding.rounded % rounding.multiple == 0
    assert rounding.rounded <= 1.1 * value
    assert 0 < rounding.gain < 1
    assert set(every) == {dimension}


def test_a_vocabulary_is_padded_to_a_tile_even_if_less_would_help() -> None:
    assert found(vocab=32003)["vocab"].rounded % 64 == 0


def test_the_gain_is_what_the_changed_model_is_priced_at() -> None:
    rounding = found(vocab=32003)["vocab"]
    assert rounding.gain == pytest.approx(1 - rounding.rounded_seconds / rounding.seconds)


def test_the_scores_of_odd_heads_are_slow_where_they_are_matrix_products() -> None:
    assert found(MATERIALISED, head_dim=124)["head_dim"].rounded == 128
    assert found(MATERIALISED) == {}
