"""Tiny models of transformers, one per family and variant, and ours of the same weights."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any, cast

import torch
import transformers

from bigplan.runtime.constants import terms_of
from bigplan.runtime.layers import blocks
from bigplan.runtime.operators import capped
from bigplan.runtime.weights.rope_pairs import apart
from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.config import from_hf_config
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.weights import hf_tensors, stored
from bigplan.spec.layers import BLOCK_SCALE
from bigplan.spec.model import ModelSpec
from bigplan.spec.xielu import EDGE, SLOPE
from tests.registered import register
from tests.runtime.handing import hidden_states

register()
SEED = 3
LENGTH = 20
WINDOW = 7  # tokens that a token of a model with a sliding window sees
# Byte tokens, so that the bundled text trains them too.
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
LLAMA = SIZES | {
    "intermediate_size": 112,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
GPT2 = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "vocab_size": 256,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
PHI3 = LLAMA | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
STABLELM = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
STARCODER2 = STABLELM | {"bos_token_id": None, "eos_token_id": None}
FALCON = SIZES | {
    "num_kv_heads": 2,
    "ffn_hidden_size": 112,
    "new_decoder_architecture": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
OPT = SIZES | {"ffn_dim": 112, "word_embed_proj_dim": 48, "dropout": 0.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QUARTER = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
NEOX = SIZES | {"intermediate_size": 112}
BLOOM = {"hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
QWEN3_MOE = LLAMA | {
    "head_dim": 16,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
DEEPSEEK = SIZES | {
    "intermediate_size": 112,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
}
OF_DEEPSEEK = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
BESIDE = LLAMA | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": False,
}
QWEN2_MOE = BESIDE | {"num_experts": 6, "shared_expert_intermediate_size": 56}
GLM4_MOE = BESIDE | {
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
    },
}
SARVAM_MOE = GLM4_MOE | {"rope_parameters": LLAMA["rope_parameters"]}
GLM_FLASH = {"mlp_layer_types": ["dense", "dense", "sparse"]}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT_OSS = (
    LLAMA
    | NO_TOKENS
    | {"head_dim": 16, "num_hidden_layers": 3, "intermediate_size": 40, "sliding_window": WINDOW}
    | {"num_local_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": False}
    | {"rope_parameters": YARN | {"truncate": False}}
)
GEMMA = (
    {key: value for key, value in LLAMA.items() if key != "rope_parameters"}
    | NO_TOKENS
    | {"head_dim": 16, "num_hidden_layers": 3}
)
GEMMA2 = GEMMA | {
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 0.7,  # which scores of random weights reach
    "final_logit_softcapping": 1.5,
}
GEMMA3 = GEMMA | {
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GEMMA4 = GEMMA | {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 1.5,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 5000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
MISTRAL4 = (
    DEEPSEEK
    | OF_DEEPSEEK
    | NO_TOKENS
    | {
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "rope_parameters": YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8}
        | {"llama_4_scaling_beta": 0.5},
    }
)
GEMMA4_MOE = GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}
GEMMA4_E = GEMMA4 | {
    "num_hidden_layers": 5,  # two of which read the keys of the first
    "layer_types": [
        *("sliding_attention", "full_attention"),
        *("sliding_attention", "sliding_attention", "full_attention"),
    ],
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
GRANITE = LLAMA | {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
OLMO = LLAMA | NO_TOKENS
NANOCHAT = OLMO | {"final_logit_softcapping": 1.5, "attention_bias": True}
# Chunks hide tokens, and queries grow from the third position on.
LLAMA4 = (
    LLAMA
    | NO_TOKENS
    | {"head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 40}
    | {"intermediate_size_mlp": 112, "num_local_experts": 6, "attention_chunk_size": LENGTH // 4}
    | {"no_rope_layer_interval": 3, "floor_scale": 3, "attn_scale": 0.4}
    | {"tie_word_embeddings": False, "rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}
)
JAIS2 = {key: value for key, value in OLMO.items() if key != "rms_norm_eps"}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 3}
LFM2 = (
    LLAMA
    | NO_TOKENS
    | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    | {"block_multiple_of": 16, "norm_eps": 1e-4}
)
LFM2_MOE = {key: value for key, value in LFM2.items() if key != "block_multiple_of"} | {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "moe_intermediate_size": 24,
    "num_dense_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
LFM3 = (
    LLAMA
    | NO_TOKENS
    | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "norm_eps": 1e-4}
    | {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"]}
    | {"rope_parameters": GEMMA4["rope_parameters"], "tie_word_embeddings": False}
)
_RULES = (
    {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
    | {"linear_value_head_dim": 8, "rope_parameters": QUARTER}
)
QWEN3_NEXT = QWEN2_MOE | _RULES
QWEN3_5 = LLAMA | _RULES | {"head_dim": 16, "num_hidden_layers": 3, "attention_bias": True}
LARA_MINI = {key: value for key, value in QWEN2_MOE.items() if key != "intermediate_size"} | _RULES
LARA_MINI |= {"sliding_window": WINDOW, "rope_parameters": LLAMA["rope_parameters"]}
LARA_MINI |= {"layer_types": ["sliding_attention", "linear_attention", "full_attention"]}
OLMO_HYBRID = LLAMA | _RULES | NO_TOKENS | {"num_hidden_layers": 3, "num_key_value_heads": 3}
NO_ROPE = {"rope_type": "default", "rope_theta": None}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_expand": 2,
}
GRANITE_HYBRID = (
    {key: value for key, value in GRANITE.items() if key != "rope_parameters"}
    | NO_TOKENS
    | MAMBA
    | {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3}
    | {"num_local_experts": 0, "shared_intermediate_size": 112, "tie_word_embeddings": True}
)
FALCON_H1 = (
    {key: value for key, value in LLAMA.items() if key != "attention_bias"}
    | NO_TOKENS
    | MAMBA
    | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    | {"attention_in_multiplier": 0.8, "attention_out_multiplier": 0.7, "key_multiplier": 0.6}
    | {"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.4, "mlp_multipliers": [0.7, 0.6]}
    | {"ssm_multipliers": [0.9, 0.6, 1.4, 0.7, 1.2]}
    | {"embedding_multiplier": 1.5, "lm_head_multiplier": 0.5}
)
# transformers 5.23 raises time steps to `time_step_min`, whatever `time_step_limit` is.
MAMBA_ALONE = {"n_groups": 2, "use_conv_bias": True, "time_step_min": 1e-9}
NEMOTRON_H = (
    {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    | NO_TOKENS
    | MAMBA_ALONE
    | {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "head_dim": 16}
    | {"intermediate_size": 112, "num_key_value_heads": 2, "ssm_state_size": 10}
    | {"mamba_num_heads": 6, "mamba_head_dim": 12}
)
MAMBA2 = (
    {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    | NO_TOKENS
    | MAMBA_ALONE
    | {"num_heads": 6, "head_dim": 16, "state_size": 10}
)
ERNIE_MOE = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
}
OLMO3 = OLMO | {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
OLMO3_YARN = OLMO3 | {
    "rope_parameters": {
        "full_attention": YARN | {"attention_factor": 1.3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
# Queries grow from the third position on.
MINISTRAL3 = {
    "rope_parameters": YARN
    | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.4}
    | {"mscale": 1.0, "mscale_all_dim": 1.0}
}
CWM = LLAMA | {"num_hidden_layers": 3, "sliding_window": WINDOW, "head_dim": 16}
CWM["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
HY_V3 = BESIDE | {"num_experts": 8, "num_shared_experts": 2}
EXAONE_MOE = (
    BESIDE
    | NO_TOKENS
    | {
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    }
)
AFMOE = (
    {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    | NO_TOKENS
    | ROUTED
    | {
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "sliding_window": WINDOW,
        "global_attn_every_n_layers": 2,
        "mup_enabled": True,
    }
)
PHIMOE = (
    LLAMA
    | NO_TOKENS
    | {
        "num_local_experts": 6,
        "router_jitter_noise": 0.3,
        "attention_bias": True,
        "lm_head_bias": True,
    }
)
MELLUM = OLMO3 | {
    "head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 40,
    **ROUTED,
}
MELLUM["rope_parameters"] = {
    "full_attention": LLAMA["rope_parameters"],
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
YOUTU = {k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"} | NO_TOKENS
GRANITE_MOE = GRANITE | {"intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 3}
HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 20.0, "factor": 1.0}
COHERE = NO_TOKENS | {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
COHERE2 = COHERE | {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "logit_scale": 0.25,
}
NEAR = {"rope_type": "default", "rope_theta": 100.0}
COHERE_COMPASS = COHERE2 | {
    "rope_parameters": {
        "full_attention": None,
        "sliding_attention": NEAR | {"mrope_section": [2, 1, 1]},
    },
}
GLM = LLAMA | NO_TOKENS | {"head_dim": 16}
GLM["rope_parameters"] = QUARTER | {"partial_rotary_factor": 0.5}
EXAONE4 = OLMO3 | {"rope_parameters": LLAMA["rope_parameters"], "head_dim": 16}
EXAONE4_GLOBAL = OLMO | {
    "sliding_window": None,
    "sliding_window_pattern": None,
    "layer_types": ["full_attention", "full_attention"],
}
NEMOTRON = NO_TOKENS | {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
NEMOTRON["rope_parameters"] = QUARTER
PHI = NO_TOKENS | {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
PHI["rope_parameters"] = QUARTER | {"partial_rotary_factor": 0.5}
GPTJ = {key: value for key, value in GPT2.items() if key != "n_head"} | {
    "n_head": 3,
    "rotary_dim": 4,
}
CODEGEN = GPTJ | {"n_head": 4}
GPT_NEO = {key: value for key, value in SIZES.items() if "num_" not in key} | NO_TOKENS
GPT_NEO |= {"num_layers": 3, "num_heads": 6, "window_size": WINDOW}
GPT_NEO["attention_types"] = [[["global", "local"], 1], [["local"], 1]]
MPT = NO_TOKENS | {"d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": 256, "max_seq_len": 64}
# One base of blocks that slide and one of others, or none of these.
GRANITE_SWA = GRANITE | NO_TOKENS | {"num_hidden_layers": 3, "sliding_window": WINDOW}
GRANITE_SWA |= {"layer_rope_theta": [5000.0, 100.0, 100.0], "tie_word_embeddings": False}
MINICPM3 = YOUTU | {"rope_parameters": LINEAR, "v_head_dim": None}
APERTUS = {"rope_parameters": LLAMA3, "dtype": "float32"}  # of which its activation's numbers are
# Shorter and longer sequences than the pre-training's have divisors of their own.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 7.0],
    "original_max_position_embeddings": 16,
}
OF_PHIMOE = {  # up to the pre-training's length, from where transformers has no longer divisors
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 7.0, 8.0, 9.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 64,
}
KOLIBRI = ({k: v for k, v in LLAMA.items() if k != "intermediate_size"} | NO_TOKENS | ROUTED) | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
FLINT = QWEN2_MOE | {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_only_layers": [],
}
ARIA = {"moe_num_experts": 6, "moe_topk": 3, "attention_bias": True}
OF_GRANITE = {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 56}
LONGROPE_OF_FOUR = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 7.0, 9.0, 11.0]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama-mha-tied": ("llama", LLAMA | {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-bias": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama3-scaling": ("llama", LLAMA | {"rope_parameters": LLAMA3}),
    "yarn-scaling": ("llama", LLAMA | {"rope_parameters": YARN}),
    "linear-scaling": ("llama", LLAMA | {"rope_parameters": LINEAR}),
    "mistral": ("mistral", LLAMA | {"sliding_window": LENGTH}),
    "mistral-window": ("mistral", LLAMA | {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": False}),
    "qwen2-window": (
        "qwen2",
        LLAMA
        | {"tie_word_embeddings": False, "use_sliding_window": True}
        | {"sliding_window": WINDOW, "max_window_layers": 0},
    ),
    "qwen2-some-windows": (
        "qwen2",
        LLAMA
        | {"use_sliding_window": True, "num_hidden_layers": 3}
        | {"sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "smollm3": ("smollm3", LLAMA | NO_TOKENS | {"no_rope_layer_interval": 2}),
    "gemma": ("gemma", GEMMA),
    "gemma-untied-bias": ("gemma", GEMMA | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-uncapped": (
        "gemma2",
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-capped": ("gemma3_text", GEMMA3 | {"final_logit_softcapping": 1.5}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-unified": ("gemma4_unified_text", GEMMA4),
    "gemma4-values": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": False, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma4-experts": ("gemma4_text", GEMMA4_MOE),
    "gemma4-e": ("gemma4_text", GEMMA4_E),
    "gemma4-e-narrow": ("gemma4_text", GEMMA4_E | {"use_double_wide_mlp": False}),
    "gemma4-inputs": ("gemma4_text", GEMMA4_E | {"num_kv_shared_layers": 0}),
    "gemma4-global": ("gemma4_text", GEMMA4 | {"layer_types": ["full_attention"] * 3}),
    "olmo": ("olmo", OLMO),
    "olmo-mha-tied": ("olmo", OLMO | {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "nanochat": ("nanochat", NANOCHAT),
    "llama4": ("llama4_text", LLAMA4),
    "llama4-interleaved": (
        "llama4_text",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "jais2": ("jais2", JAIS2),
    "helium": ("helium", LLAMA | NO_TOKENS | {"head_dim": 8, "attention_bias": True}),
    "internlm3": (
        "internlm3",
        LLAMA | NO_TOKENS | {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "iquestcoder": ("iquestcoder", LLAMA | NO_TOKENS | {"head_dim": 16}),
    "hyperclovax": (
        "hyperclovax",
        GRANITE | NO_TOKENS | {"logits_scaling": 0.3, "tie_word_embeddings": True},
    ),
    "hyperclovax-no-norms": (
        "hyperclovax",
        LLAMA | NO_TOKENS | {"use_post_norm": False, "tie_word_embeddings": False},
    ),
    "olmo2": ("olmo2", OLMO),
    "olmo2-mha-tied": ("olmo2", OLMO | {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", OLMO3),
    "olmo3-yarn": ("olmo3", OLMO3_YARN),
    "hunyuan": ("hunyuan_v1_dense", OLMO | {"head_dim": 16, "attention_bias": True}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        OLMO | {"rope_parameters": HUNYUAN_ROPE, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "granite": ("granite", GRANITE),
    "granite-bias-tied": (
        "granite",
        GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "cohere": ("cohere", COHERE),
    "cohere-untied-bias": (
        "cohere",
        COHERE | {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.7},
    ),
    "cohere2": ("cohere2", COHERE2),
    "cohere-compass": ("cohere_compass_text", COHERE_COMPASS),
    "cohere-compass-turned": (
        "cohere_compass_text",
        COHERE_COMPASS
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEAR}}
        | {"logit_scale": None, "tie_word_embeddings": False},
    ),
    "glm": ("glm", GLM),
    "glm-no-bias": ("glm", GLM | {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4": ("glm4", GLM),
    "ernie4.5": ("ernie4_5", LLAMA | NO_TOKENS | {"head_dim": 16}),
    "ernie4.5-bias": ("ernie4_5", LLAMA | NO_TOKENS | {"use_bias": True}),
    "exaone": ("exaone", LLAMA | NO_TOKENS),
    "exaone-bias-tied": (
        "exaone",
        LLAMA
        | NO_TOKENS
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": LLAMA3},
    ),
    "exaone4": ("exaone4", EXAONE4),
    "exaone4-global": ("exaone4", EXAONE4_GLOBAL),
    "seed-oss": ("seed_oss", LLAMA | NO_TOKENS | {"head_dim": 16, "residual_dropout": 0.0}),
    "arcee": ("arcee", LLAMA | NO_TOKENS),
    "arcee-bias": ("arcee", LLAMA | NO_TOKENS | {"attention_bias": True, "mlp_bias": True}),
    "nemotron": ("nemotron", NEMOTRON),
    "ministral": (
        "ministral",
        LLAMA
        | {"num_hidden_layers": 3, "sliding_window": WINDOW, "head_dim": 16}
        | {"layer_types": OLMO3["layer_types"]},
    ),
    "ministral3": ("ministral3", LLAMA | NO_TOKENS | {"head_dim": 16} | MINISTRAL3),
    "cwm": ("cwm", CWM),
    "vaultgemma": ("vaultgemma", GEMMA2),
    "youtu": ("youtu", YOUTU),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16, "tie_word_embeddings": False}),
    "phi3": ("phi3", PHI3),
    "phi3-long": ("phi3", PHI3 | {"rope_parameters": LONGROPE}),
    "phi3-short": (
        "phi3",
        PHI3 | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}},
    ),
    "phi3-window": ("phi3", PHI3 | {"sliding_window": WINDOW, "num_key_value_heads": 6}),
    "stablelm": ("stablelm", STABLELM | {"use_qkv_bias": True, "rope_parameters": QUARTER}),
    "stablelm-tied": ("stablelm", STABLELM | {"tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", STARCODER2),
    "starcoder2-window": (
        "starcoder2",
        STARCODER2 | {"sliding_window": WINDOW, "use_bias": False, "tie_word_embeddings": False},
    ),
    "falcon": ("falcon", FALCON),
    "falcon-untied-bias": ("falcon", FALCON | {"tie_word_embeddings": False, "bias": True}),
    "falcon-7b": ("falcon", FALCON | {"new_decoder_architecture": False}),
    "falcon-7b-many-keys": (
        "falcon",
        FALCON
        | {"new_decoder_architecture": False, "multi_query": False, "bias": True}
        | {"num_kv_heads": 6},
    ),
    "falcon-11b": ("falcon", FALCON | {"num_ln_in_parallel_attn": 1}),
    "phi": ("phi", PHI),
    "gptj": ("gptj", GPTJ),
    "apertus": ("apertus", LLAMA | NO_TOKENS | APERTUS),
    "apertus-bias-tied": (
        "apertus",
        LLAMA | NO_TOKENS | APERTUS | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "apertus1.5": ("apertus1p5_text", LLAMA | NO_TOKENS | APERTUS | {"tie_word_embeddings": False}),
    "codegen": ("codegen", CODEGEN),
    "gpt-neo": ("gpt_neo", GPT_NEO),
    "gpt-neo-global-untied": (
        "gpt_neo",
        GPT_NEO
        | {"attention_types": [[["global"], 3]], "tie_word_embeddings": False}
        | {"intermediate_size": 112, "activation_function": "gelu"},
    ),
    "gpt-bigcode": ("gpt_bigcode", GPT2),
    "gpt-bigcode-many-keys": ("gpt_bigcode", GPT2 | {"multi_query": False, "n_inner": 112}),
    "mpt": ("mpt", MPT),
    "mpt-untied": ("mpt", MPT | {"tie_word_embeddings": False}),
    "granite-swa": ("granite_swa", GRANITE_SWA),
    "granite-swa-no-rope": (
        "granite_swa",
        GRANITE_SWA
        | {"layer_rope_theta": [0, 100.0, 100.0], "rope_parameters": LINEAR}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "minicpm3": ("minicpm3", MINICPM3),
    "minicpm3-one-matrix-of-queries": (
        "minicpm3",
        MINICPM3
        | {"q_lora_rank": None, "v_head_dim": 12, "scale_depth": None, "dim_model_base": None}
        | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0} | LONGROPE_OF_FOUR},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied-gelu": (
        "gpt2",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 112},
    ),
    "opt": ("opt", OPT),
    "gpt-neox": ("gpt_neox", NEOX | {"rope_parameters": QUARTER}),
    "gpt-neox-one-after-the-other": (
        "gpt_neox",
        NEOX
        | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "bloom": ("bloom", BLOOM),
    "bloom-untied": ("bloom", BLOOM | {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3-moe-one": (
        "qwen3_moe",
        QWEN3_MOE | {"num_experts": 3, "num_experts_per_tok": 1},
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK),
    "deepseek-v3-one-matrix-of-queries": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v3-halves": (
        "deepseek_v3",
        DEEPSEEK | {"rope_interleave": False, "rope_parameters": LINEAR},
    ),
    "deepseek-v3-experts": ("deepseek_v3", DEEPSEEK | OF_DEEPSEEK),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "deepseek-v2-experts": ("deepseek_v2", DEEPSEEK | OF_DEEPSEEK | {"n_shared_experts": 2}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        DEEPSEEK | OF_DEEPSEEK | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek-v2-one-matrix-of-queries": (
        "deepseek_v2",
        DEEPSEEK | {"q_lora_rank": None, "rope_parameters": LINEAR | {"rope_type": "default"}},
    ),
    "qwen3-moe-dense": (
        "qwen3_moe",
        QWEN3_MOE | {"num_hidden_layers": 3, "mlp_only_layers": [0]},
    ),
    "qwen3-moe-turns": (
        "qwen3_moe",
        QWEN3_MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe-dense": (
        "qwen2_moe",
        QWEN2_MOE | {"mlp_only_layers": [0, 1], "norm_topk_prob": True, "qkv_bias": False},
    ),
    "glm4-moe": ("glm4_moe", GLM4_MOE | {"attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-groups": (
        "glm4_moe",
        GLM4_MOE
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
    ),
    "glm4-moe-bare": (
        "glm4_moe",
        GLM4_MOE | {"first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "dots1": (
        "dots1",
        GLM4_MOE
        | {"rope_parameters": LLAMA["rope_parameters"], "n_shared_experts": 2}
        | {"norm_topk_prob": True, "sliding_window": None},
    ),
    "olmoe": ("olmoe", OLMO | ROUTED),
    "flex_olmo": ("flex_olmo", OLMO | ROUTED),
    "olmoe-bias": ("olmoe", OLMO | ROUTED | {"attention_bias": True, "norm_topk_prob": True}),
    "minimax-m2": (
        "minimax_m2",
        OLMO
        | {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3}
        | {"rotary_dim": 8},
    ),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        DEEPSEEK | OF_DEEPSEEK | NO_TOKENS | {"rms_norm_eps": 1e-3, "v_head_dim": 18} | GLM_FLASH,
    ),
    "solar-open": (
        "solar_open",
        {key: value for key, value in GLM4_MOE.items() if key != "first_k_dense_replace"}
        | NO_TOKENS
        | {"attention_bias": True, "n_shared_experts": 2}
        | {"rope_parameters": LLAMA["rope_parameters"]},
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        OLMO | {"head_dim": 16, "num_experts": 6, "moe_topk": [2, 2]},
    ),
    "ernie4.5-moe": ("ernie4_5_moe", LLAMA | NO_TOKENS | ERNIE_MOE),
    "ernie4.5-moe-turns": (
        "ernie4_5_moe",
        LLAMA | NO_TOKENS | ERNIE_MOE | {"num_hidden_layers": 5, "moe_layer_interval": 2},
    ),
    "ernie4.5-moe-unshared": (
        "ernie4_5_moe",
        LLAMA | NO_TOKENS | ERNIE_MOE | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-bare": (
        "gpt_oss",
        GPT_OSS
        | {"attention_bias": False, "tie_word_embeddings": True, "num_experts_per_tok": 2}
        | {"rope_parameters": LLAMA["rope_parameters"], "layer_types": ["full_attention"] * 3},
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2-bias-untied": (
        "lfm2",
        LFM2
        | {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}
        | {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention"]},
    ),
    "lfm2-moe": ("lfm2_moe", LFM2_MOE),
    "lfm2-moe-bare": (
        "lfm2_moe",
        LFM2_MOE
        | {"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False}
        | {"routed_scaling_factor": 2.5, "conv_bias": True},
    ),
    "lfm3": ("lfm3", LFM3),
    "lfm3-bias-bare": (
        "lfm3",
        LFM3
        | {"attention_bias": True, "conv_bias": True, "tie_word_embeddings": True}
        | {"use_sandwich_norm": False, "use_attention_gate": False, "conv_L_cache": 3}
        | {"layer_types": ["full_attention", "conv", "conv", "full_attention"]},
    ),
    "qwen3-next": ("qwen3_next", QWEN3_NEXT),
    "olmo-hybrid": ("olmo_hybrid", OLMO_HYBRID | {"rope_parameters": NO_ROPE}),
    "olmo-hybrid-rope": (
        "olmo_hybrid",
        OLMO_HYBRID
        | {"rope_parameters": LLAMA["rope_parameters"], "linear_allow_neg_eigval": False},
    ),
    "qwen3.5": ("qwen3_5_text", QWEN3_5),
    "qwen3.5-moe": ("qwen3_5_moe_text", QWEN3_NEXT),
    "lara-mini": ("lara_mini", LARA_MINI),
    "lara-mini-global": (
        "lara_mini",
        LARA_MINI
        | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
        | {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-next-turns": (
        "qwen3_next",
        QWEN3_NEXT
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "layer_types": None}
        | {"full_attention_interval": 2},
    ),
    "qwen3-next-dense-bias": (
        "qwen3_next",
        QWEN3_NEXT
        | {"mlp_only_layers": [0], "attention_bias": True, "linear_num_value_heads": 2}
        | {"linear_conv_kernel_dim": 3, "tie_word_embeddings": True},
    ),
    "granite-hybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "granite-hybrid-limits": (
        "granitemoehybrid",
        GRANITE_HYBRID
        | {"mamba_n_groups": 1, "time_step_limit": [0.5, 1.5], "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "granite-hybrid-rope": (
        "granitemoehybrid",
        GRANITE_HYBRID
        | {"position_embedding_type": "rope", "rope_parameters": LLAMA["rope_parameters"]}
        | {"layer_types": ["attention"] * 3},
    ),
    "granite-hybrid-experts": (
        "granitemoehybrid",
        GRANITE_HYBRID
        | {"intermediate_size": 40, "num_local_experts": 6}
        | {"num_experts_per_tok": 3, "shared_intermediate_size": 56},
    ),
    "hy-v3": ("hy_v3", HY_V3),
    "hy-v3-turns": ("hy_v3", HY_V3 | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "exaone-moe": ("exaone_moe", EXAONE_MOE),
    "sarvam-moe": ("sarvam_moe", SARVAM_MOE),
    "sarvam-moe-bias-bare": (
        "sarvam_moe",
        SARVAM_MOE | {"attention_bias": True, "use_qk_norm": False, "n_shared_experts": 2},
    ),
    "sarvam-mla": ("sarvam_mla", DEEPSEEK | OF_DEEPSEEK | {"q_lora_rank": None}),
    "afmoe": ("afmoe", AFMOE),
    "granite-moe-swa": (
        "granitemoe_swa",
        GRANITE_SWA | OF_GRANITE | {"layer_rope_theta": [5000.0, 100.0, 100.0]},
    ),
    "flint": ("flint", FLINT),
    "flint-dense-first": (
        "flint",
        FLINT | {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True},
    ),
    "aria": ("aria_text", LLAMA | NO_TOKENS | ARIA),
    "kolibri": ("kolibri1", KOLIBRI),
    "axk1": (
        "axk1",
        DEEPSEEK | OF_DEEPSEEK | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mistral4": ("mistral4", MISTRAL4),
    "mistral4-dense-first": (
        "mistral4",
        MISTRAL4 | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "phimoe": ("phimoe", PHIMOE),
    "phimoe-longrope": (
        "phimoe",
        PHIMOE | {"sliding_window": WINDOW, "rope_parameters": OF_PHIMOE, "lm_head_bias": False},
    ),
    "mellum": ("mellum", MELLUM),
    "granite-moe": ("granitemoe", GRANITE_MOE),
    "granite-moe-shared": (
        "granitemoeshared",
        GRANITE_MOE | {"shared_intermediate_size": 56, "attention_bias": True},
    ),
    "bamba": (
        "bamba",
        LLAMA | NO_TOKENS | MAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    ),
    "bamba-bias": (
        "bamba",
        LLAMA
        | NO_TOKENS
        | MAMBA
        | {"mamba_d_conv": 3, "attention_bias": True, "mlp_bias": True, "attn_layer_indices": [0]},
    ),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1-gated": (
        "falcon_h1",
        FALCON_H1
        | {"mamba_rms_norm": False, "mamba_n_groups": 1, "tie_word_embeddings": True}
        | dict.fromkeys(("attention_in_multiplier", "ssm_in_multiplier"), 1.0)
        | dict.fromkeys(("attention_bias", "mamba_proj_bias", "projectors_bias"), True)
        | {"mlp_bias": True, "mamba_conv_bias": False, "time_step_limit": [0.5, 1.5]},
    ),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "nemotron-h-bias": (
        "nemotron_h",
        NEMOTRON_H | {"mlp_bias": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1},
    ),
    "nemotron-h-experts": (
        "nemotron_h",
        NEMOTRON_H
        | {"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 8}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56}
        | {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "nemotron-h-both": (
        "nemotron_h",
        NEMOTRON_H
        | {"layers_block_type": ["mamba", "mlp", "attention", "moe", "mlp"], "n_routed_experts": 8}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56},
    ),
    "nemotron-h-latent": (
        "nemotron_h",
        NEMOTRON_H
        | {"layers_block_type": ["moe", "mamba", "attention", "moe"], "n_routed_experts": 8}
        | {"moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56}
        | {"num_experts_per_tok": 3, "moe_latent_size": 20, "routed_scaling_factor": 5.0},
    ),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-tied": ("mamba2", MAMBA2 | {"tie_word_embeddings": True, "use_bias": True}),
    "opt-untied-no-bias": ("opt", OPT | {"tie_word_embeddings": False, "enable_bias": False}),
}
BIAS = (
    "e_score_correction_bias",
    "expert_bias",
    "layer_scalar",
    "act_fn.beta",
    "act_fn.eps",
)  # of routers and Gemma 4's blocks, a buffer, or of ERNIE a constant parameter
_OF_GRANITE = {
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
    ".router.": ".router.layer.",
}
# Families whose files have a tensor of all experts' gates and ups, as transformers 5 has them.
_STACKED = ("gpt_oss", "llama4_text", "gemma4_text", "mistral4", "granitemoe_swa", "lara_mini")
# What files call the modules that transformers 5 has by other names.
RENAMED = {
    "mixtral": {".mlp.": ".block_sparse_moe."},
    "minimax_m2": {".mlp.": ".block_sparse_moe."},
    "phimoe": {".mlp.": ".block_sparse_moe.", ".router.": ".gate."},
    "kolibri1": {
        ".post_self_attn_layernorm": ".post_attn_norm",
        ".post_mlp_layernorm": ".post_ffn_norm",
        ".mlp.gate.e_score_correction_bias": ".moe.router.expert_bias",
    },
    "flint": {".self_attn.sinks": ".self_attn.softmax_offset"},
    "aria_text": {".experts.gate_up_proj": ".experts.fc1.weight"}
    | {".experts.down_proj": ".experts.fc2.weight"},
    "axk1": {".mlp.post_mlp_layernorm": ".post_mlp_layernorm"},
    "ernie4_5_moe": {".gate.moe_statics.": ".moe_statics."},
    "hy_v3": {
        ".mlp.gate.weight": ".mlp.router.gate.weight",
        ".mlp.e_score_correction_bias": ".mlp.expert_bias",
        ".mlp.shared_experts.": ".mlp.shared_mlp.",
    },
    "exaone_moe": {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"},
    "granitemoehybrid": _OF_GRANITE,
    "granitemoe": _OF_GRANITE,
    "granitemoeshared": _OF_GRANITE,
}
Layers = list[dict[str, torch.Tensor]]


def reference(case: str) -> torch.nn.Module:
    """The transformers model of a case, in fp32, without dropout."""
    model_type, fields = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **deepcopy(fields))  # some change them
    config._attn_implementation = "eager"
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for value in model.parameters():
        with torch.no_grad():  # norms and biases too, which start at one and zero
            value.add_(torch.randn_like(value), alpha=0.05)
    for name, value in model.named_buffers():
        if name.endswith(BIAS):
            value.add_(torch.randn_like(value), alpha=0.1)  # so that it has a say
    assert isinstance(model, torch.nn.Module)
    return model


def spec_of(reference: torch.nn.Module) -> ModelSpec:
    """What bigplan reads in the model's config.json."""
    config: Any = reference.config
    return from_hf_config(json.loads(config.to_json_string()))


def named(reference: torch.nn.Module, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The model's parameters, or their gradients, as its files name them."""
    theirs: dict[str, torch.Tensor] = {}
    for name, parameter in reference.named_parameters():
        if gradients and not parameter.requires_grad:  # ERNIE's BIAS
            continue
        value = parameter.grad if gradients else parameter
        assert value is not None, name
        theirs[name] = value
    for name, buffer in reference.named_buffers():
        if name.endswith(BIAS) and not gradients:
            theirs[name] = buffer
    config = cast(Any, reference.config)
    if config.model_type == "gpt_neox" and "lm_head.weight" in theirs:  # since transformers 5
        theirs["embed_out.weight"] = theirs.pop("lm_head.weight")
    for old, new in RENAMED.get(config.model_type, {}).items():  # as files have them
        theirs = {name.replace(old, new): value for name, value in theirs.items()}
    if config.model_type == "olmo_hybrid":
        theirs = _of_olmo_hybrid(theirs, config)
    for name in [n for n in theirs if n.endswith("mixer.experts.up_proj")]:
        prefix = name.removesuffix("up_proj")
        for part in ("up_proj", "down_proj"):
            each = enumerate(theirs.pop(f"{prefix}{part}"))
            theirs |= {f"{prefix}{e}.{part}.weight": one for e, one in each}
    for name in [n for n in theirs if n.endswith("experts.gate_up_proj")]:
        if config.model_type not in _STACKED:
            theirs |= of_experts(theirs, name.removesuffix("gate_up_proj"))
    return theirs


def _of_olmo_hybrid(theirs: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """As published: three convolutions, and norms of blocks with a rule by names of their own.

    transformers reads these, but what it writes has thirds of the convolution's channels.
    """
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    found: dict[str, torch.Tensor] = {}
    for name, value in theirs.items():
        start, convolution, end = name.partition("conv1d")
        if convolution:
            for word, part in zip("qkv", torch.split(value, [keys, keys, values]), strict=True):
                found[f"{start}{word}_conv1d{end}"] = part
            continue
        block = ".".join(name.split(".")[:3])
        own = name
        if f"{block}.linear_attn.A_log" in theirs:
            own = own.replace("input_layernorm", "attention_layer_norm")
            own = own.replace("post_attention_layernorm", "feedforward_layer_norm")
        found[own] = value
    return found


def of_experts(theirs: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Experts' tensors as files have them, out of what transformers 5 keeps them in."""
    both, down = theirs.pop(f"{prefix}gate_up_proj"), theirs.pop(f"{prefix}down_proj")
    gate, up = both.chunk(2, dim=1)
    few = "block_sparse_moe" in prefix or "feed_forward" in prefix
    names = ("w1", "w3", "w2") if few else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, torch.Tensor] = {}
    for name, matrices in zip(names, (gate, up, down), strict=True):
        found |= {f"{prefix}{e}.{name}.weight": one for e, one in enumerate(matrices)}
    return found


def ours_of(reference: torch.nn.Module, model: ModelSpec) -> Layers:
    """The same values as our parameters, leaves of autograd, layer by layer."""
    config: Any = reference.config
    theirs = named(reference)
    layers: Layers = [{} for _ in model.layer_sequence()]
    layout = FAMILIES[config.model_type].in_transformers
    for tensor in hf_tensors(config.model_type, model, layout):
        value = theirs.pop(tensor.name)
        for piece in tensor.pieces:
            if piece.parameter.constant:
                layers[piece.layer][piece.parameter.name] = terms_of(value.flatten())
                continue
            found = stored(config.model_type, model, piece.layer, piece.parameter, layout)
            place = found[piece.expert]
            matrix = value[place.expert] if place.stacked else value
            matrix = matrix.T if place.transposed else matrix
            cycles = matrix.reshape(-1, place.cycle or place.run, *matrix.shape[1:])
            rows = cycles[:, place.above : place.above + place.run].flatten(0, 1)
            rows = apart(rows, place.pairs)
            if piece.parameter.filters:  # a matrix of one row each, as torch's convolutions have
                rows = rows.squeeze(1)
            assert rows.shape == piece.shape
            empty = torch.empty(piece.parameter.shape)
            whole = layers[piece.layer].setdefault(piece.parameter.name, empty)
            whole[piece.expert :: place.experts] = rows.detach()
    assert not theirs, f"no parameter of ours for {', '.join(theirs)}"
    for layer in layers:
        for name, leaf in layer.items():
            leaf.requires_grad_(name not in (BLOCK_SCALE, ROUTER_BIAS, SLOPE, EDGE))
    return layers


def head(model: ModelSpec, layers: Layers) -> dict[str, torch.Tensor]:
    """The head's parameters, with the tables that it shares."""
    return layers[-1] | (layers[0] if model.tied_embeddings else {})


def loss(
    model: ModelSpec, layers: Layers, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy."""
    total = blocks.head_loss(
        head(model, layers), hidden_states(model, layers, tokens), targets, model
    )
    return total / targets.numel()


def logits(model: ModelSpec, layers: Layers, tokens: torch.Tensor) -> torch.Tensor:
    """Scores [b, s, V]."""
    scores = blocks.logits(head(model, layers), hidden_states(model, layers, tokens), model)
    return capped(scores, model.logit_cap)
