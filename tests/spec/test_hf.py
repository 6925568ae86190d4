import json
from pathlib import Path
from typing import Any

import pytest

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.hf import SUPPORTED_MODEL_TYPES, from_hf_config, load_hf_config
from bigplan.spec.model import ModelSpec

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 128}

_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", _SMALL),
    ("llama", _SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", _SMALL | {"head_dim": 24}),
    ("mistral", _SMALL),
    ("mistral", _SMALL | {"sliding_window": None, "head_dim": 16}),
    ("qwen2", _SMALL),
    ("qwen2", _SMALL | {"tie_word_embeddings": True}),
    ("qwen3", _SMALL),
    ("qwen3", _SMALL | {"attention_bias": True, "head_dim": 8, "tie_word_embeddings": True}),
    ("gpt2", _GPT2),
    ("gpt2", _GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
]


def built_by_transformers(model_type: str, fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The whole config.json that transformers writes, and the parameters that it builds."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return json.loads(config.to_json_string()), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("model_type", "fields"), _CASES)
def test_parameter_counts_are_those_of_transformers(
    model_type: str, fields: dict[str, Any]
) -> None:
    written, count = built_by_transformers(model_type, fields)
    assert from_hf_config(written).parameter_count == count
    # Keys that are left out have the defaults of transformers.
    assert from_hf_config({"model_type": model_type} | fields).parameter_count == count


@pytest.mark.parametrize(("model_type", "fields"), _CASES)
def test_short_config_means_the_same_as_the_written_one(
    model_type: str, fields: dict[str, Any]
) -> None:
    written, _ = built_by_transformers(model_type, fields)
    assert from_hf_config(written) == from_hf_config({"model_type": model_type} | fields)


def as_hf_fields(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    if spec.mlp == "gelu":
        return "gpt2", {
            "n_embd": spec.hidden,
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "n_inner": spec.ffn,
            "vocab_size": spec.vocab,
            "n_positions": spec.max_sequence_length,
        }
    return "llama", {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_sequence_length,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
    }


@pytest.mark.parametrize("name", list_models())
def test_presets_count_as_transformers_does(name: str) -> None:
    spec = find_model(name)
    written, count = built_by_transformers(*as_hf_fields(spec))
    assert spec.parameter_count == count
    read = from_hf_config(written)
    same = {"name": spec.name, "source": spec.source}
    assert read.model_copy(update=same) == spec


def test_published_counts() -> None:
    published = {"llama-3-8b": 8030261248, "llama-3-70b": 70553706496, "gpt2-xl": 1557611200}
    assert {name: find_model(name).parameter_count for name in published} == published
    assert find_model("gpt3-175b").parameter_count == pytest.approx(175e9, rel=0.01)
    assert find_model("llama-like-3.3b").parameter_count == pytest.approx(3.32e9, rel=0.002)
    assert find_model("llama-like-5.5b").parameter_count == pytest.approx(5.50e9, rel=0.002)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {}, "model_type 'mixtral' is not supported; did you mean"),
        ("bert", {}, "(supported: llama, mistral, qwen2, qwen3, gpt2)"),
        ("llama", {"num_experts": 8}, "`num_experts` is 8"),
        ("llama", {"num_local_experts": 8}, "`num_local_experts` is 8"),
        ("llama", {"hidden_act": "relu"}, "`hidden_act` is 'relu', which is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
        ("llama", {"quantization_config": {"bits": 4}}, "`quantization_config` is set"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "`max_window_layers` is 2"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "`layer_types` is ['full_attention', 'sliding_attention']",
        ),
    ],
)
def test_unsupported_is_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        from_hf_config({"model_type": model_type} | _SMALL | changes)
    assert message in str(caught.value)


def test_gpt2_refusals() -> None:
    for key, value in {
        "activation_function": "relu",
        "scale_attn_weights": False,
        "add_cross_attention": True,
        "scale_attn_by_inverse_layer_idx": True,
    }.items():
        with pytest.raises(RefusedError, match=key):
            from_hf_config({"model_type": "gpt2", key: value} | _GPT2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "missing key 'model_type'"),
        ({"model_type": "llama"}, "missing key '"),
        ({"model_type": "llama"} | _SMALL | {"hidden_size": "64"}, "`hidden_size` is '64'"),
        ({"model_type": "llama"} | _SMALL | {"num_key_value_heads": 3}, "not a multiple of kv_h"),
        ({"model_type": "llama"} | _SMALL | {"rms_norm_eps": "x"}, "must be a number"),
    ],
)
def test_broken_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        from_hf_config(config, "c.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("c.json")


def test_rope_parameters_and_sliding_window() -> None:
    base = {"model_type": "qwen2"} | _SMALL
    scaled = base | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}
    assert from_hf_config(scaled).rope_theta == 5e5
    assert from_hf_config(base).sliding_window is None
    sliding = base | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 16}
    assert from_hf_config(sliding).sliding_window == 16
    assert from_hf_config({"model_type": "mistral"} | _SMALL).sliding_window == 4096


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "little" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "llama"} | _SMALL))
    assert load_hf_config(path).name == "little"
    assert find_model(str(path.parent)) == find_model(str(path)) == load_hf_config(path)
    path.write_text('{\n"a": 1,\n}')
    with pytest.raises(InputError, match=r"config\.json:3: not JSON"):
        load_hf_config(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="no JSON object"):
        load_hf_config(path)


def test_supported_types() -> None:
    assert SUPPORTED_MODEL_TYPES == ("llama", "mistral", "qwen2", "qwen3", "gpt2")
