"""Hugging Face folders in and out: equal logits both ways, and clear words for what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bigplan.errors import InputError, RefusedError
from bigplan.launcher.inputs import require_inputs
from bigplan.rectangle import Rectangle, all_of
from bigplan.runtime.export import hf
from bigplan.runtime.export.hf import joined, write_folder
from bigplan.runtime.weights.hf import HfFolder
from bigplan.spec.hf.config import load_hf_config
from bigplan.spec.hf.weights import CONFIG, SINGLE, hf_tensors
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter
from bigplan.spec.training import Training
from tests.examples import examples
from tests.rectangles import parts_of
from tests.runtime.weights.hf_models import (
    CASES,
    LENGTH,
    Layers,
    logits,
    named,
    ours_of,
    reference,
    spec_of,
)

# fp32 sums of a few hundred terms in another order, relative to the largest logit.
TOLERANCE = 1e-5


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()


def _tokens(model: ModelSpec) -> torch.Tensor:
    return torch.randint(2, model.vocab, (2, LENGTH))


def _read(folder: Path, model: ModelSpec) -> Layers:
    opened = HfFolder.open(folder, model)
    assert opened.left_out == ()
    return [
        {p.name: opened.values(layer, p, all_of(p)).view(p.shape) for p in model.kinds()[kind]}
        for layer, kind in enumerate(model.layer_sequence())
    ]


def _saved(case: str, folder: Path, **options: Any) -> torch.nn.Module:
    theirs: Any = reference(case)
    theirs.save_pretrained(folder, **options)
    if theirs.config.model_type == "olmo_hybrid":
        published = {name: value.contiguous() for name, value in named(theirs).items()}
        save_file(published, folder / "model.safetensors")
    assert isinstance(theirs, torch.nn.Module)
    return theirs


def _of(layers: Layers) -> Callable[[int, Parameter], torch.Tensor]:
    return lambda layer, parameter: layers[layer][parameter.name].detach()


class Case(NamedTuple):
    """A model of transformers, the folder that it wrote, and what is read there."""

    theirs: Any
    folder: Path
    model: ModelSpec
    layers: Layers


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    theirs = _saved(request.param, folder)
    model = load_hf_config(folder / "config.json")
    return Case(theirs, folder, model, _read(folder, model))


@torch.no_grad()
def test_a_folder_of_transformers_gives_its_logits(case: Case) -> None:
    tokens = _tokens(case.model)
    _close(logits(case.model, case.layers, tokens), case.theirs(tokens).logits)


@torch.no_grad()
def test_transformers_loads_what_is_written(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = case.theirs
    theirs.config.save_pretrained(tmp_path)
    model = spec_of(theirs)
    layers = ours_of(theirs, model)
    # 40 kB a file: every shard is used, a tensor above that has one of its own
    out = tmp_path / "out"
    monkeypatch.setattr(hf, "SHARD_BYTES", 40_000)
    write_folder(model, _of(layers), out, torch.float32, origin=tmp_path)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert json.loads((out / "config.json").read_text())["model_type"] == theirs.config.model_type
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = _tokens(model)
    _close(logits(model, layers, tokens), loaded.eval()(tokens).logits)
    again = _read(tmp_path / "out", model)
    for before, after in zip(layers, again, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
@pytest.mark.parametrize("case", ["exaone", "sarvam-moe-bias-bare"])
def test_files_with_the_names_of_transformers_are_read(case: str, tmp_path: Path) -> None:
    """And not those of the publisher, which transformers writes."""
    theirs = reference(case)
    theirs.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator] # a model of its
    save_file(
        {name: value.contiguous() for name, value in named(theirs).items()}, tmp_path / SINGLE
    )
    model = load_hf_config(tmp_path / CONFIG)
    for found, expected in zip(_read(tmp_path, model), ours_of(theirs, model), strict=True):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@torch.no_grad()
def test_olmo_hybrid_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    """With filters of queries, keys and values in three equal parts, whatever their widths."""
    theirs = reference("olmo-hybrid")
    theirs.save_pretrained(tmp_path)  # type: ignore[operator] # a model of transformers
    rows = [
        len(value)
        for name, value in sorted(load_file(tmp_path / "model.safetensors").items())
        if name.startswith("model.layers.0") and "conv1d" in name
    ]
    assert max(rows) - min(rows) <= 1 < rows[0] - 24  # not as wide as queries
    model = load_hf_config(tmp_path / "config.json")
    for found, expected in zip(_read(tmp_path, model), ours_of(theirs, model), strict=True):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_bf16_halves_the_file_and_rounds_once(tmp_path: Path) -> None:
    theirs = reference("llama")
    model = spec_of(theirs)
    layers = ours_of(theirs, model)
    write_folder(model, _of(layers), tmp_path / "out", torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(t.numel() * t.itemsize for t in stored.values()) == 2 * model.parameter_count
    for before, after in zip(layers, _read(tmp_path / "out", model), strict=True):
        assert all(torch.equal(before[n].bfloat16().float(), after[n]) for n in before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    theirs = reference("llama")
    model = spec_of(theirs)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .* KiB are needed.*name another folder"):
        write_folder(model, _of(ours_of(theirs, model)), tmp_path / "file" / "out", torch.bfloat16)


@pytest.mark.parametrize("case", ["llama", "gpt2-untied-gelu"])
def test_shards_and_files_without_the_head_are_read(case: str, tmp_path: Path) -> None:
    theirs = _saved(case, tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = load_hf_config(tmp_path / "config.json")
    whole = ours_of(theirs, model)
    assert torch.equal(_read(tmp_path, model)[1]["v_proj.weight"], whole[1]["v_proj.weight"])
    shutil.rmtree(tmp_path)
    tied: Any = reference("gpt2")
    tied.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    model = spec_of(tied)
    found = _read(tmp_path, model)
    assert torch.equal(found[0]["embed_tokens.weight"], tied.transformer.wte.weight)


def test_any_rectangle_is_that_of_the_whole(case: Case) -> None:
    opened = HfFolder.open(case.folder, case.model)
    places = [
        (layer, parameter)
        for layer, kind in enumerate(case.model.layer_sequence())
        for parameter in case.model.kinds()[kind]
    ]

    @settings(max_examples=examples(30))  # of each of many cases
    @given(st.sampled_from(places), st.data())
    def check(place: tuple[int, Parameter], data: st.DataObject) -> None:
        layer, parameter = place
        part = data.draw(parts_of(parameter))
        expected = case.layers[layer][parameter.name].view(parameter.matrix)[part.in_matrix]
        assert torch.equal(opened.values(layer, parameter, part), expected)

    check()


def test_a_value_keeps_no_file_mapped(tmp_path: Path) -> None:
    """Its storage is its own: queries are no view of the matrix that keys are in too."""
    _saved("gpt2", tmp_path)
    model = load_hf_config(tmp_path / "config.json")
    for layer in _read(tmp_path, model):
        for value in layer.values():
            assert value.untyped_storage().nbytes() == 4 * value.numel()
            assert value.is_contiguous()


def _folder(tmp_path: Path) -> tuple[Path, ModelSpec]:
    _saved("llama", tmp_path / "hf")
    return tmp_path / "hf", load_hf_config(tmp_path / "hf" / "config.json")


def _refused(folder: Path, model: ModelSpec) -> str:
    with pytest.raises(InputError) as caught:
        HfFolder.open(folder, model)
    return str(caught.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder, model = _folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in _refused(folder, model)


@torch.no_grad()
def test_routers_bias_that_files_leave_out_is_zero(tmp_path: Path) -> None:
    theirs = _saved("axk1", tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {n: v for n, v in load_file(path).items() if not n.endswith("correction_bias")}
    save_file(kept, path, {"format": "pt"})
    for name, buffer in theirs.named_buffers():
        if name.endswith("correction_bias"):
            buffer.zero_()
    model = spec_of(theirs)
    tokens = _tokens(model)
    _close(logits(model, _read(tmp_path, model), tokens), theirs(tokens).logits)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder, model = _folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, folder / "model.safetensors")
    assert "model.norm.weight has the shape [47], but" in _refused(folder, model)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder, model = _folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight is stored as I8" in _refused(folder, model)


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    config = transformers.AutoConfig.for_model("gpt_oss", **CASES["gpt-oss"][1] | sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inner, outer = tensors[name].shape
        shape = count, outer, inner // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator).byte()
        scales = torch.randint(100, 135, shape, generator=generator).byte()
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    kept = {n: t for n, t in tensors.items() if not n.endswith(("gate_up_proj", "down_proj"))}
    save_file(kept, tmp_path / "model.safetensors")
    model = load_hf_config(tmp_path / "config.json")
    found, values = HfFolder.open(tmp_path, model), _of(_read(tmp_path, model))
    for tensor in hf_tensors("gpt_oss", model):
        parts = [values(p.layer, p.parameter) for p in tensor.pieces]
        experts = [p.parameter.experts for p in tensor.pieces]
        own = [
            part[piece.expert :: count] if count else part
            for part, piece, count in zip(parts, tensor.pieces, experts, strict=True)
        ]
        assert torch.equal(joined(tensor, own), tensors[tensor.name]), tensor.name
    part = Rectangle("experts.down_proj.weight", 10, 41, 40, 150)
    parameter = next(p for p in model.kinds()["block"] if p.name == part.parameter)
    whole = values(1, parameter)
    expected = whole.view(parameter.matrix)[part.in_matrix]
    assert torch.equal(found.values(1, parameter, part), expected)


def test_another_model_is_told_apart(tmp_path: Path) -> None:
    folder, model = _folder(tmp_path)
    other = ModelSpec.model_validate(model.model_dump() | {"rope_theta": 1e6, "kv_heads": 6})
    message = _refused(folder, other)
    assert "has num_key_value_heads 2 instead of 6, " in message
    assert "rope_theta 5000.0 instead of 1000000.0" in message


@pytest.mark.parametrize("kept", [0, 5, 100, -10])
def test_a_cut_file_is_found_before_anything_is_read(kept: int, tmp_path: Path) -> None:
    folder, model = _folder(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "is cut off or damaged: copy it again" in _refused(folder, model)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    folder, model = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor" in _refused(folder, model)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(RefusedError, match=r"pytorch_model\.bin, a pickle"):
        HfFolder.open(folder, model)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ("[]", "is no index of safetensors files"),
        ('{"model.norm.weight": "../x.safetensors"}', "outside of its folder"),
        ('{"model.norm.weight": "gone.safetensors"}', "gone.safetensors: no such file"),
        ('{"absent": "model.safetensors"}', "tensor 'absent' is missing"),
    ],
)
def test_broken_indexes(weight_map: str, words: str, tmp_path: Path) -> None:
    folder, model = _folder(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {weight_map}}}')
    assert words in _refused(folder, model)


def test_no_folder(tmp_path: Path) -> None:
    assert "is no folder" in _refused(tmp_path / "absent", spec_of(reference("llama")))


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    theirs = reference("gpt2")
    model = spec_of(theirs)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already"):
        write_folder(model, _of(ours_of(theirs, model)), tmp_path / "out", torch.float32)
    assert not list((tmp_path / "out").iterdir())


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    model = spec_of(reference("llama"))

    def broken(layer: int, parameter: Parameter) -> torch.Tensor:
        raise InputError(f"layer {layer} is damaged")

    with pytest.raises(InputError, match="layer 0 is damaged"):
        write_folder(model, broken, tmp_path / "out", torch.float32)
    assert not list(tmp_path.iterdir())


def test_tensors_that_the_model_has_no_place_for_are_named(tmp_path: Path) -> None:
    """Such as biases that a config.json denies; masks that older files keep are not."""
    folder, model = _folder(tmp_path)
    assert HfFolder.open(folder, model).left_out == ()
    tensors = load_file(folder / "model.safetensors")
    bias = "model.layers.1.self_attn.q_proj.bias"
    tensors |= {bias: torch.ones(model.hidden), "model.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors")
    assert HfFolder.open(folder, model).left_out == (bias,)
    training = Training(sequence_length=8, global_batch=1, weights=str(folder))
    note = require_inputs(model, training, weights=True)
    assert note.startswith("Note: 1 tensor of ")
    assert note.endswith(f"is left out, as the model has no such parameter: {bias}")
    assert require_inputs(model, training, weights=False) == ""
