"""What plain torch keeps of a norm and of a gate, beside what the graph says that chains keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import embedding, layer_norm, linear, silu

from bigplan.graph.block import block
from bigplan.graph.build import graph_of_shape
from bigplan.graph.graph import Recompute
from bigplan.graph.policies import autocasting
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


def test_autocast_keeps_inputs_of_norms_in_fp32() -> None:
    """Two norms, each before a product and a sum: the table is in fp32, so the sums are, too."""
    width = MODEL.hidden

    def run(dtype: torch.dtype) -> int:
        table, first, second = (torch.randn(width, width, dtype=dtype) for _ in range(3))
        own = [one.requires_grad_() for one in (table, first, second)]

        def residuals() -> torch.Tensor:
            x = embedding(torch.arange(TOKENS), table)
            x = x + linear(layer_norm(x, (width,)), first)
            return x + linear(layer_norm(x, (width,)), second)

        return _kept(residuals, own)

    low = run(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        beyond = run(torch.float32) - low - 2 * 2 * width * width  # two weights in 16 bits
    training = Training(sequence_length=TOKENS, global_batch=1)
    shape = RankShape(MODEL, training, Strategy(dp=1))
    plain = graph_of_shape(shape, None)
    block_then, block_now = plain.kinds["block"], autocasting(plain, shape).kinds["block"]
    assert block_now.saved - block_then.saved == beyond == 2 * 2 * TOKENS * width
    full = Recompute.FULL
    assert block_now.kept(full) == block_now.boundary == 2 * block_then.kept(full)


def test_what_autocast_gathers_is_in_fp32() -> None:
    """A parameter takes 4 bytes and two moments 8; elsewhere its 16-bit copy lives beside them."""
    training = Training(sequence_length=TOKENS, global_batch=2)
    for zero, sizes in ((3, (4, 8)), (1, (2, 12))):
        shape = RankShape(MODEL, training, Strategy(dp=2, zero=zero))
        found = autocasting(graph_of_shape(shape, None), shape).sizes
        assert (found.parameter, found.state) == sizes
