"""Saved activations against published formulas; runtime/layers/test_layers.py: autograd's."""

from __future__ import annotations

from dataclasses import replace

from bigplan.graph.activations import BlockShape, block_saved_bytes, boundary_bytes
from bigplan.spec.model import ModelSpec


def _model(**changes: object) -> ModelSpec:
    fields = {
        "name": "test",
        "layers": 2,
        "hidden": 64,
        "ffn": 160,
        "heads": 4,
        "vocab": 96,
        "max_sequence_length": 4096,
        "source": "test",
    }
    return ModelSpec.model_validate(fields | changes)


def test_boundary_is_the_input() -> None:
    model = _model()
    assert boundary_bytes(model, 34, 2) == 2 * 17 * 64 * 2


def test_tensor_parallelism_splits_all_but_the_residual_stream() -> None:
    model = _model(heads=8, kv_heads=4)
    one, four = (block_saved_bytes(model, BlockShape(64, 32, 2, tensor_parallel=t)) for t in (1, 4))
    whole = 64 * (4 * model.hidden * 2 + 2 * 4)
    assert (one - whole) == 4 * (four - whole)


def test_kv_heads_are_replicated_when_there_are_too_few() -> None:
    model = _model(heads=8, kv_heads=1)
    per_token = 4 * 64 * 2 + 2 * 4 + (2 * 1 + 2 * 1) * 8 * 2 + 4 + 3 * 20 * 2
    assert block_saved_bytes(model, BlockShape(32, 32, 2, tensor_parallel=8)) == 32 * per_token


def test_gelu_and_layernorm() -> None:
    plain = _model(norm="layernorm", mlp="gelu", positions="learned")
    per_token = (4 * 64 + 4 * 64 + 2 * 160) * 2 + (4 + 4) * 4
    assert block_saved_bytes(plain, BlockShape(64, 32, 2)) == 64 * per_token


def test_published_activation_formulas() -> None:
    """arXiv 2205.05198, equations 2 and 4: s b h (10 + 24/t + 5 a s/(h t)) and (34 + 5 a s/h)/t.

    Statistics of the norms, 16 bytes a token, are not in them.
    """
    gpt = _model(norm="layernorm", mlp="gelu", positions="learned", hidden=64, ffn=256, heads=8)
    gpt = gpt.model_copy(update={"head_dim": 8, "kv_heads": 8})
    tokens, length, ways = 64, 32, 4
    shape = BlockShape(tokens, length, 2, ways, materialised=True, dropout=True)
    scores = 5 * 8 * length // ways
    plain = block_saved_bytes(gpt, shape)
    assert plain == tokens * (64 * 10 + 64 * 24 // ways + scores + 16)
    split = block_saved_bytes(gpt, replace(shape, sequence_parallel=True))
    assert split == tokens * (64 * 34 // ways + scores + 4)
