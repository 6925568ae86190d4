"""Random first values: the same whatever is asked for, and no more than that is made."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from bigplan.rectangle import Rectangle, all_of
from bigplan.runtime.weights import first_values as module
from bigplan.runtime.weights.first_values import random_values, whole_values
from bigplan.spec.step import Parameter
from tests.rectangles import parts_of

ROWS, COLUMNS = 13, 24
MATRIX = Parameter("q_proj.weight", (ROWS, COLUMNS), "rows", True)
NORM = Parameter("input_norm.weight", (8,), "replicated", False)
BIAS = Parameter("q_proj.bias", (8,), "rows", False)


def _whole(parameter: Parameter, layer: int = 1, seed: int = 5) -> torch.Tensor:
    return random_values("block", layer, parameter, all_of(parameter), seed)


@given(parts_of(MATRIX), st.integers(1, 4 * COLUMNS))
def test_any_rectangle_is_that_of_the_whole_and_draws_no_other_block(
    part: Rectangle, block: int
) -> None:
    with patch.object(module, "BLOCK", block):
        whole = _whole(MATRIX)
        with patch.object(module, "_generator", wraps=module._generator) as seeded:
            found = random_values("block", 1, MATRIX, part, 5)
    assert torch.equal(found, whole[part.in_matrix])
    at_once = max(1, block // COLUMNS)
    assert seeded.call_count == len(
        {row // at_once for row in range(part.first_row, part.last_row)}
    )


def test_they_depend_on_seed_layer_and_name_alone() -> None:
    first = _whole(MATRIX)
    torch.manual_seed(99)
    assert torch.equal(first, _whole(MATRIX))
    assert first.dtype == torch.float32
    renamed = Parameter("k_proj.weight", (ROWS, COLUMNS), "rows", True)
    for other in (_whole(MATRIX, layer=2), _whole(MATRIX, seed=6), _whole(renamed)):
        assert not torch.equal(first, other)


def test_matrices_are_normal_and_no_block_is_like_another() -> None:
    wide = Parameter("up_proj.weight", (64, 1024), "rows", True)
    with patch.object(module, "BLOCK", 4096):
        values = _whole(wide)
    assert len(torch.unique(values.view(16, -1), dim=0)) == 16
    # Of 65,536 values the deviation is known to 0.3% and the mean to 0.00008.
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(values.mean().item()) < 0.0005


def test_norms_start_at_one_and_biases_at_zero() -> None:
    assert torch.equal(_whole(NORM), torch.ones(1, 8))
    assert torch.equal(_whole(BIAS), torch.zeros(1, 8))


@pytest.mark.parametrize("parameter", [MATRIX, NORM])
def test_whole_values_have_the_parameters_shape(parameter: Parameter) -> None:
    found = whole_values(partial(random_values, seed=5), "block", 1, parameter)
    assert found.shape == parameter.shape
    assert torch.equal(found.flatten(), _whole(parameter).flatten())
