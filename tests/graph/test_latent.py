"""Bytes that a block with latent attention takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from bigplan.graph.attention import flash_gradients
from bigplan.graph.build import graph_of_shape
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.operators import Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

GIB = 1 << 30
TOKENS, HEADS = 16_384, 128
WIDTHS = {"query_rank": 1536, "kv_rank": 512, "plain_dim": 128, "rope_dim": 64, "value_dim": 128}
FIELDS: dict[str, object] = {
    "name": "DeepSeek-V3's, with its dense MLP",
    "layers": 4,
    "hidden": 7168,
    "ffn": 18_432,
    "heads": HEADS,
    "latent_attention": WIDTHS,
    "vocab": 32_000,
    "max_sequence_length": TOKENS,
    "source": "arXiv 2412.19437",
}


@pytest.fixture
def shape() -> RankShape:
    training = Training(sequence_length=TOKENS, global_batch=1, precision="bf16")
    gpu = find_cluster("h200-1x").group.gpu
    return RankShape.on(gpu, ModelSpec.model_validate(FIELDS), training, Strategy(dp=1))


@pytest.fixture
def block(shape: RankShape) -> LayerKind:
    return graph_of_shape(shape, None).kinds["block"]


def test_a_backward_takes_what_attention_took_on_a_gpu(block: LayerKind) -> None:
    """3.508 GiB on an H200, and the gradient by the result, which was there before."""
    by_result = TOKENS * HEADS * WIDTHS["value_dim"] * 2
    assert block.backward_workspace / GIB == pytest.approx(3.508 + by_result / GIB, rel=0.01)


def test_keys_and_values_that_run_again_have_room_once(shape: RankShape, block: LayerKind) -> None:
    """Beside the gradients, with what else selective recomputation does not keep."""
    columns = WIDTHS["plain_dim"] + WIDTHS["rope_dim"] + WIDTHS["value_dim"]
    made = TOKENS * HEADS * columns * 2
    dropped = block.saved - block.kept(Recompute.SELECTIVE)
    assert block.workspace(Recompute.NONE) == flash_gradients(shape)
    assert block.workspace(Recompute.SELECTIVE) == flash_gradients(shape) + dropped
    assert made < dropped


def test_columns_are_turned_in_one_pass_by_the_kernels(shape: RankShape) -> None:
    """Read and written once; plain torch moves five times as much in five kernels."""
    plain = replace(shape, training=shape.training.model_copy(update={"kernels": "torch"}))
    ours, torchs = (
        {op.name: op for op in graph_of_shape(one, None).kinds["block"].forward}
        for one in (shape, plain)
    )
    turned = 2 * TOKENS * HEADS * WIDTHS["rope_dim"] * 2
    assert stream(ours, "rotary embedding") == (turned, 1)
    assert stream(torchs, "rotary embedding") == (5 * turned, 5)
    assert stream(ours, "keys")[0] == stream(torchs, "keys")[0]
    assert stream(ours, "keys")[1] == 1


def stream(operators: Mapping[str, Operator], name: str) -> tuple[float, int]:
    found = operators[name]
    assert isinstance(found, Stream)
    return found.nbytes, found.launches
