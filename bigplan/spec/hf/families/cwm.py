"""CWM, the Code World Model: a Llama most of whose blocks have a window."""

from __future__ import annotations

from bigplan.spec.hf.families.layer_types import layer_types
from bigplan.spec.hf.families.llama import LLAMA_LIKE
from bigplan.spec.hf.families.parts import off
from bigplan.spec.hf.families.rope import BESIDE_PARAMETERS, IN_PARAMETERS

_EVERY = 4  # blocks, of which the first sees all tokens, where a file does not list them
CWM = LLAMA_LIKE.like(
    "cwm",
    "CwmForCausalLM",
    {
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "mlp_bias": False,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    off("mlp_bias"),
    layer_types(lambda reader, block: block % _EVERY > 0),
    IN_PARAMETERS,  # rope turns all blocks by the same angles
    without=BESIDE_PARAMETERS,
)
