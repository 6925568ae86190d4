"""config.json files that are written say what the model is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.errors import RefusedError
from bigplan.spec.catalog import find_model
from bigplan.spec.hf.config import differences, from_hf_config, to_hf_config
from bigplan.spec.model import ModelSpec


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama-3-8b", "llama"),
        ("mistral-7b", "mistral"),
        ("qwen2.5-7b", "qwen2"),
        ("gpt2-xl", "gpt2"),
        ("opt-13b", "opt"),
        ("bloom-176b", "bloom"),
        ("mpt-7b", "mpt"),
        ("phi-3-mini", "mistral"),  # of equal models the first family is written
        ("stablelm-2-1.6b", "stablelm"),
        ("starcoder2-7b", "starcoder2"),
        ("falcon-40b", "falcon"),
        ("gemma-4-31b", "gemma4_text"),
        ("gemma-4-26b-a4b", "gemma4_text"),
        ("gemma-4-e2b", "gemma4_text"),
        ("gemma-4-e4b", "gemma4_text"),
        ("llama-3.2-1b", "llama"),
        ("qwen3-8b", "qwen3"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("qwen1.5-moe-a2.7b", "qwen2_moe"),
        ("glm-4.5", "glm4_moe"),
        ("deepseek-v2", "deepseek_v2"),
        ("deepseek-v2-lite", "deepseek_v2"),
        ("deepseek-v3", "deepseek_v3"),
        ("kimi-k2", "deepseek_v3"),
        ("lfm2-1.2b", "lfm2"),
        ("qwen3-next-80b-a3b", "qwen3_next"),
        ("qwen3.5-27b", "qwen3_5_text"),
        ("olmo-hybrid-7b", "olmo_hybrid"),
        ("qwen3.5-35b-a3b", "qwen3_next"),
        ("granite-4.0-h-micro", "granitemoehybrid"),
        ("falcon-h1-7b", "falcon_h1"),
        ("nemotron-nano-9b-v2", "nemotron_h"),
        ("nemotron-3-nano-30b-a3b", "nemotron_h"),
        ("nemotron-3-super-120b-a12b", "nemotron_h"),
    ],
)
def test_presets_have_their_family(name: str, family: str) -> None:
    model = find_model(name)
    config = to_hf_config(model)
    assert config["model_type"] == family
    assert not differences(model, from_hf_config(config))


@st.composite
def _models(draw: st.DrawFn) -> ModelSpec:
    """Any mixture of what families differ in; most have no family."""
    flag = st.booleans()
    biased, routed = draw(flag), draw(flag)
    experts: dict[str, Any] = {
        "experts": 4,
        "experts_per_token": 2,
        "router_normalised": draw(flag),
        "router_loss": draw(st.sampled_from((0.0, 0.01))),
        "shared_ffn": draw(st.sampled_from((0, 48, 72))),
        "dense_blocks": 1,
        "dense_ffn": draw(st.sampled_from((48, 64))),
        "mlp": "swiglu",
        "mlp_bias": False,
        "parallel_residual": False,
    }
    experts["shared_gate"] = experts["shared_ffn"] > 0 and draw(flag)
    if draw(flag):
        experts |= {"dense_blocks": 0, "dense_ffn": 0}
    if draw(flag):
        routing = {"bias": draw(flag), "scale": draw(st.sampled_from((1.0, 2.5)))}
        experts |= {"router_loss": 0.0, "routing": routing | {"scores": "sigmoid"}}
    return ModelSpec.model_validate(
        {
            "name": "mixed",
            "layers": 2,
            "hidden": 32,
            "ffn": 48,
            "heads": 4,
            "kv_heads": draw(st.sampled_from((4, 2))),
            "vocab": 64,
            "max_sequence_length": 16,
            "norm": draw(st.sampled_from(("rmsnorm", "layernorm"))),
            "norm_epsilon": draw(st.sampled_from((1e-5, 1e-6))),
            "mlp": draw(st.sampled_from(("swiglu", "gelu", "gelu_tanh", "relu"))),
            "positions": draw(st.sampled_from(("rope", "learned", "alibi"))),
            "rotary_fraction": draw(st.sampled_from((1.0, 0.25))),
            "parallel_residual": draw(flag),
            "embedding_norm": draw(flag),
            "tied_embeddings": draw(flag),
            "qk_norm": draw(flag),
            "qkv_bias": biased,
            "attention_output_bias": draw(st.sampled_from((biased, not biased))),
            "mlp_bias": draw(st.sampled_from((biased, not biased))),
            "sliding_window": draw(st.sampled_from((None, 8))),
            "source": "test",
        }
        | (experts if routed else {})
    )


@given(_models())
def test_a_config_is_written_only_where_it_says_the_same(model: ModelSpec) -> None:
    try:
        config = to_hf_config(model)
    except RefusedError:
        return
    assert not differences(model, from_hf_config(config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_norm": True, "mlp_bias": True}, "has qk_norm True, which Hugging Face's llama"),
        ({"norm": "layernorm", "mlp_bias": True}, "has norm layernorm, which"),
        ({"parallel_residual": True}, "parallel_residual True"),
        ({"embedding_norm": True}, "nor another of the families that are written: llama, mistral"),
    ],
)
def test_models_without_a_family_are_refused_by_name(
    changes: dict[str, object], words: str
) -> None:
    llama = find_model("llama-3-8b").model_dump()
    with pytest.raises(RefusedError) as caught:
        to_hf_config(ModelSpec.model_validate(llama | changes))
    assert words in str(caught.value)


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_neox_goes_there_and_back(parallel: bool) -> None:
    neox = {
        "norm": "layernorm",
        "mlp": "gelu",
        "kv_heads": 32,
        "rotary_fraction": 0.25,
        "parallel_residual": parallel,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }
    model = ModelSpec.model_validate(find_model("llama-2-7b").model_dump() | neox)
    config = to_hf_config(model)
    assert config["model_type"] == "gpt_neox"
    assert not differences(model, from_hf_config(config))


def test_rope_scaling_goes_there_and_back() -> None:
    scaling = {
        "name": "llama3",
        "factor": 8.0,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 4.0,
        "original_length": 8192,
    }
    llama = find_model("llama-3-8b").model_dump() | {"rope_scaling": scaling}
    model = ModelSpec.model_validate(llama)
    config = to_hf_config(model)
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert from_hf_config(config).rope_scaling == model.rope_scaling
