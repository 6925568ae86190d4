"""GPT-2, whose queries, keys and values are one matrix, and its matrices [in, out].

GPTBigCode (SantaCoder, StarCoder) is one whose heads may share a key, with matrices [out, in].
"""

from __future__ import annotations

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.parts import (
    BIASES,
    Part,
    activation,
    always,
    counts,
    flags,
    inner_width,
    joined,
    on,
    values,
    written,
)

_FUSED = ("q_proj", "k_proj", "v_proj")
_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "input_norm": "transformer.h.{}.ln_1",
        "q_proj": "transformer.h.{}.attn.c_attn",
        "k_proj": "transformer.h.{}.attn.c_attn",
        "v_proj": "transformer.h.{}.attn.c_attn",
        "o_proj": "transformer.h.{}.attn.c_proj",
        "post_norm": "transformer.h.{}.ln_2",
        "up_proj": "transformer.h.{}.mlp.c_fc",
        "down_proj": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    transposed=(*_FUSED, "o_proj", "up_proj", "down_proj"),
    fused=(_FUSED,),
)
# GPT-J's files have these keys, too.
SHAPE = joined(
    activation("activation_function", GELUS, "gelu_new"),
    counts(
        layers="n_layer",
        hidden="n_embd",
        heads="n_head",
        vocab="vocab_size",
        max_sequence_length="n_positions",
    ),
    inner_width("n_inner", "n_embd"),
    always(norm="layernorm"),
    values(norm_epsilon="layer_norm_epsilon"),
    flags(tied_embeddings="tie_word_embeddings"),
    written({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **NO_TOKENS}),
)


GPT2 = family(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    on("scale_attn_weights", "true"),
    SHAPE,
    always(positions="learned"),
    BIASES,
    tensors=_TENSORS,
)
GPT_BIGCODE = GPT2.like(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    },
    activation("activation_function", GELUS, "gelu_pytorch_tanh"),
    Part(
        lambda reader: {"kv_heads": 1} if reader.flag("multi_query") else {},
        lambda model: {"multi_query": model.kv_heads == 1},
        {"kv_heads": ("multi_query",)},
    ),
    tensors=_TENSORS.but({}, transposed=(), by_head=_FUSED),
)
