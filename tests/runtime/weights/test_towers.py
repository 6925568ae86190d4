"""Folders of models with a tower for pictures: the text model is read, the tower left there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bigplan.errors import InputError
from bigplan.rectangle import Rectangle, all_of
from bigplan.runtime.export.hf import write_folder
from bigplan.runtime.weights.hf import HfFolder
from bigplan.spec.hf.config import load_hf_config
from bigplan.spec.hf.families.beside_towers import BESIDE_TOWERS
from tests.runtime.weights.hf_models import CASES, LENGTH, logits, of_experts

WIDE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16}
QWENS: dict[str, Any] = WIDE | {"depth": 1, "num_heads": 2, "out_hidden_size": 48}
SQUARE: dict[str, Any] = WIDE | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def sections(time: int, row: int, column: int, **more: object) -> dict[str, Any]:
    """Of the angles of a head, which are half of what is turned of it."""
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [time, row, column]}
    return {"rope_parameters": rope | more}


FEW = sections(1, 1, 0, partial_rotary_factor=0.5)
HALF = sections(2, 1, 1, partial_rotary_factor=0.5)
INTERLEAVED = sections(4, 2, 2, mrope_interleaved=True)
LLAMAS = SQUARE | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
GEMMAS = SQUARE | {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 8}
UNIFIED = {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}
MTP = {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
CODES: dict[str, Any] = {
    "codebook_size": 64,
    "embed_dim": 8,
    "latent_channels": 8,
    "base_channels": 32,
}
CODES |= {"channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}
# By the whole model's type: a case of the text model, what is different, and the tower.
TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", {}, SQUARE | {"model_type": "siglip_vision_model"}),
    "mistral3": (
        "ministral3",
        {"model_type": "ministral3"},
        SQUARE | {"model_type": "pixtral"},
    ),
    "mistral3 of mistral4": (
        "mistral4",
        {"model_type": "mistral4"},
        SQUARE | {"model_type": "pixtral"},
    ),
    "llava": (
        "mistral",
        {"model_type": "mistral", "sliding_window": None},
        SQUARE | {"model_type": "pixtral"},
    ),
    "qwen2_vl": ("qwen2", sections(2, 1, 1), QWENS | {"embed_dim": 16, "hidden_size": 48}),
    "qwen2_5_vl": ("qwen2", sections(2, 1, 1), QWENS),
    "qwen3_vl": ("qwen3", INTERLEAVED, QWENS | {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (
        "qwen3-moe",
        INTERLEAVED | {"norm_topk_prob": True},
        QWENS | {"deepstack_visual_indexes": [0]},
    ),
    "glm4v": ("glm4", FEW | {"head_dim": 8}, QWENS),
    "glm4v_moe": ("glm4-moe", HALF | {"use_qk_norm": False}, QWENS),
    "llama4": ("llama4", {}, LLAMAS),
    "gemma4": ("gemma4", {"pad_token_id": 0}, GEMMAS),
    "gemma4 of 26B A4B": ("gemma4-experts", {"pad_token_id": 0}, GEMMAS),
    "gemma4 of E2B": ("gemma4-e", {"pad_token_id": 0}, GEMMAS),
    "gemma4_unified": ("gemma4", {"pad_token_id": 0}, UNIFIED),
    "apertus1p5": ("apertus1.5", {"output_vocab_size": 90, "pad_token_id": 0}, CODES),
    "cohere_compass": ("cohere-compass", {}, QWENS | {"deepstack_visual_indexes": [0]}),
    "qwen3_5": ("qwen3.5", MTP, QWENS),
    "qwen3_5_moe": ("qwen3.5-moe", MTP, QWENS),
}
# Words of pictures and of sounds, which stand behind those that the head gives.
OF_ALL: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 32},
        "image_token_offset": 100,
        "audio_token_offset": 164,
    }
}
TOLERANCE = 1e-5  # as test_hf.py


def _whole(whole_type: str) -> Any:
    """A model with a tower."""
    case, changes, tower = TOWERS[whole_type]
    whole = transformers.AutoConfig.for_model(
        whole_type.partition(" ")[0],
        text_config=CASES[case][1] | changes,
        vision_config=tower,
        **OF_ALL.get(whole_type, {}),
    )
    if whole_type not in ("gemma3", "qwen3_5", "qwen3_5_moe"):
        whole.tie_word_embeddings = False
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForImageTextToText.from_config(whole).float().eval()
    with torch.no_grad():  # norms too, which start at zero
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.05)
    return model


def _as_in_memory(model: Any, folder: Path) -> None:
    """With the names, and the experts, that transformers has in memory."""
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(model.config.to_json_string())


def _as_published(model: Any, folder: Path) -> None:
    """As transformers writes them: with the names that published files have."""
    model.save_pretrained(folder)


def _by_expert(model: Any, folder: Path) -> None:
    """With a tensor for each expert's matrix."""
    _as_in_memory(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        tensors |= of_experts(tensors, name.removesuffix("gate_up_proj"))
    separate = {name: value.contiguous() for name, value in tensors.items()}
    save_file(separate, folder / "model.safetensors")


# transformers has Qwen3-VL's experts in memory as no file has them.
IN_FILES: list[tuple[str, Callable[[Any, Path], None]]] = [
    *((whole_type, _as_published) for whole_type in TOWERS),
    *((one, _as_in_memory) for one in ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_5_moe")),
    *((one, _by_expert) for one in ("qwen3_5_moe", "qwen3_vl_moe")),
]


def test_all_types_are_tried() -> None:
    assert {whole_type.partition(" ")[0] for whole_type in TOWERS} == set(BESIDE_TOWERS)


@pytest.mark.parametrize(("whole_type", "write"), IN_FILES)
@torch.no_grad()
def test_the_text_model_is_read_and_written(
    whole_type: str, write: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    theirs, folder = _whole(whole_type), tmp_path / "whole"
    folder.mkdir()
    write(theirs, folder)
    model = load_hf_config(folder / "config.json")
    assert "its text model alone" in model.source
    opened = HfFolder.open(folder, model)
    layers = [
        {p.name: opened.values(layer, p, all_of(p)).view(p.shape) for p in model.kinds()[kind]}
        for layer, kind in enumerate(model.layer_sequence())
    ]
    tokens = torch.randint(2, model.vocab, (2, LENGTH))
    # In transformers 5.24 a whole Llama 4 without a picture ends in an AttributeError.
    text_model = theirs.language_model if whole_type == "llama4" else theirs
    expected: Tensor = text_model(input_ids=tokens).logits
    ours = logits(model, layers, tokens)
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()
    for layer, kind in enumerate(model.layer_sequence()):
        for p in model.kinds()[kind]:
            rows, columns = (slice(n // 3, -(-n * 2 // 3)) for n in p.matrix)
            part = Rectangle(p.name, rows.start, rows.stop, columns.start, columns.stop)
            inside = layers[layer][p.name].view(p.matrix)[rows, columns]
            assert torch.equal(opened.values(layer, p, part), inside), p.name
    alone = tmp_path / "text"
    write_folder(model, lambda n, p: layers[n][p.name], alone, torch.float32, origin=folder)
    assert "text_config" not in json.loads((alone / "config.json").read_text())
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(alone)
    text = again(input_ids=tokens).logits
    assert (text - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_layers_that_predict_further_tokens_are_left_there(tmp_path: Path) -> None:
    _as_in_memory(_whole("qwen3_5"), tmp_path)
    source = load_hf_config(tmp_path / "config.json").source
    assert "its text model alone, without layers that predict further tokens" in source


def test_who_ties_words_and_where_a_key_stands(tmp_path: Path) -> None:
    _as_in_memory(_whole("qwen3_5"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert load_hf_config(path).tied_embeddings
    text = config["text_config"] | {"hidden_size": "many"}
    path.write_text(json.dumps(config | {"text_config": text}, indent=1))
    line = path.read_text()[: path.read_text().index('"many"')].count("\n") + 1
    with pytest.raises(InputError, match=rf"config.json:{line}: `hidden_size` is 'many'"):
        load_hf_config(path)
    path.write_text(json.dumps({key: v for key, v in config.items() if key != "text_config"}))
    with pytest.raises(InputError, match="`text_config` is missing"):
        load_hf_config(path)
