"""Folders of models with a tower for pictures: the text model is read, the tower left there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import save_file

from bigplan.rectangle import Rectangle, all_of
from bigplan.runtime.hf_weights import HfFolder
from bigplan.spec.hf.config import load_hf_config, to_hf_config
from tests.runtime.hf_models import CASES, LENGTH, logits

TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
TOLERANCE = 1e-5  # as test_hf_weights.py


def _published(case: str, folder: Path) -> torch.nn.Module:
    """A model with a tower in files as published: names, and experts, as the model has them."""
    text_type, fields = CASES[case]
    whole = transformers.AutoConfig.for_model(
        text_type.removesuffix("_text"),
        text_config=fields | {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"},
        vision_config=TOWER | {"out_hidden_size": 48},
    )
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForImageTextToText.from_config(whole).float().eval()
    with torch.no_grad():  # norms too, which start at zero
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.05)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(whole.to_json_string())
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5-moe"])
@torch.no_grad()
def test_the_text_model_of_a_published_folder_is_read(case: str, tmp_path: Path) -> None:
    theirs: Any = _published(case, tmp_path)
    model = load_hf_config(tmp_path / "config.json")
    assert "its text model alone, without layers that predict further tokens" in model.source
    opened = HfFolder.open(tmp_path, model)
    layers = [
        {p.name: opened.values(layer, p, all_of(p)).view(p.shape) for p in model.kinds()[kind]}
        for layer, kind in enumerate(model.layer_sequence())
    ]
    tokens = torch.randint(2, model.vocab, (2, LENGTH))
    ours, expected = logits(model, layers, tokens), theirs(input_ids=tokens).logits
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()
    for layer, kind in enumerate(model.layer_sequence()):
        for p in model.kinds()[kind]:
            rows, columns = (slice(n // 3, -(-n * 2 // 3)) for n in p.matrix)
            part = Rectangle(p.name, rows.start, rows.stop, columns.start, columns.stop)
            expected = layers[layer][p.name].view(p.matrix)[rows, columns]
            assert torch.equal(opened.values(layer, p, part), expected), p.name
    assert "text_config" not in to_hf_config(model)


def test_who_ties_words_and_where_a_key_stands(tmp_path: Path) -> None:
    _published("qwen3.5", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert load_hf_config(path).tied_embeddings
    text = config["text_config"] | {"hidden_size": "many"}
    path.write_text(json.dumps(config | {"text_config": text}, indent=1))
    line = path.read_text()[: path.read_text().index('"many"')].count("\n") + 1
    with pytest.raises(Exception, match=rf"config.json:{line}: `hidden_size` is 'many'"):
        load_hf_config(path)
    path.write_text(json.dumps({key: v for key, v in config.items() if key != "text_config"}))
    with pytest.raises(Exception, match="`text_config` is missing"):
        load_hf_config(path)
