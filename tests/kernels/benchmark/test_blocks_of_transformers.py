"""Blocks that others wrote compute the same with generated kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bigplan.kernels.benchmark import blocks_of_transformers
from bigplan.kernels.benchmark.blocks_of_transformers import Absent
from bigplan.kernels.benchmark.cases import Workload
from bigplan.kernels.here import runs_kernels
from bigplan.kernels.optimised import optimise
from tests.kernels.generated import DEVICE, error, random

# fp32 sums of some hundred terms in another order, through a dozen operators.
FP32 = 1e-5
# One for each kind of attention, norm and positions; each takes some seconds of a core in Triton's
# interpreter. Batch norms are tests/kernels/test_batch_norm.py's.
NAMES = ("GPT-2", "Gemma 2 2B", "T5 base", "ConvNeXt tiny")


def _results(module: Any, workload: Workload, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of the input and of all parameters."""

    def there(value: Any) -> Any:
        return value.to(DEVICE, dtype) if isinstance(value, Tensor) else value

    x = random(1, *workload.shape).to(dtype).requires_grad_()
    result = module(x, **tree_map(there, dict(workload.further)))
    result = result if isinstance(result, Tensor) else result[0]
    gradient = random(2, *result.shape).to(dtype)
    return [result.detach(), *torch.autograd.grad(result, [x, *module.parameters()], gradient)]


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """On a GPU cuDNN's are TF32 by default, three digits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.skipif(not runs_kernels({DEVICE}), reason="needs Triton")
@pytest.mark.parametrize("name", NAMES)
def test_a_block_computes_the_same(name: str) -> None:
    workload = blocks_of_transformers.BLOCKS[name][0].workload(name)
    module = workload.module.to(DEVICE)
    exact = copy.deepcopy(module).double()
    ours = optimise(module)
    expected = _results(exact.train(), workload, torch.float64)
    found = _results(ours.train(), workload, torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < FP32
    assert any(unit.fused is not None for unit in ours.kernels.plans[0].cover.units)


def test_every_block_is_built() -> None:
    found = list(blocks_of_transformers.blocks(small=True))
    assert [w.name for w in found if isinstance(w, Workload)] == [*blocks_of_transformers.BLOCKS]


def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    resnet = blocks_of_transformers.BLOCKS["ResNet-50"]
    gone = tuple(block.__class__(**{**vars(block), "layer": "Gone"}) for block in resnet)
    monkeypatch.setattr(blocks_of_transformers, "BLOCKS", {"ResNet-50": gone})
    (found,) = blocks_of_transformers.blocks(small=True)
    assert isinstance(found, Absent)
    assert found.name == "ResNet-50"
    assert "Gone" in found.reason
