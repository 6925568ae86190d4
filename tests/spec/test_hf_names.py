"""Every parameter has its place in a Hugging Face file, and every such tensor its parameters."""

from __future__ import annotations

import pytest

from bigplan.spec.catalog import find_model
from bigplan.spec.hf_names import hf_tensors, stored


@pytest.mark.parametrize(
    ("name", "family"),
    [("llama-3-8b", "llama"), ("qwen2.5-7b", "qwen2"), ("gpt2-xl", "gpt2"), ("opt-13b", "opt")],
)
def test_tensors_hold_every_parameter_once(name: str, family: str) -> None:
    model = find_model(name)
    tensors = hf_tensors(family, model)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    pieces = [(p.layer, p.parameter.name) for tensor in tensors for p in tensor.pieces]
    expected = [
        (layer, parameter.name)
        for layer, kind in enumerate(model.layer_sequence())
        for parameter in model.kinds()[kind]
    ]
    assert sorted(pieces) == sorted(expected)
    total = sum(p.parameter.count for tensor in tensors for p in tensor.pieces)
    assert total == model.parameter_count


def test_gpt2_keeps_queries_keys_and_values_in_one_transposed_matrix() -> None:
    assert stored("gpt2", 3, "k_proj.weight").tensor == "transformer.h.2.attn.c_attn.weight"
    assert [stored("gpt2", 3, f"{name}_proj.bias").part for name in "qkv"] == [0, 1, 2]
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors("gpt2", find_model("gpt2-xl"))}
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (1600, 4800)
    assert shapes["transformer.h.0.attn.c_attn.bias"] == (4800,)
    assert shapes["transformer.h.47.mlp.c_proj.weight"] == (6400, 1600)
    assert shapes["transformer.wpe.weight"] == (1024, 1600)
