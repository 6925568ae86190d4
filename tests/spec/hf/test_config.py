import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bigplan.errors import InputError, RefusedError
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.hf.config import SUPPORTED_MODEL_TYPES, from_hf_config, load_hf_config
from bigplan.spec.hf.families.layer_types import write_layer_types
from bigplan.spec.hf.families.rope import write_scaling
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_EXPERTS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.rope_scaling import RopeScaling
from tests.presets import one_of_each
from tests.wording import tells

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
_GPT_NEO: dict[str, Any] = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 300}
_GPT_NEO |= {"attention_types": [[["global", "local", "local"], 1]]}
_MPT = {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 300}
_BLOOM = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300}
_PHI3 = _SMALL | {"pad_token_id": None}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 300}
_FALCON |= {"new_decoder_architecture": True}
_STARCODER2 = _SMALL | {"bos_token_id": None, "eos_token_id": None}
_TYPES = ["full_attention", "linear_attention", "linear_attention"]
_GEMMA4 = _SMALL | {"hidden_size_per_layer_input": 0}
_OWN_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": _SMALL["vocab_size"]}
_SHARED_KEYS: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_RULE = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_QWEN3_NEXT = _RULE | {"num_experts": 16}
_LARA = {key: value for key, value in _SMALL.items() if key != "intermediate_size"} | _QWEN3_NEXT
_LARA |= {"num_hidden_layers": 6}
_GRANITE_4 = {"num_local_experts": 0, "shared_intermediate_size": 160, "mamba_n_heads": 8}
_NEMOTRON_H = {key: value for key, value in _SMALL.items() if key != "num_hidden_layers"}
_NEMOTRON_3 = {"hybrid_override_pattern": "ME*E"}
_MAMBA2: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "num_heads": 8,
}
_MAMBA2 |= {"head_dim": 16, "pad_token_id": None}
_BAMBA = {"mamba_n_heads": 16, "pad_token_id": None}
_FALCON_H1: dict[str, Any] = {"mamba_d_ssm": 96, "mamba_n_heads": 6, "pad_token_id": None}
_FALCON_H1 |= {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
_DOTS1 = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
_OF_EXAONE_3: dict[str, object] = {
    key: value for key, value in _SMALL.items() if key != "num_hidden_layers"
}
_OF_EXAONE_3 |= {"activation_function": "silu"}
_OF_SARVAM: dict[str, object] = {
    "num_experts": 8,
    "num_shared_experts": 2,
    "score_function": "sigmoid",
}
_OF_SARVAM |= {"moe_router_enable_expert_bias": True}
_OF_SARVAM_105B: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 576,
    "q_head_dim": 192,
    "rope_theta": 20000.0,
    "rope_scaling": {
        "type": "deepseek_yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_FLASH = {
    "num_key_value_heads": 8,
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "q_lora_rank": None,
}
_ALIKE = {"num_key_value_heads": _SMALL["num_attention_heads"]}
_NEOX = {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}
_OPT = {key: value for key, value in _NEOX.items() if key != "intermediate_size"} | {
    "ffn_dim": 160,
    "word_embed_proj_dim": 64,
}

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
    ("mixtral", _SMALL),
    ("mixtral", _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16}),
    ("mixtral", _SMALL | {"sliding_window": 64, "tie_word_embeddings": True}),
    ("qwen3_moe", _SMALL),
    ("qwen3_moe", _SMALL | {"moe_intermediate_size": 48, "num_experts": 9, "head_dim": 16}),
    ("qwen3_moe", _SMALL | {"norm_topk_prob": True, "attention_bias": True}),
    ("qwen3_moe", _SMALL | {"mlp_only_layers": [0]}),
    ("qwen3_moe", _SMALL | {"num_hidden_layers": 5, "decoder_sparse_step": 2}),
    ("qwen2_moe", _SMALL | {"num_hidden_layers": 4, "mlp_only_layers": [1, 3]}),
    ("qwen2_moe", _SMALL),
    ("qwen2_moe", _SMALL | {"num_experts": 9, "shared_expert_intermediate_size": 24}),
    ("glm4_moe", _SMALL),
    ("glm4_moe", _SMALL | {"n_group": 4, "topk_group": 2, "n_shared_experts": 3}),
    ("dots1", _SMALL | _DOTS1),
    ("lfm2", _SMALL | {"full_attn_idxs": [1], "block_ff_dim": 200, "block_multiple_of": 16}),
    ("lfm2", _SMALL | {"conv_bias": True, "conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3}),
    ("lfm2", _SMALL | {"layer_types": ["conv"] * 3, "block_auto_adjust_ff_dim": False}),
    ("lfm3", _PHI3),
    ("lfm3", _PHI3 | {"layer_types": ["full_attention", "conv", "conv"], "conv_bias": True}),
    (
        "lfm3",
        _PHI3
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True},
    ),
    ("lfm2_moe", _SMALL | {"layer_types": ["conv", "conv", "full_attention"]}),
    (
        "lfm2_moe",
        _SMALL
        | {"layer_types": ["full_attention"] * 3, "num_dense_layers": 0}
        | {"use_expert_bias": False, "routed_scaling_factor": 2.0},
    ),
    ("qwen3_next", _SMALL | _QWEN3_NEXT),
    ("qwen3_next", _SMALL | _QWEN3_NEXT | {"full_attention_interval": 3, "head_dim": 24}),
    (
        "qwen3_next",
        _SMALL
        | _QWEN3_NEXT
        | {"layer_types": ["linear_attention"] * 3, "mlp_only_layers": [0], "attention_bias": True}
        | {"linear_num_key_heads": 4, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 2},
    ),
    ("olmo_hybrid", _PHI3 | {"num_hidden_layers": 4}),
    ("olmo_hybrid", _PHI3 | _RULE | {"layer_types": _TYPES, "linear_allow_neg_eigval": False}),
    ("qwen3_5_text", _SMALL | _RULE),
    ("qwen3_5_text", _SMALL | _RULE | {"head_dim": 24, "tie_word_embeddings": True}),
    ("qwen3_5_moe_text", _SMALL | _QWEN3_NEXT),
    ("lara_mini", _LARA),
    (
        "lara_mini",
        _LARA
        | {"layer_types": ["sliding_attention", *_TYPES[1:]], "num_hidden_layers": 3}
        | {"norm_topk_prob": False, "attention_bias": True},
    ),
    ("cohere_compass_text", _PHI3 | {"rope_parameters": {"full_attention": None}}),
    (
        "cohere_compass_text",
        _PHI3
        | {"layer_types": ["sliding_attention"] * 3, "logit_scale": 0.25}
        | {"rope_parameters": {"sliding_attention": {"rope_theta": 5e4}}},
    ),
    ("granitemoehybrid", _SMALL | _GRANITE_4),
    (
        "granitemoehybrid",
        _SMALL
        | _GRANITE_4
        | {"layer_types": ["mamba", "attention", "mamba"], "attention_bias": True}
        | {"mamba_n_groups": 2, "mamba_d_head": 32, "mamba_n_heads": 4, "mamba_d_state": 24}
        | {"mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3},
    ),
    (
        "granitemoehybrid",
        _SMALL
        | _GRANITE_4
        | {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"}
        | {"tie_word_embeddings": True},
    ),
    (
        "granitemoehybrid",
        _SMALL | {"num_local_experts": 6, "num_experts_per_tok": 3, "mamba_n_heads": 8},
    ),
    ("granitemoe", _SMALL),
    ("granitemoeshared", _SMALL | {"shared_intermediate_size": 96, "num_experts_per_tok": 3}),
    ("ministral3", _SMALL),
    ("cwm", _SMALL),
    ("vaultgemma", _SMALL),
    ("youtu", _SMALL | {"num_key_value_heads": 8}),
    ("hy_v3", _SMALL),
    ("exaone_moe", _SMALL | {"sliding_window_pattern": 3}),
    ("exaone", _SMALL),
    ("exaone", _SMALL | {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
    # as published
    ("exaone", _OF_EXAONE_3 | {"num_layers": 3, "layer_norm_epsilon": 1e-4}),
    ("sarvam_moe", _SMALL | _OF_SARVAM | {"use_qkv_bias": True}),
    ("sarvam_mla", _SMALL | _OF_SARVAM | _OF_SARVAM_105B),
    ("sarvam_moe", _SMALL),
    ("sarvam_moe", _SMALL | {"attention_bias": True, "use_qk_norm": False, "num_experts": 8}),
    ("sarvam_mla", _SMALL | {"num_key_value_heads": 8}),
    ("mellum", _SMALL | {"num_experts": 8}),
    ("bamba", _SMALL | _BAMBA),
    ("bamba", _SMALL | _BAMBA | {"attn_layer_indices": [0, 2], "mlp_bias": True}),
    ("falcon_h1", _SMALL | _FALCON_H1),
    (
        "falcon_h1",
        _SMALL
        | {"mamba_rms_norm": False, "mamba_d_ssm": None, "mamba_n_heads": 8, "head_dim": 24}
        | {"projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True}
        | {"mlp_bias": True, "mamba_n_groups": 2, "pad_token_id": None},
    ),
    ("nemotron_h", _NEMOTRON_H | {"hybrid_override_pattern": "M-*M-"}),
    (
        "nemotron_h",
        _NEMOTRON_H
        | _NEMOTRON_3
        | {"n_routed_experts": 6, "moe_intermediate_size": 48, "n_group": 2, "head_dim": 16}
        | {"moe_shared_expert_intermediate_size": 96, "num_experts_per_tok": 3}
        | {"mamba_num_heads": 6, "ssm_state_size": 24, "n_groups": 2, "use_bias": True},
    ),
    (
        "nemotron_h",
        _NEMOTRON_H | _NEMOTRON_3 | {"moe_latent_size": 40, "n_routed_experts": 6},
    ),
    ("nemotron_h", _NEMOTRON_H | {"hybrid_override_pattern": "M-*EM-E", "intermediate_size": 80}),
    ("nemotron_h", _NEMOTRON_H | {"hybrid_override_pattern": "M*M", "use_conv_bias": False}),
    ("nemotron_h", _NEMOTRON_H | {"hybrid_override_pattern": "-*-", "mlp_bias": True}),
    ("mamba2", _MAMBA2),
    ("mamba2", _MAMBA2 | {"n_groups": 2, "state_size": 24, "tie_word_embeddings": True}),
    ("olmoe", _SMALL),
    ("afmoe", _SMALL | {"num_dense_layers": 1, "global_attn_every_n_layers": 2}),
    ("flex_olmo", _SMALL | {"pad_token_id": None}),
    ("phimoe", _SMALL),
    ("flint", _SMALL | {"num_hidden_layers": 6}),
    ("aria_text", _SMALL | {"moe_num_shared_experts": 1, "tie_word_embeddings": True}),
    ("kolibri1", {k: v for k, v in _SMALL.items() if k != "intermediate_size"} | {"head_dim": 8}),
    ("granite_swa", _SMALL | {"bos_token_id": None, "eos_token_id": None}),
    ("granitemoe_swa", _SMALL | {"shared_intermediate_size": 48, "tie_word_embeddings": True}),
    ("mistral4", _SMALL | {"num_key_value_heads": 8}),
    ("axk1", _SMALL | {"num_key_value_heads": 8, "moe_layer_freq": 1}),
    ("axk1", _SMALL | {"num_key_value_heads": 8, "num_hidden_layers": 5, "moe_layer_freq": 2}),
    ("ernie4_5_moe", _SMALL | {"num_hidden_layers": 7, "moe_layer_interval": 2}),
    ("ernie4_5_moe", _SMALL | {"num_hidden_layers": 7, "moe_layer_end_index": 4}),
    ("hy_v3", _SMALL | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("phimoe", _SMALL | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 64}),
    ("olmoe", _SMALL | {"attention_bias": True, "norm_topk_prob": True}),
    ("minimax_m2", _SMALL),
    ("minimax_m2", _SMALL | {"num_local_experts": 8, "head_dim": 16, "rotary_dim": 8}),
    ("solar_open", _SMALL | {"n_shared_experts": 2}),
    ("hunyuan_v1_moe", _SMALL | {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    ("hunyuan_v1_moe", _SMALL | {"num_experts": 4, "moe_topk": [2] * 3, "head_dim": 8}),
    ("ernie4_5_moe", _SMALL),
    ("ernie4_5_moe", _SMALL | {"moe_layer_start_index": 0, "moe_num_shared_experts": 0}),
    ("glm4_moe_lite", _SMALL | {"num_key_value_heads": 8}),
    ("glm4_moe_lite", _SMALL | _FLASH),
    ("gpt2", _GPT2),
    ("gpt2", _GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
    ("gpt_neox", _NEOX),
    ("gpt_neox", _NEOX | {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", _NEOX | {"tie_word_embeddings": True}),
    ("opt", _OPT),
    ("opt", _OPT | {"activation_function": "gelu", "word_embed_proj_dim": 64}),
    ("opt", _OPT | {"enable_bias": False, "tie_word_embeddings": False}),
    ("phi3", _PHI3),
    ("phi3", _PHI3 | {"sliding_window": 64, "tie_word_embeddings": True}),
    ("stablelm", _SMALL),
    ("stablelm", _SMALL | {"use_qkv_bias": True, "layer_norm_eps": 1e-6}),
    ("starcoder2", _STARCODER2),
    ("starcoder2", _STARCODER2 | {"use_bias": False, "tie_word_embeddings": False}),
    ("falcon", _FALCON),
    ("falcon", _FALCON | {"bias": True, "tie_word_embeddings": False, "num_kv_heads": 2}),
    ("olmo", _PHI3),
    ("olmo", _PHI3 | {"attention_bias": True, "tie_word_embeddings": True}),
    ("nanochat", _PHI3),
    ("nanochat", _PHI3 | {"attention_bias": True, "final_logit_softcapping": None}),
    ("jais2", _SMALL),
    ("helium", _PHI3 | {"attention_bias": True, "head_dim": 8}),
    ("internlm3", _PHI3),
    ("iquestcoder", _SMALL),
    ("hyperclovax", _SMALL),
    ("hyperclovax", _SMALL | {"use_post_norm": False, "attention_multiplier": 0.3}),
    ("gemma4_text", _GEMMA4),
    (
        "gemma4_text",
        _GEMMA4
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
        | {"moe_intermediate_size": 48},
    ),
    ("gemma4_text", _SMALL | _OWN_INPUTS),
    ("gemma4_text", _SMALL | _OWN_INPUTS | _SHARED_KEYS | {"use_double_wide_mlp": True}),
    ("gemma4_unified_text", _SMALL),
    ("apertus", _SMALL | {"hidden_act": "xielu"}),
    ("apertus", _PHI3 | {"attention_bias": True, "tie_word_embeddings": True}),
    ("apertus1p5_text", _PHI3),
    ("gpt_neo", _GPT_NEO),
    ("gpt_neo", _GPT_NEO | {"tie_word_embeddings": False, "intermediate_size": 160}),
    ("gpt_bigcode", _GPT2),
    ("gpt_bigcode", _GPT2 | {"multi_query": False, "tie_word_embeddings": False}),
    ("codegen", _GPT2 | {"rotary_dim": 8}),
    ("codegen", _GPT2 | {"rotary_dim": 16, "n_inner": 100}),
    ("mpt", _MPT),
    ("mpt", _MPT | {"tie_word_embeddings": False}),
    ("granite_swa", _SMALL),
    ("granite_swa", _SMALL | {"layer_rope_theta": [0, 100.0, 100.0], "attention_bias": True}),
    ("minicpm3", _SMALL | {"num_key_value_heads": 8}),
    ("minicpm3", _SMALL | {"num_key_value_heads": 8, "q_lora_rank": None, "scale_depth": None}),
    ("gemma4_text", _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("gemma4_text", _GEMMA4 | {"layer_types": ["full_attention"] * 3, "global_head_dim": 16}),
    ("llama4_text", _SMALL),
    ("llama4_text", _SMALL | {"interleave_moe_layer_step": 2, "num_local_experts": 4}),
    ("llama4_text", _SMALL | {"moe_layers": [2], "no_rope_layers": [1, 0, 1]}),
    ("bloom", _BLOOM),
    ("bloom", _BLOOM | {"tie_word_embeddings": False}),
]


def written_by_transformers(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The whole config.json that transformers writes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    written: dict[str, Any] = json.loads(config.to_json_string())
    return written


def built_by_transformers(model_type: str, fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The config.json that transformers writes with a model, and the parameters that it builds.

    First values are not drawn: on the meta device they would be thrown away.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import_module("tests.registered").register()
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        for module in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(module, "reset_parameters", lambda _: None)
        patch.setattr(transformers.PreTrainedModel, "initialize_weights", lambda _: None)
        model = transformers.AutoModelForCausalLM.from_config(config)
    ends = "e_score_correction_bias", "expert_bias", "layer_scalar", "act_fn.beta", "act_fn.eps"
    biases = (b for name, b in model.named_buffers() if name.endswith(ends))
    count = sum(p.numel() for p in (*model.parameters(), *biases))
    return json.loads(config.to_json_string()), count


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
    written = written_by_transformers(model_type, fields)
    found = from_hf_config(written), from_hf_config({"model_type": model_type} | fields)
    one, other = (model.model_copy(update={"source": ""}) for model in found)
    assert one == other
    further = bool(written.get("num_nextn_predict_layers"))
    assert found[0].source.endswith("predict further tokens") == further


def as_hf_fields(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """The model type and the config that transformers builds this model from."""
    if spec.positions == "alibi" and spec.embedding_norm:
        return "bloom", {
            "hidden_size": spec.hidden,
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "vocab_size": spec.vocab,
        }
    if spec.positions == "alibi":
        return "mpt", {
            "d_model": spec.hidden,
            "n_layers": spec.layers,
            "n_heads": spec.heads,
            "expansion_ratio": spec.ffn // spec.hidden,
            "max_seq_len": spec.max_sequence_length,
            "vocab_size": spec.vocab,
        }
    if spec.shared_norm:
        return _with_one_norm(spec)
    if spec.parallel_residual:
        return "falcon", {
            "hidden_size": spec.hidden,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_kv_heads": spec.kv_heads,
            "vocab_size": spec.vocab,
            "new_decoder_architecture": True,
        }
    if spec.mlp == "gelu_tanh" and spec.positions == "learned":
        return "gpt2", {
            "n_embd": spec.hidden,
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "n_inner": spec.ffn,
            "vocab_size": spec.vocab,
            "n_positions": spec.max_sequence_length,
        }
    shared = {
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_sequence_length,
    }
    if spec.mlp == "relu":
        return "opt", shared | {"ffn_dim": spec.ffn, "word_embed_proj_dim": spec.hidden}
    return _llama_like(spec, shared)


def _of_gemma(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The config of Gemma 2, 3 or 4; types of layers and caps are transformers' defaults."""
    if spec.global_heads is not None:
        return _of_gemma4(spec, llama)
    llama |= {
        "head_dim": spec.head_dim,
        "query_pre_attn_scalar": round(spec.scale_of_scores**-2),
        "sliding_window": spec.sliding_window,
    }
    if spec.score_cap is not None:
        return "gemma2", llama
    told = write_scaling(spec.rope_scaling) or {"rope_type": "default"}
    del llama["rope_theta"]
    return "gemma3_text", llama | {
        "rope_parameters": {
            "full_attention": told | {"rope_theta": spec.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": spec.local_rope_theta},
        }
    }


def _of_gemma4(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Angles and types of layers are transformers' defaults."""
    far = spec.global_heads
    assert far is not None, spec.name
    del llama["rope_theta"]
    of_experts = {
        "enable_moe_block": True,
        "intermediate_size": spec.shared_ffn,
        "moe_intermediate_size": spec.ffn,
        "num_experts": spec.experts,
        "top_k_experts": spec.experts_per_token,
    }
    return "gemma4_text", llama | (of_experts if spec.experts else {}) | {
        "head_dim": spec.head_dim,
        "global_head_dim": far.head_dim,
        "num_global_key_value_heads": far.kv_heads,
        "attention_k_eq_v": far.keys_as_values,
        "sliding_window": spec.sliding_window,
        "final_logit_softcapping": spec.logit_cap,
        "hidden_size_per_layer_input": spec.block_inputs.width if spec.block_inputs else 0,
        "layer_types": write_layer_types(spec),
        **(_of_sharing(spec) if spec.key_sharing else {}),
    }


def _of_sharing(spec: ModelSpec) -> dict[str, Any]:
    assert spec.key_sharing is not None
    return {
        "num_kv_shared_layers": spec.key_sharing.blocks,
        "use_double_wide_mlp": spec.key_sharing.ffn == 2 * spec.ffn,
    }


def _of_deepseek(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Widths of heads are transformers' defaults."""
    latent, routing = spec.latent_attention, spec.routed_by
    assert latent is not None
    told = write_scaling(spec.rope_scaling) or {}
    llama |= {
        "rope_parameters": told | {"rope_theta": spec.rope_theta},
        "q_lora_rank": latent.query_rank,
        "moe_intermediate_size": spec.ffn,
        "intermediate_size": spec.dense_ffn,
        "num_experts_per_tok": spec.experts_per_token,
        "n_routed_experts": spec.experts,
        "n_shared_experts": spec.shared_ffn // spec.ffn,
        "first_k_dense_replace": spec.dense_blocks,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.groups_per_token,
    }
    if routing.scores == "sigmoid":
        return "deepseek_v3", llama
    method = "greedy" if routing.groups == 1 else "group_limited_greedy"
    return "deepseek_v2", llama | {"topk_method": method}


def _with_delta_rule(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Other sizes are transformers' defaults."""
    assert spec.delta_rule is not None
    if spec.norms == "after":
        return "olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    told = llama | {"linear_num_value_heads": spec.delta_rule.value_heads}
    if not spec.experts:
        return "qwen3_5_text", told
    named = "qwen3_next" if spec.name.startswith("qwen3-next") else "qwen3_5_moe_text"
    return named, told | {"num_experts_per_tok": spec.experts_per_token}


def _with_experts(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if spec.delta_rule is not None:
        return _with_delta_rule(spec, llama)
    told = {"num_experts_per_tok": spec.experts_per_token, "router_aux_loss_coef": spec.router_loss}
    if spec.residual_scale != 1 or spec.routed_by.weighs == "inputs":
        return _with_local_experts(spec, llama | told)
    if spec.latent_attention is not None:
        return _of_deepseek(spec, llama)
    if spec.attention_sinks:  # the others are transformers' defaults
        told = {"num_local_experts": spec.experts, "num_hidden_layers": spec.layers}
        return "gpt_oss", told
    if spec.routed_by.bias:
        return "glm4_moe", llama | {
            "moe_intermediate_size": spec.ffn,
            "num_experts_per_tok": spec.experts_per_token,
            "n_routed_experts": spec.experts,
            "head_dim": spec.head_dim,
            "first_k_dense_replace": spec.dense_blocks,
            "intermediate_size": spec.dense_ffn,
            "attention_bias": spec.qkv_bias,
            "use_qk_norm": spec.qk_norm,
            "routed_scaling_factor": spec.routed_by.scale,
        }
    if spec.shared_gate:
        shared = {"shared_expert_intermediate_size": spec.shared_ffn}
        shared |= {"moe_intermediate_size": spec.ffn}
        return "qwen2_moe", llama | told | shared | {"num_experts": spec.experts}
    if not spec.qk_norm:
        return "mixtral", llama | told | {"num_local_experts": spec.experts}
    told |= {"moe_intermediate_size": spec.ffn, "norm_topk_prob": spec.router_normalised}
    return "qwen3_moe", llama | told | {"num_experts": spec.experts, "head_dim": spec.head_dim}


def _with_local_experts(spec: ModelSpec, told: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Granite's, or Llama 4's, whose other sizes are transformers' defaults."""
    told |= {"num_local_experts": spec.experts}
    if spec.residual_scale != 1:
        return "granitemoe", told | _factors(spec)
    scaling = write_scaling(spec.rope_scaling) or {"rope_type": "default"}
    return "llama4_text", {
        "interleave_moe_layer_step": 1 + spec.dense.count(True) // spec.dense.count(False),
        "num_local_experts": spec.experts,
        "rope_parameters": scaling | {"rope_theta": spec.rope_theta},
        "max_position_embeddings": spec.max_sequence_length,
        "use_qk_norm": spec.qk_norm,
    }


def _with_one_norm(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """The config of Cohere, of Phi-2 or of Falcon 7B; layers' types are transformers' default."""
    told: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
    }
    if spec.kv_heads == 1:
        return "falcon", told
    told |= {"intermediate_size": spec.ffn, "num_key_value_heads": spec.kv_heads}
    if spec.head_bias:
        return "phi", told | {"partial_rotary_factor": spec.rotary_fraction}
    told |= {
        "max_position_embeddings": spec.max_sequence_length,
        "rope_theta": spec.rope_theta,
        "logit_scale": spec.logit_scale,
    }
    return ("cohere2" if spec.attention_pattern else "cohere"), told


def _llama_like(spec: ModelSpec, shared: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    llama = shared | {
        "intermediate_size": spec.ffn,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
    }
    llama |= {"tie_word_embeddings": spec.tied_embeddings}
    if spec.mlp == "relu2":
        return _squared(spec, shared, llama)
    if spec.name.startswith("starcoder2"):
        told = {"norm_epsilon": spec.norm_epsilon, "sliding_window": spec.sliding_window}
        return "starcoder2", llama | told
    if spec.norm == "layernorm":
        without = {key: value for key, value in llama.items() if key != "rms_norm_eps"}
        of_stablelm = llama | {"use_qkv_bias": spec.qkv_bias}
        weightless = spec.weightless_norms == "all"
        return ("olmo", without) if weightless else ("stablelm", of_stablelm)
    if spec.name.startswith("phi"):
        return "phi3", llama | {"sliding_window": spec.sliding_window, "pad_token_id": None}
    if (spec.experts and spec.global_heads is None) or spec.delta_rule is not None:
        return _with_experts(spec, llama)
    if spec.norm_plus_one or spec.global_heads is not None:
        return _of_gemma(spec, llama)
    if found := _of_its_own(spec, llama):
        return found
    return _rope_like(spec, llama)


def _squared(
    spec: ModelSpec, shared: dict[str, Any], llama: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Sizes of states and heads are transformers' defaults; NVIDIA's own patterns of letters."""
    if spec.state_space is None:
        return "nemotron", llama | {"norm_eps": spec.norm_epsilon}
    letters = {"state_space": "M", "attention": "*", "mlp": "E" if spec.experts else "-"}
    return "nemotron_h", {key: shared[key] for key in shared if key != "num_hidden_layers"} | {
        "hybrid_override_pattern": "".join(letters[mixer] for mixer in spec.mixers),
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.ffn,
        "mamba_num_heads": spec.state_space.heads,
        "mamba_head_dim": spec.state_space.head_dim,
        "n_routed_experts": spec.experts or 8,
        "num_experts_per_tok": spec.experts_per_token or 2,
        "moe_intermediate_size": spec.ffn,
        "moe_shared_expert_intermediate_size": spec.shared_ffn or 8,
        "moe_latent_size": spec.expert_latent or None,
        "routed_scaling_factor": spec.routed_by.scale,
    }


def _of_its_own(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Families whose blocks, or whose files, no other family has."""
    if spec.qk_norm_whole:
        return "olmo2", llama
    if spec.name.startswith(("ministral-3", "cwm")):
        told = write_scaling(spec.rope_scaling) or {}
        if spec.rope_scaling is not None and spec.rope_scaling.query_growth:
            told["llama_4_scaling_beta"] = spec.rope_scaling.query_growth
        llama |= {"rope_parameters": told | {"rope_theta": spec.rope_theta}}
        return ("cwm" if spec.sliding_window else "ministral3"), llama
    if spec.norms == "after":
        told = write_scaling(spec.rope_scaling) or {}
        llama |= {"rope_parameters": told | {"rope_theta": spec.rope_theta}}
        return "exaone4", llama | {"sliding_window": spec.sliding_window}
    if spec.name.startswith("glm"):
        return "glm", llama
    if spec.name.startswith("seed-oss"):
        return "seed_oss", llama | {"head_dim": spec.head_dim}
    if spec.state_space is not None:
        return _with_state_space(spec, llama)
    if spec.residual_scale != 1:
        return "granite", llama | _factors(spec)
    return None


def _with_state_space(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Other sizes are transformers' defaults."""
    space, beside = spec.state_space, spec.attention_beside
    assert space is not None
    if beside is None:
        types = ["mamba" if mixer == "state_space" else "attention" for mixer in spec.mixers]
        return "granitemoehybrid", llama | {
            "layer_types": types,
            "mamba_n_heads": space.heads,
            "mamba_d_state": space.state,
            "shared_intermediate_size": spec.ffn,
            "num_local_experts": 0,
            **_factors(spec),
        }
    return "falcon_h1", llama | {
        "head_dim": spec.head_dim,
        "mamba_d_ssm": space.width,
        "mamba_n_heads": space.heads,
        "mamba_rms_norm": space.norm,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": list(space.scales),
        "mlp_multipliers": [spec.gate_scale, spec.mlp_scale],
        "key_multiplier": spec.scale_of_scores * spec.head_dim**0.5,
        "attention_out_multiplier": beside.attention_scale,
        "ssm_out_multiplier": beside.other_scale,
        "embedding_multiplier": spec.embedding_scale,
        "lm_head_multiplier": spec.logit_scale,
    }


def _factors(spec: ModelSpec) -> dict[str, Any]:
    """Those of Granite."""
    return {
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_scale,
        "attention_multiplier": spec.score_scale,
        "logits_scaling": 1 / spec.logit_scale,
    }


def _rope_like(spec: ModelSpec, llama: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if spec.convolution is not None:
        types = ["conv" if mixer == "convolution" else "full_attention" for mixer in spec.mixers]
        return "lfm2", llama | {
            "layer_types": types,
            "block_ff_dim": 3 * spec.ffn // 2,
            "norm_eps": spec.norm_epsilon,
        }
    if spec.qk_norm:
        return "qwen3", llama | {"head_dim": spec.head_dim}
    if spec.rope_scaling is not None:
        told = write_scaling(spec.rope_scaling) or {}
        llama |= {"rope_parameters": told | {"rope_theta": spec.rope_theta}}
    if spec.qkv_bias:
        return "qwen2", llama
    if spec.sliding_window:
        return "mistral", llama | {"sliding_window": spec.sliding_window}
    return "llama", llama


@pytest.mark.parametrize("name", one_of_each())
def test_presets_count_as_transformers_does(name: str) -> None:
    spec = find_model(name)
    model_type, fields = as_hf_fields(spec)
    written, count = built_by_transformers(model_type, fields)
    assert spec.parameter_count == count
    if model_type in SUPPORTED_MODEL_TYPES:
        same = {"name": spec.name, "source": spec.source}
        assert from_hf_config(written).model_copy(update=same) == spec


# What the models' own tables and cards state, and to how many digits they do.
_PUBLISHED = {
    # Narayanan et al. 2021, table 1, billions
    "megatron-18b": (18.4e9, 0.1e9),
    "megatron-39b": (39.1e9, 0.1e9),
    "megatron-76b": (76.1e9, 0.1e9),
    "megatron-145b": (145.6e9, 0.1e9),
    "megatron-310b": (310.1e9, 0.1e9),
    "megatron-530b": (529.6e9, 0.1e9),
    "megatron-1t": (1008.0e9, 0.1e9),
    # model cards and their safetensors' totals on Hugging Face
    "bloom-7b1": (7_069_016_064, 0),
    "falcon-40b": (41_303_293_952, 0),
    "falcon-180b": (179e9, 1e9),  # the name is rounded
    "phi-3-mini": (3_821_079_552, 0),
    "phi-3-medium": (13_960_238_080, 0),
    "phi-4": (14_659_507_200, 0),
    "starcoder2-7b": (7_173_923_840, 0),
    "stablelm-3b": (2_795_443_200, 0),
    "stablelm-2-1.6b": (1_644_515_328, 0),
    "llama-3.1-8b": (8_030_261_248, 0),
    "llama-3.1-70b": (70_553_706_496, 0),
    "llama-3.2-1b": (1_235_814_400, 0),
    "llama-3.2-3b": (3_212_749_824, 0),
    # non-embedding parameters of arXiv 2408.00118, table 2, and 256,000 rows of the table
    "gemma-2-2b": (2_024_517_888 + 256_000 * 2304, 0),
    "gemma-2-9b": (8_324_201_984 + 256_000 * 3584, 0),
    "gemma-2-27b": (26_047_480_320 + 256_000 * 4608, 0),
    # the same of arXiv 2503.19786, table 1, in millions
    "gemma-3-1b": (698e6 + 262_144 * 1152, 0.5e6),
    "gemma-3-4b": (3209e6 + 262_208 * 2560, 0.5e6),
    "gemma-3-12b": (10759e6 + 262_208 * 3840, 0.5e6),
    "gemma-3-27b": (25600e6 + 262_208 * 5376, 0.5e6),
    # what their cards say, in billions
    "gemma-4-31b": (30.7e9, 0.05e9),
    "gemma-4-26b-a4b": (25.2e9, 0.05e9),
    # effective ones, and blocks' own tables
    "gemma-4-e2b": (2.3e9 + 262_144 * 35 * 256, 0.05e9),
    # of its GGUF, less 256 numbers of rope and the keys and values that nothing reads
    "gemma-4-e4b": (
        7_518_069_290 - 256 - 15 * (2 * 512 * 2560 + 256) - 3 * (2 * 1024 * 2560 + 512),
        0,
    ),
    "olmo-2-7b": (7.3e9, 0.05e9),
    "olmo-2-13b": (13.7e9, 0.05e9),
    "olmo-2-32b": (32.2e9, 0.05e9),
    "granite-3.3-8b": (8.17e9, 0.005e9),
    "granite-4.0-h-micro": (3e9, 0.5e9),
    "granite-3.0-1b-a400m": (1.3e9, 0.05e9),
    "falcon-h1-7b": (7.59e9, 0.005e9),  # arXiv 2507.22448
    # arXiv 2601.08584, and 2510.02387
    "ministral-3-8b": (8.4e9, 0.1e9),
    "ministral-3-14b": (13.5e9, 0.05e9),
    "cwm-32b": (32e9, 1e9),  # the name is rounded
    "nemotron-h-8b": (8.1e9, 0.05e9),
    "nemotron-nano-9b-v2": (8_888_227_328, 0),
    "nemotron-3-nano-30b-a3b": (31.6e9, 0.05e9),
    "nemotron-3-super-120b-a12b": (120e9, 1e9),  # the name is the count
    "command-r-35b": (35e9, 0.5e9),
    "command-r7b": (8.03e9, 0.005e9),
    "glm-4-9b": (9.4e9, 0.05e9),
    "exaone-4-32b": (30.95e9 + 2 * 102_400 * 5120, 0.005e9),
    "seed-oss-36b": (36e9, 0.5e9),
    "phi-2": (2_779_683_840, 0),
    "falcon-7b": (6_921_720_704, 0),
    "nemotron-4-340b": (9.4e9 + 331.6e9, 0.1e9),
    "qwen3-0.6b": (596_049_920, 0),
    "qwen3-1.7b": (1_720_574_976, 0),
    "qwen3-4b": (4_022_468_096, 0),
    "qwen3-8b": (8_190_735_360, 0),
    "qwen3-14b": (14_768_307_200, 0),
    "qwen3-32b": (32_762_123_264, 0),
    "mixtral-8x7b": (46_702_792_704, 0),
    "qwen3-30b-a3b": (30_532_122_624, 0),
    # arXiv 2508.10925, table 1
    "gpt-oss-20b": (20.91e9, 0.005e9),
    "gpt-oss-120b": (116.83e9, 0.005e9),
    "qwen3-235b-a22b": (235_093_634_560, 0),
    "bloom-176b": (176_247_271_424, 0),
    "gpt2-xl": (1_557_611_200, 0),
    "llama-2-7b": (6_738_415_616, 0),
    "llama-2-13b": (13_015_864_320, 0),
    "llama-2-70b": (68_976_648_192, 0),
    "llama-3-8b": (8_030_261_248, 0),
    "llama-3-70b": (70_553_706_496, 0),
    "llama-3-405b": (405_853_388_800, 0),
    "mistral-7b": (7_241_732_096, 0),
    "qwen2.5-7b": (7_615_616_512, 0),
    "qwen2.5-72b": (72_706_203_648, 0),
    "mpt-7b": (6_649_286_656, 0),
    "mpt-30b": (29.96e9, 0.01e9),
    "mpt-70b": (64.86e9, 0.03e9),  # llm-foundry's table counts biases and learned positions
    # Zhang et al. 2022, table 1: the names are the counts
    "opt-13b": (13e9, 0.5e9),
    "opt-30b": (30e9, 0.5e9),
    "opt-66b": (66e9, 0.5e9),
    "opt-175b": (175e9, 0.5e9),
    # Brown et al. 2020, table 2.1
    "gpt3-175b": (175e9, 0.5e9),
    # Tensors of zai-org's files, 110,468,824,832 and 358,337,791,296, less those of the layer that
    # predicts a second token
    "glm-4.5-air": (106_852_251_264, 0),
    "glm-4.5": (352_797_829_024, 0),
    # LiquidAI's file and card
    "lfm2-1.2b": (1_170_340_608, 0),
    "qwen3-next-80b-a3b": (79_674_391_296, 0),  # Qwen's files, without what predicts further tokens
    # the names are the counts
    "qwen3.5-27b": (27e9, 0.5e9),
    "qwen3.5-35b-a3b": (35e9, 0.5e9),
    "olmo-hybrid-7b": (7e9, 0.5e9),
    # tensors of Qwen's files; Qwen Team 2024, arXiv 2407.10671, table 1
    "qwen1.5-moe-a2.7b": (14_315_784_192, 0),
    "qwen2-57b-a14b": (57.4e9, 0.05e9),
    # the cards' totals; arXiv 2412.19437, section 4.2
    "deepseek-v2-lite": (15_706_484_224, 0),
    "deepseek-v2": (235_741_434_880, 0),
    "deepseek-v3": (671e9, 0.5e9),
    # The files' tensors: those of the card but one scale for 128 x 128 elements in fp8. Its paper,
    # arXiv 2507.20534, says 1.04 T.
    "kimi-k2": (1.026e12, 0.5e9),
    # Meta's card counts 109B and 400B, its towers among them
    "llama-4-scout": (108e9, 0.5e9),
    "llama-4-maverick": (401e9, 0.5e9),
    "olmo-7b": (6.9e9, 0.05e9),
    # this project's own
    "llama-like-3.3b": (3.32e9, 0.01e9),
    "llama-like-5.5b": (5.50e9, 0.01e9),
}


@pytest.mark.parametrize("name", [name for name in list_models() if not name.startswith("tiny")])
def test_published_counts(name: str) -> None:
    count, rounding = _PUBLISHED[name]
    assert find_model(name).parameter_count == pytest.approx(count, rel=0, abs=rounding)


@pytest.mark.parametrize(
    ("name", "billions"),
    # Mistral AI 2023, "Mixtral of experts"; Qwen's cards: the names are the counts
    [
        ("mixtral-8x7b", 12.9),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("qwen1.5-moe-a2.7b", 2.7),
        ("qwen2-57b-a14b", 14.2),
        ("deepseek-v2", 21),
        ("deepseek-v3", 37),
        ("kimi-k2", 32.6),
        ("nemotron-3-nano-30b-a3b", 3.6),
        ("granite-3.0-1b-a400m", 0.43),
        ("llama-4-scout", 17),
        ("llama-4-maverick", 17),
    ],
)
def test_published_counts_of_what_a_token_passes(name: str, billions: float) -> None:
    count = find_model(name).active_parameter_count / 1e9
    assert count == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("model_type", "count"),
    # the cards of EXAONE 3.5 7.8B and Sarvam 105B
    [("exaone", 7.8e9), ("sarvam_mla", 106.0e9)],
)
def test_published_counts_of_what_a_class_builds_by_default(model_type: str, count: float) -> None:
    found = from_hf_config({"model_type": model_type}).parameter_count
    assert found == pytest.approx(count, rel=0, abs=0.05e9)


@pytest.mark.parametrize(
    ("hidden", "ffn", "blocks", "heads", "space", "vocab", "count", "digit"),
    [
        # the 0.5 B's file of tensors; arXiv 2507.22448
        (1024, 2048, 36, (8, 2, 64), (24, 64, 128, 1, False), 32784, 521_411_104, 0),
        (2560, 6144, 32, (10, 2, 128), (32, 128, 256, 1, True), 65537, 3.15e9, 0.005e9),
        (5120, 21504, 72, (20, 4, 128), (32, 128, 256, 2, True), 261120, 33.6e9, 0.05e9),
    ],
)
def test_published_counts_of_falcon_h1(
    hidden: int,
    ffn: int,
    blocks: int,
    heads: tuple[int, int, int],
    space: tuple[int, int, int, int, bool],
    vocab: int,
    count: float,
    digit: float,
) -> None:
    names = ("heads", "head_dim", "state", "groups", "norm")
    sizes = {"hidden": hidden, "ffn": ffn, "layers": blocks, "vocab": vocab}
    sizes |= dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    changed = find_model("falcon-h1-7b").model_dump() | sizes
    changed["state_space"] |= dict(zip(names, space, strict=True))
    found = ModelSpec.model_validate(changed).parameter_count
    assert found == pytest.approx(count, rel=0, abs=digit)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_published_counts_without_the_token_table(name: str, billions: float) -> None:
    """As arXiv 2508.10925, table 1, counts what a token passes."""
    model = find_model(name)
    count = model.active_parameter_count - model.vocab * model.hidden
    assert count / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("idefics3", {}, "model_type 'idefics3' is not supported (supported: "),
        ("idefics3", {}, f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"),
        ("bert", {}, "model_type 'bert' is not supported: it is an encoder"),
        ("t5", {}, "model_type 't5' is not supported: its decoder reads what an encoder gives"),
        ("mixtral", {"router_jitter_noise": 0.1}, "`router_jitter_noise` is 0.1"),
        ("mixtral", {"n_shared_experts": 1}, "`n_shared_experts` is 1: models of type mixtral"),
        ("mixtral", {"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ("qwen2_moe", {"mlp_only_layers": [3]}, "`mlp_only_layers` is [3]"),
        ("qwen2_moe", {"use_sliding_window": True}, "`use_sliding_window` is True"),
        ("qwen3_moe", {"first_k_dense_replace": 3}, "`first_k_dense_replace` is 3: models of"),
        ("glm4_moe", {"shared_expert_intermediate_size": 8}, "is 8: models of type glm4_moe are"),
        ("dots1", _DOTS1 | {"max_window_layers": 1}, "`sliding_window` is 4096"),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 64},
            "`shared_expert_intermediate_size` is 64: models of type qwen3_moe are planned without",
        ),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "max_window_layers": 2},
            "`max_window_layers` is 2",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "`clip_qkv` is 8.0"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "`layer_types` is"),
        ("lfm2", {"full_attn_idxs": [0, 3]}, "`full_attn_idxs` is [0, 3]"),
        ("lfm3", {"layer_types": ["conv", "mamba", "conv"]}, "conv or full_attention or sliding"),
        ("qwen3_next", {"layer_types": ["conv"] * 3}, "`layer_types` is"),
        ("qwen3_5_text", {"attn_output_gate": False}, "`attn_output_gate` is False"),
        ("olmo_hybrid", {"layer_types": ["linear_attention"] * 3}, "supported: blocks of both"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, "`mlp_only_layers` is [0]"),
        (
            "granitemoehybrid",
            _GRANITE_4 | {"mamba_d_head": 24},
            "mamba_expand x hidden_size, 128, over mamba_d_head 24",
        ),
        ("granitemoehybrid", _GRANITE_4 | {"time_step_limit": [0]}, "supported: two numbers"),
        ("nemotron_h", {"hybrid_override_pattern": "M-"}, "attention in one block at least"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "M, *, -, E for each block"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "`layers_block_type` is ['conv']"),
        ("nemotron_h", _NEMOTRON_3 | {"mlp_bias": True}, "`mlp_bias` is True"),
        ("nemotron_h", {"attention_bias": True}, "`attention_bias` is True"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "`mlp_hidden_act` is 'silu'"),
        ("mamba2", {"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ("mamba2", {"expand": 3}, "num_heads x head_dim, 8192, over hidden_size 64"),
        (
            "falcon_h1",
            _FALCON_H1 | {"mamba_norm_before_gate": True},
            "`mamba_norm_before_gate` is True, which is not supported for model_type 'falcon_h1'; "
            "supported: false beside mamba_rms_norm",
        ),
        ("falcon_h1", _FALCON_H1 | {"mlp_multipliers": [0.5]}, "supported: 2 numbers above 0"),
        ("falcon_h1", _FALCON_H1 | {"ssm_multipliers": [0, 1, 1, 1, 1]}, "5 numbers above 0"),
        ("falcon_h1", _FALCON_H1 | {"mamba_n_heads": 5}, "mamba_d_ssm, 96, over mamba_d_head 19"),
        ("falcon_h1", _FALCON_H1 | {"projectors_bias": True}, "as mamba_proj_bias: both products"),
        (
            "falcon_h1",
            _FALCON_H1 | {"attention_bias": True, "attention_in_multiplier": 0.5},
            "`attention_bias` is True",
        ),
        ("bamba", _BAMBA | {"ssm_in_multiplier": 2.0}, "`ssm_in_multiplier` is 2.0: this changes"),
        ("bamba", {"attn_layer_indices": [3]}, "`attn_layer_indices` is [3]"),
        ("bamba", {"attn_layer_indices": [[1]]}, "`attn_layer_indices` is [[1]]"),
        ("bamba", {"attn_layer_indices": [True]}, "`attn_layer_indices` is [True]"),
        ("lfm2", {"full_attn_idxs": [{}]}, "`full_attn_idxs` is [{}]"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "`mlp_only_layers` is 1"),
        ("bamba", {"z_loss_coefficient": 0.1}, "`z_loss_coefficient` is 0.1"),
        ("llama", {"mamba_n_heads": 8}, "`mamba_n_heads` is 8: this changes the architecture"),
        ("minimax_m2", {"scoring_func": "softmax"}, "`scoring_func` is 'softmax'"),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [1, 2]}, "`moe_topk` is [1, 2]"),
        ("hunyuan_v1_moe", {"use_cla": True}, "`use_cla` is True"),
        ("solar_open", {"use_qk_norm": True}, "`use_qk_norm` is True"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense", "sparse", "moe"], "num_key_value_heads": 8},
            "`mlp_layer_types` is",
        ),
        ("cwm", {"mlp_bias": True}, "`mlp_bias` is True"),
        ("deepseek_v3", _ALIKE | {"scoring_func": "softmax"}, "`scoring_func` is 'softmax'"),
        ("deepseek_v2", _ALIKE | {"topk_method": "noaux_tc"}, "`topk_method` is 'noaux_tc'"),
        ("deepseek_v3", _ALIKE | {"attention_bias": True}, "`attention_bias` is True"),
        ("kimi_k2", {"num_key_value_heads": 1}, "`num_key_value_heads` is 1"),
        ("deepseek_v32", {}, "is not supported: its attention sees those tokens alone"),
        ("llama", {"kv_lora_rank": 8}, "`kv_lora_rank` is 8: this changes the architecture"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "transformers' Gemma 3 caps no scores"),
        ("gemma2", {"use_bidirectional_attention": True}, "tokens see those before them"),
        ("phi", {"qk_layernorm": True}, "it is a layer norm with biases"),
        ("gptj", {"tie_word_embeddings": True}, "the head has a bias"),
        ("codegen", {"n_head": 6, "n_embd": 96}, "`n_head` is 6, which is not supported"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "global or local for each block"),
        ("gpt_neo", {"attention_types": ["local"]}, "global or local for each block"),
        ("gpt_neo", {"attention_types": [[["slides"], 24]]}, "global or local for each block"),
        ("mpt", {"attn_config": {"alibi": False}}, "supported: alibi True"),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "supported: clip_qkv None"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "`logit_scale` is 'inv_sqrt_d_model'"),
        ("minicpm3", {"mlp_bias": True}, "`mlp_bias` is True"),
        ("granite_swa", {"layer_rope_theta": [0, 0, 0]}, "one number for all blocks with a window"),
        ("granite_swa", {"layer_rope_theta": [0, None, 1e4]}, "a number for each block"),
        ("granite_swa", {"layer_rope_theta": 1e4}, "a number for each block"),
        (
            "granite_swa",
            {"layer_rope_theta": [1e5, 1e4, 1e4]}
            | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "one number where rope_type is not default",
        ),
        ("cohere", {"use_qk_norm": True}, "its LayerNorm has weights of its own for each head"),
        (
            "cohere_compass_text",
            {"rope_parameters": {"rope_theta": 1e4}},
            "supported: full_attention, which may be null",
        ),
        (
            "cohere_compass_text",
            {"layer_types": ["sliding_attention"] * 3, "rope_parameters": {"full_attention": None}},
            "supported: sliding_attention, by which rope turns blocks with a window",
        ),
        ("cohere2", {"sliding_window": None}, "`sliding_window` is None"),
        ("falcon", {"parallel_attn": False}, "`parallel_attn` is False"),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
            "`num_ln_in_parallel_attn` is 3",
        ),
        ("falcon", {"alibi": True}, "`alibi` is True"),
        ("stablelm", {"qk_layernorm": True}, "`qk_layernorm` is True"),
        ("stablelm", {"use_parallel_residual": True}, "`use_parallel_residual` is True"),
        ("llama4_text", {"layer_types": ["full_attention"] * 3}, "where `no_rope_layers` has 1"),
        ("llama4_text", {"moe_layers": []}, "numbers of blocks with experts, one at least"),
        ("llama4", {"text_config": {"no_rope_layers": [2, 1, 1]}}, "`no_rope_layers` is [2, 1, 1]"),
        ("olmo", {"clip_qkv": 8.0}, "`clip_qkv` is 8.0"),
        ("internlm3", {"qkv_bias": True}, "`qkv_bias` is True"),
        ("internlm3", {"bias": True}, "`bias` is True"),
        ("iquestcoder", {"clip_qkv": 8.0}, "`clip_qkv` is 8.0"),
        ("iquestcoder", {"use_sliding_window": True}, "`use_sliding_window` is True"),
        ("helium", {"mlp_bias": True}, "`mlp_bias` is True"),
        ("exaone", {"activation_function": "gelu"}, "`activation_function` is 'gelu', which"),
        ("sarvam_moe", {"moe_router_enable_expert_bias": False}, "expert_bias` is False, which"),
        ("sarvam_moe", {"use_bias": True}, "`use_bias` is True, which"),
        ("sarvam_mla", _ALIKE | {"score_function": "softmax"}, "`score_function` is 'softmax'"),
        (
            "sarvam_mla",
            _ALIKE | {"moe_shared_expert_intermediate_size": 1024},
            "supported: moe_intermediate_size, which a shared expert has",
        ),
        ("gemma4_text", {"vocab_size_per_layer_input": 9}, "`vocab_size_per_layer_input` is 9"),
        (
            "gemma4",
            {
                "text_config": {
                    "hidden_size_per_layer_input": 0,
                    "use_bidirectional_attention": "all",
                }
            },
            "`use_bidirectional_attention` is 'all'",
        ),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention"] * 3},
            "supported: full_attention for the last block",
        ),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 0, "per_layer_config": {"1": {"head_dim": 16}}},
            "the same head_dim and num_key_value_heads for each full_attention block",
        ),
        ("hy_v3", {"mlp_layer_types": ["sparse", "dense"]}, "`mlp_layer_types` is"),
        ("hy_v3", {"mlp_bias": True}, "`mlp_bias` is True"),
        ("exaone_moe", {"num_local_experts": 8}, "`num_local_experts` is 8"),
        ("afmoe", {"attention_bias": True}, "`attention_bias` is True"),
        ("granite_swa", {"layer_rope_theta": [0, 0, 9.0]}, "`layer_rope_theta` is [0, 0, 9.0]"),
        ("granitemoe_swa", {"layer_rope_theta": [1.0]}, "supported: a number for each block"),
        ("axk1", {"q_lora_rank": None, "num_key_value_heads": 8}, "`q_lora_rank` is None"),
        ("glm4_moe", {"moe_layer_freq": 2}, "`moe_layer_freq` is 2"),
        ("phimoe", {"num_experts_per_tok": 3}, "`num_experts_per_tok` is 3"),
        ("afmoe", {"n_group": 4}, "`n_group` is 4"),
        ("laguna", {}, "model_type 'laguna' is not supported: heads differ from block to block"),
        ("flint", {"output_router_logits": True}, "`router_aux_loss_coef` is 0.0005"),
        ("aria_text", {"mlp_bias": True}, "`mlp_bias` is True"),
        ("mistral4", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "`rope_parameters` is"),
        ("dory", {}, "model_type 'dory' is not supported: norms keep hidden states on a sphere"),
        ("inkling2_loop_text", {}, "is not supported: some of its blocks run several times"),
        ("dbrx", {}, "model_type 'dbrx' is not supported: queries, keys and values are clipped"),
        ("apertus", {"hidden_act": "silu"}, "`hidden_act` is 'silu'"),
        ("apertus1p5_text", {"output_vocab_size": 301}, "supported: at most vocab_size"),
        (
            "apertus1p5_text",
            {"output_vocab_size": 299, "tie_word_embeddings": True},
            "null or vocab_size where tie_word_embeddings is true",
        ),
        ("gpt_oss", {"swiglu_limit": 10.0}, "`swiglu_limit` is 10.0, which is not supported"),
        (
            "deepseek_v32",
            {},
            "mistral3, qwen3_vl_moe, glm4v_moe, llama4, gemma4, gemma4_unified, qwen3_5_moe, or a",
        ),
        ("llama", {"n_routed_experts": 64}, "`n_routed_experts` is 64: experts are read in"),
        ("llama", {"q_lora_rank": 1536}, "`q_lora_rank` is 1536"),
        ("llama", {"num_experts": 8}, "`num_experts` is 8"),
        ("llama", {"num_local_experts": 8}, "`num_local_experts` is 8"),
        ("llama", {"hidden_act": "relu"}, "`hidden_act` is 'relu', which is not supported"),
        ("llama", {"vision_config": {"depth": 2}}, "`vision_config` is set"),
        ("llama", {"quantization_config": {"bits": 4}}, "take a bf16 copy of the model"),
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


def test_no_type_of_transformers_ends_in_a_traceback() -> None:
    """Whatever a causal model's type, it is read with its defaults, or refused in a sentence."""
    pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto

    types = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert len({*types} & {*SUPPORTED_MODEL_TYPES}) > 60
    refused = list[str]()
    for model_type in types:
        for more in ({}, _SMALL):
            try:
                from_hf_config({"model_type": model_type} | more)
            except InputError as error:
                refused.append(str(error))
    for message in refused:  # what is wrong, in quotes, and what to do about it
        told, _, remedy = message.partition("; ")
        assert "'" in told or "`" in told, message
        assert remedy, message


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
    ("changes", "message"),
    [
        ({"word_embed_proj_dim": 32}, "`word_embed_proj_dim` is 32"),
        ({"do_layer_norm_before": False}, "`do_layer_norm_before` is False"),
        ({"_remove_final_layer_norm": True}, "`_remove_final_layer_norm` is True"),
        ({"activation_function": "tanh"}, "`activation_function` is 'tanh'"),
    ],
)
def test_opt_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        from_hf_config({"model_type": "opt"} | _OPT | changes)
    assert message in str(caught.value)


def test_gpt_neox() -> None:
    spec = from_hf_config({"model_type": "gpt_neox"} | _NEOX)
    assert (spec.parallel_residual, spec.rotary_fraction, spec.positions) == (True, 0.25, "rope")
    # as GPT-NeoX-20B's own file has it, older than transformers 5
    old = _NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 20000, "hidden_act": "gelu_fast"}
    spec = from_hf_config({"model_type": "gpt_neox"} | old)
    assert (spec.rotary_fraction, spec.rope_theta) == (0.5, 20000)
    with pytest.raises(RefusedError, match="`hidden_act` is 'relu'"):
        from_hf_config({"model_type": "gpt_neox", "hidden_act": "relu"} | _NEOX)


def test_bloom() -> None:
    # as BLOOM's own file has it
    old = {"n_embed": 64, "n_layer": 3, "num_attention_heads": 4, "vocab_size": 300}
    spec = from_hf_config({"model_type": "bloom", "seq_length": 512, "offset_alibi": 100} | old)
    assert (spec.positions, spec.embedding_norm, spec.ffn) == ("alibi", True, 256)
    assert (spec.heads, spec.max_sequence_length) == (4, 512)
    assert from_hf_config({"model_type": "bloom"} | _BLOOM).max_sequence_length == 2048
    key = "apply_residual_connection_post_layernorm"
    with pytest.raises(RefusedError, match=f"`{key}` is True"):
        from_hf_config({"model_type": "bloom", key: True} | _BLOOM)


def test_adapters_are_refused(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "meta-llama/Llama-2-7b-hf"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(RefusedError) as caught:
        find_model(str(tmp_path))
    assert tells(str(caught.value), "`peft_type`", "'LORA'", "not planned")
    assert "base model ('meta-llama/Llama-2-7b-hf')" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "missing key 'model_type'"),
        ({"model_type": "llama"}, "missing key '"),
        ({"model_type": "llama"} | _SMALL | {"hidden_size": "64"}, "`hidden_size` is '64'"),
        (
            {"model_type": "llama"} | _SMALL | {"num_key_value_heads": 3},
            "not a multiple of `num_key_value_heads` 3",
        ),
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
    scaled = base | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5}}
    assert from_hf_config(scaled).rope_theta == 5e5
    assert from_hf_config(base).sliding_window is None
    sliding = base | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 16}
    assert from_hf_config(sliding).sliding_window == 16
    assert from_hf_config({"model_type": "mistral"} | _SMALL).sliding_window == 4096


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling(key: str) -> None:
    base = {"model_type": "llama", "rope_theta": 5e5} | _SMALL
    scaling = from_hf_config(base | {key: _LLAMA3}).rope_scaling
    assert scaling == RopeScaling(
        name="llama3",
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_length=8192,
    )
    old = from_hf_config(base | {key: {"type": "linear", "factor": 2.0}}).rope_scaling
    assert old == RopeScaling(name="linear", factor=2.0)
    yarn = from_hf_config(base | {key: {"rope_type": "yarn", "factor": 4.0}}).rope_scaling
    assert yarn is not None
    assert (yarn.name, yarn.original_length) == ("yarn", _SMALL["max_position_embeddings"])
    stated = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, "truncate": False}
    yarn = from_hf_config(base | {key: stated}).rope_scaling
    assert yarn is not None
    assert (yarn.angle_factor, yarn.rounded) == (1.7, False)
    assert from_hf_config(base | {key: {"rope_type": "default"}}).rope_scaling is None
    for unknown in ({"rope_type": "mrope"}, {"factor": 2.0, "type": 3}):
        with pytest.raises(RefusedError, match=f"`{key}` is .* supported: rope_type default"):
            from_hf_config(base | {key: unknown})
    with pytest.raises(InputError, match=f"`{key}` is 'llama3', which must be an object"):
        from_hf_config(base | {key: "llama3"})
    with pytest.raises(
        InputError, match=f"rope scaling llama3 needs `{key}.high_freq_factor`; add"
    ):
        from_hf_config(base | {key: {k: v for k, v in _LLAMA3.items() if k != "high_freq_factor"}})


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("llama", {"num_hidden_layers": 5000}, ":4: `num_hidden_layers` is 5000, which must be at"),
        ("llama", {"rms_norm_eps": -1}, ":9: `rms_norm_eps` is -1, which must be greater than 0"),
        ("llama", {"num_attention_heads": 7}, ":2: `hidden_size` 64 is not a multiple of `num_at"),
        ("llama", {"num_key_value_heads": 3}, ":5: `num_attention_heads` 8 is not a multiple of"),
        ("llama", {"rope_theta": "x"}, ":9: `rope_theta` is 'x', which must be a number"),
        ("qwen3", {"head_dim": 15}, ":9: `head_dim` 15 times `partial_rotary_factor` 1 is 15"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": "x"}},
            ":11: `rope_parameters.factor` is 'x', which must be a number",
        ),
        (
            "llama",
            {"rope_scaling": _LLAMA3 | {"low_freq_factor": 9}},
            ":11: `rope_scaling`: `rope_scaling.low_freq_factor` 9 is above `rope_scaling.high",
        ),
        ("gpt2", {"n_layer": 5000}, ":3: `n_layer` is 5000, which must be at most 1000"),
        ("gpt_neox", {"rotary_pct": 2.5}, ":8: `rotary_pct` is 2.5, which must be at most 1"),
        (
            "bloom",
            {"hidden_size": None, "n_embed": 65},
            ":5: `n_embed` 65 is not a multiple of `n_",
        ),
        ("opt", {"ffn_dim": 10**8}, ":7: `ffn_dim` is 100000000, which must be at most"),
        (
            "glm4_moe",
            {"n_routed_experts": 8, "n_group": 3},
            ":10: `n_group` 3 must divide `n_routed_experts` 8 into groups of two or more",
        ),
        (
            "glm4_moe",
            {"first_k_dense_replace": 3},
            ":9: `first_k_dense_replace` 3 of `num_hidden_layers` 3 leaves no block with experts",
        ),
        ("glm4_moe", {"n_shared_experts": -1}, ":9: `n_shared_experts` is -1, which must be a wh"),
        # Lists of so many blocks, heads of 0 columns, a width that is no number.
        ("qwen2", {"num_hidden_layers": 10**12}, ":4: `num_hidden_layers` is 1000000000000, whi"),
        (
            "dots1",
            _DOTS1 | {"first_k_dense_replace": 10**12},
            ":12: `first_k_dense_replace` is 1000000000000, which must be at most 1000",
        ),
        ("hyperclovax", {"hidden_size": 3}, ":2: `hidden_size` 3 is not a multiple of"),
        (
            "falcon_h1",
            _FALCON_H1 | {"hidden_size": 3, "key_multiplier": 0.5},
            ":2: `hidden_size` 3 is not a multiple of",
        ),
        ("lfm2", {"block_ffn_dim_multiplier": 1e308}, ":3: `intermediate_size` is"),
        # DeepSeek's keys by other names.
        (
            "afmoe",
            {"num_dense_layers": "x"},
            ":9: `num_dense_layers` is 'x', which must be a whole",
        ),
    ],
)
def test_problems_have_the_names_and_lines_of_the_file(
    model_type: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    base = {"gpt2": _GPT2, "bloom": _BLOOM, "gpt_neox": _NEOX, "opt": _OPT}.get(model_type, _SMALL)
    config = base | changes | {"model_type": model_type}
    path = tmp_path / "config.json"
    there = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(there, indent=0))
    with pytest.raises(InputError) as caught:
        load_hf_config(path)
    assert f"{path}{told}" in str(caught.value)


def test_what_deepseek_v3_says_of_experts_is_a_model() -> None:
    """Values of its config.json (arXiv 2412.19437, section 4.2): all but its attention."""
    config = {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "intermediate_size": 18432,
    }
    fields = DEEPSEEK_EXPERTS.read(ConfigReader(config, {}, "config.json"))
    usual = find_model("llama-3-8b").model_dump() | {"hidden": 7168, "layers": 61}
    model = ModelSpec.model_validate(usual | fields)
    assert (model.dense_blocks, model.dense_ffn, model.shared_ffn) == (3, 18432, 2048)
    assert model.routed_by.model_dump() == {
        "scores": "sigmoid",
        "jitter": 0.01,
        "score_scale": 1.0,
        "expert_scales": False,
        "bias": True,
        "bias_of": "shares",
        "score_bias": False,
        "groups": 8,
        "groups_per_token": 4,
        "group_best": 2,
        "scale": 2.5,
        "weighs": "outputs",
    }
    assert DEEPSEEK_EXPERTS.write(model).items() <= config.items()


def test_gelus() -> None:
    for activation, mlp in {"gelu_new": "gelu_tanh", "gelu": "gelu"}.items():
        config = {"model_type": "gpt2", "activation_function": activation} | _GPT2
        assert from_hf_config(config).mlp == mlp
    assert from_hf_config({"model_type": "gpt2"} | _GPT2).mlp == "gelu_tanh"
    assert from_hf_config({"model_type": "gpt_neox", "hidden_act": "gelu"} | _NEOX).mlp == "gelu"
    opt = from_hf_config({"model_type": "opt"} | _OPT)
    assert (opt.mlp, opt.position_offset) == ("relu", 2)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "little" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "llama"} | _SMALL))
    assert load_hf_config(path).name == "little"
    assert find_model(str(path.parent)) == find_model(str(path)) == load_hf_config(path)
    beside = path.with_name("little-yarn.json")
    beside.write_text(path.read_text())
    assert load_hf_config(beside).name == "little-yarn"
    path.write_text('{\n"a": 1\n"b": 2}')
    with pytest.raises(InputError, match=r"config\.json:3: not JSON"):
        load_hf_config(path)
    path.write_text("commit: b9e2857\n")
    with pytest.raises(InputError, match=r"config\.json:1: not JSON"):
        load_hf_config(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="no JSON object"):
        load_hf_config(path)


def test_our_own_format_as_json_is_told_to_be_yaml(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(find_model("tiny-llama-test").model_dump_json(exclude_defaults=True))
    with pytest.raises(InputError, match="is YAML: name the file"):
        find_model(str(path))
    found = find_model(str(path.rename(tmp_path / "mine.yaml")))  # which JSON is, too
    assert found == find_model("tiny-llama-test")


def test_every_supported_type_is_in_the_docs() -> None:
    """In a list whose lines say what they have alike, a colon, and the types."""
    usage = (Path(__file__).parents[3] / "docs" / "usage.md").read_text()
    section = usage.partition("## Hugging Face models\n")[2].partition("Of what their files say")[0]
    lines = [line.partition(": ")[2] for line in section.splitlines() if line.startswith("- ")]
    listed = [name.partition(" ")[0] for line in lines for name in line.split(", ")]
    assert sorted(listed) == sorted(SUPPORTED_MODEL_TYPES)
