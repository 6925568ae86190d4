"""config.json files of models with a tower for pictures, as they are published."""

from __future__ import annotations

from typing import Any

import pytest

from bigplan.errors import RefusedError
from bigplan.spec.hf.config import from_hf_config, to_hf_config

# Sizes as huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct had them first, on one level.
FLAT: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
# Those of google/gemma-3-4b-it, which leaves the rest to its class.
NESTED: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_an_older_file_has_one_level() -> None:
    model = from_hf_config(FLAT)
    assert (model.parameter_count, model.rope_scaling) == (7_615_616_512, None)
    assert "its text model alone" in model.source
    assert to_hf_config(model)["model_type"] == "qwen2"


def test_what_a_file_leaves_out_is_as_the_class_has_it() -> None:
    model = from_hf_config(NESTED)
    assert model.parameter_count == 3_880_263_168
    assert model.sliding_window == 1024
    assert model.tied_embeddings


def test_longer_texts_stay_scaled() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}
    rope = from_hf_config(FLAT | {"rope_scaling": scaled}).rope_scaling
    assert rope is not None
    assert (rope.name, rope.factor) == ("yarn", 4.0)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"model_type": "mistral3", "text_config": {"model_type": "llama"}},
            "c.json:7: the text model has the model_type 'llama', and in models of type "
            "mistral3 mistral or ministral3 or mistral4 is read",
        ),
        (
            NESTED | {"quantization_config": {"quant_method": "fp8"}},
            "`quantization_config` is set: its files hold quantised weights",
        ),
        (
            NESTED | {"text_config": NESTED["text_config"] | {"attn_logit_softcapping": 50.0}},
            "`attn_logit_softcapping` is 50.0, which is not supported for model_type 'gemma3'",
        ),
    ],
)
def test_what_is_not_read_is_told_in_the_files_words(config: dict[str, Any], told: str) -> None:
    with pytest.raises(RefusedError) as raised:
        from_hf_config(config, "c.json", {"text_config.model_type": 7})
    assert told in str(raised.value)
