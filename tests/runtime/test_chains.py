"""What plain torch keeps of a norm and of a gate, beside what the graph says that chains keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear, silu

from bigplan.graph.block import block
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_model
from bigplan.spec.step import StepOp
from bigplan.spec.training import Training

MODEL = find_model("llama-3-8b").model_copy(
    update={"hidden": 64, "ffn": 160, "heads": 2, "kv_heads": 2, "head_dim": 32}
)
TOKENS = 48


def _kept(run: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> int:
    """Bytes that autograd keeps, without parameters and statistics of a token."""
    kept: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in parameters}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel() > TOKENS:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(kept.values())


def _chained() -> dict[StepOp, int]:
    training = Training(sequence_length=TOKENS, global_batch=1)
    return dict(block(RankShape(MODEL, training, Strategy(dp=1))).chained)


def test_a_plain_norm_keeps_an_fp32_copy_and_the_scaled_values() -> None:
    """As transformers and torchtune write it; a fused one keeps its input."""
    x = torch.randn(TOKENS, MODEL.hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(MODEL.hidden, dtype=torch.bfloat16, requires_grad=True)

    def norm() -> torch.Tensor:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * scaled.to(x.dtype)

    beyond = _kept(norm, [x, weight]) - x.numel() * x.element_size()
    assert 2 * beyond == _chained()[StepOp.NORM]  # a block has two


def test_a_plain_gate_keeps_what_silu_gives() -> None:
    """Beside gate, up and their product, which the next layer keeps."""
    shape = (TOKENS, MODEL.ffn)
    gate, up = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    down = torch.randn(MODEL.hidden, MODEL.ffn, dtype=torch.bfloat16, requires_grad=True)
    kept = _kept(lambda: linear(silu(gate) * up, down), [down])
    assert kept - 3 * gate.numel() * gate.element_size() == _chained()[StepOp.ACTIVATION]


@pytest.mark.parametrize("name", ["gpt2-xl", "gpt3-175b"])
def test_torchs_own_norms_and_gelu_keep_no_more(name: str) -> None:
    training = Training(sequence_length=TOKENS, global_batch=1)
    shape = RankShape(find_model(name), training, Strategy(dp=1))
    assert not any(block(shape).chained.values())
