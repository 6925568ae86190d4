"""GPT-Neo: a GPT-2 whose scores are not scaled, and every other block of which has a window."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import GLOBAL, LOCAL, compact

_WITHIN = "transformer.h.{}.attn.attention"
_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "input_norm": "transformer.h.{}.ln_1",
        "q_proj": f"{_WITHIN}.q_proj",
        "k_proj": f"{_WITHIN}.k_proj",
        "v_proj": f"{_WITHIN}.v_proj",
        "o_proj": f"{_WITHIN}.out_proj",
        "post_norm": "transformer.h.{}.ln_2",
        "up_proj": "transformer.h.{}.mlp.c_fc",
        "down_proj": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    }
)
_TYPES = "attention_types"
_KEYS = {
    "layers": ("num_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "heads": ("num_heads",),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("max_position_embeddings",),
    "norm_epsilon": ("layer_norm_epsilon",),
    "sliding_window": ("window_size",),
    "attention_pattern": (_TYPES,),
}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
    "hidden_size": 2048,
    "num_layers": 24,
    "num_heads": 16,
    _TYPES: [[[GLOBAL, LOCAL], 12]],
    "window_size": 256,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    activation = reader.text("activation_function")
    if activation not in GELUS:
        reader.refuse("activation_function", ", ".join(GELUS))
    layers, hidden = reader.count("num_layers"), reader.count("hidden_size")
    local = _local_blocks(reader, layers)
    windows: dict[str, Any] = {"sliding_window": reader.count("window_size")} if any(local) else {}
    if windows and not all(local):
        windows["attention_pattern"] = compact(local)
    return windows | {
        "layers": layers,
        "hidden": hidden,
        "ffn": reader.optional_count("intermediate_size") or 4 * hidden,
        "heads": reader.count("num_heads"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon"),
        "mlp": GELUS[activation],
        "positions": "learned",
        "score_scale": 1.0,
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "attention_output_bias": True,
        "mlp_bias": True,
    }


def _local_blocks(reader: ConfigReader, layers: int) -> list[bool]:
    """Whether each block has the window: words of `attention_types`, each list so many times."""
    runs = reader.get(_TYPES)
    runs = _DEFAULTS[_TYPES] if runs is None else runs
    try:
        words = [word for once, times in runs for _ in range(times) for word in once]
    except (TypeError, ValueError):  # not pairs of a list and a number
        words = []
    if len(words) != layers or not {*words} <= {GLOBAL, LOCAL}:
        reader.refuse(_TYPES, f"[[words, times], ...] with {GLOBAL} or {LOCAL} for each block")
    return [word == LOCAL for word in words]


def _write(model: ModelSpec) -> dict[str, Any]:
    windows = [one.window for one in model.attentions]
    config = {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "activation_function": "gelu" if model.mlp == "gelu" else "gelu_new",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_layers": model.layers,
        "num_heads": model.heads,
        "max_position_embeddings": model.max_sequence_length,
        "vocab_size": model.vocab,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        _TYPES: [[[GLOBAL if window is None else LOCAL for window in windows], 1]],
        "attention_dropout": 0.0,
        "embed_dropout": 0.0,
        "resid_dropout": 0.0,
        **NO_TOKENS,
    }
    if model.sliding_window is not None:
        config["window_size"] = model.sliding_window
    return config


GPT_NEO = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
