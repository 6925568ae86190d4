"""Text models in files of models that have a tower for pictures, too (spec/hf/towers.py).

Their blocks are those of families that have no tower; only names of tensors, defaults and, of some,
how experts are kept differ. The folder that is written has the text model's own family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.apertus import APERTUS_1_5_TEXT
from bigplan.spec.hf.families.cohere import COHERE_COMPASS_TEXT
from bigplan.spec.hf.families.experts import FIRST, LAST, QWEN3_MOE, stacked_names
from bigplan.spec.hf.families.family import ModelFamily, Tensors
from bigplan.spec.hf.families.gemma import GEMMA3
from bigplan.spec.hf.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from bigplan.spec.hf.families.glm import GLM4
from bigplan.spec.hf.families.llama import MISTRAL
from bigplan.spec.hf.families.llama4 import LLAMA4
from bigplan.spec.hf.families.ministral3 import MINISTRAL3
from bigplan.spec.hf.families.mistral4 import MISTRAL4
from bigplan.spec.hf.families.qwen import QWEN2, QWEN3
from bigplan.spec.hf.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from bigplan.spec.hf.families.shared_experts import GLM4_MOE
from bigplan.spec.hf.reader import ConfigReader


def _beside(family: ModelFamily, *layouts: Tensors, **defaults: Any) -> ModelFamily:
    """The family in files with a tower, in one of the layouts or, without any, its own."""
    first, *others = map(_inside, layouts or (family.tensors,))
    known = {**family.defaults, **defaults}
    return replace(family, defaults=known, tensors=first, other_tensors=tuple(others))


def _inside(tensors: Tensors) -> Tensors:
    names = tensors.names.items()
    inside = {n: place.replace("model.", "model.language_model.", 1) for n, place in names}
    return replace(tensors, names=inside)


def _stacked(tensors: Tensors, *transposed: str) -> Tensors:
    """With a tensor of all experts' gates and ups, and one of all that lead back.

    `transposed`: parameters that are [in, out] there, as seen from ours.
    """
    experts = "model.layers.{}.mlp.experts"
    return tensors.but(
        stacked_names(f"{experts}.gate_up_proj", f"{experts}.down_proj"),
        without=(*FIRST, LAST),
        fused=(*tensors.fused, FIRST),
        transposed=transposed,
    )


_QWEN2: Mapping[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_window_layers": 80,
}
_QWEN3: Mapping[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
}


def _read_mistral3(reader: ConfigReader) -> dict[str, Any]:
    """Text models of two families, told apart by their attention."""
    if reader.config.get("kv_lora_rank") is None:
        return MINISTRAL3.read(reader)
    return MISTRAL4.read(replace(reader, defaults=MISTRAL4.defaults))


# Pixtral is published as a LLaVA. transformers ties the words of a Mistral 3 that does not say so;
# published ones do not say so, and have a head. Files of Ministral 3 and Mistral 4 tell all of
# their keys. Mistral 4's names are the others', and more.
_MISTRAL3 = replace(
    MISTRAL4,
    read=_read_mistral3,
    defaults=MISTRAL.defaults,
    keys={
        **MISTRAL4.keys,
        **MINISTRAL3.keys,
        "ffn": ("moe_intermediate_size", "intermediate_size"),
    },
)

# By the type of the whole model.
BESIDE_TOWERS: Mapping[str, ModelFamily] = {
    "gemma3": _beside(GEMMA3),
    "apertus1p5": _beside(APERTUS_1_5_TEXT),
    "mistral3": _beside(_MISTRAL3),
    "llava": _beside(MISTRAL),
    "qwen2_vl": _beside(QWEN2, **_QWEN2),
    "qwen2_5_vl": _beside(QWEN2, **_QWEN2),
    "qwen3_vl": _beside(
        QWEN3,
        **_QWEN3,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
    ),
    "qwen3_vl_moe": _beside(
        QWEN3_MOE,
        _stacked(QWEN3_MOE.tensors, *(f"{name}.weight" for name in FIRST)),  # as published
        _stacked(QWEN3_MOE.tensors, f"{LAST}.weight"),  # as transformers 5 writes it
        QWEN3_MOE.tensors,
        **_QWEN3,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        moe_intermediate_size=1408,
        num_experts_per_tok=4,
        num_experts=60,
        norm_topk_prob=True,  # of which transformers' class knows nothing: it is so
        head_dim=None,
    ),
    "glm4v": _beside(GLM4, max_position_embeddings=32768, rms_norm_eps=1e-5, head_dim=None),
    "glm4v_moe": _beside(
        GLM4_MOE, vocab_size=151424, max_position_embeddings=65536, attention_bias=True
    ),
    "llama4": _beside(LLAMA4),
    "gemma4": _beside(GEMMA4),
    "gemma4_unified": _beside(GEMMA4_UNIFIED),
    "cohere_compass": _beside(COHERE_COMPASS_TEXT),
    "qwen3_5": _beside(QWEN3_5),
    "qwen3_5_moe": _beside(
        QWEN3_5_MOE,
        _stacked(QWEN3_5_MOE.tensors, f"{LAST}.weight"),
        QWEN3_5_MOE.tensors,
    ),
}
