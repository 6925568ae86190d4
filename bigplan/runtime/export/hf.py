"""A model's parameters into a Hugging Face folder that transformers loads.

Files are written beside the folder and renamed when all are there; one shard of at most
SHARD_BYTES (or one tensor) is in memory at a time, beside one parameter.
"""

from __future__ import annotations

import json
import math
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bigplan.errors import InputError
from bigplan.paths import exists, is_file
from bigplan.runtime.checkpoint import FoundCheckpoint, Reader
from bigplan.runtime.constants import values_of
from bigplan.runtime.manifest import Manifest
from bigplan.runtime.weights.hf import INDEX
from bigplan.runtime.weights.rope_pairs import side_by_side
from bigplan.spec.files.reading import read_json
from bigplan.spec.hf.config import to_hf_config
from bigplan.spec.hf.peft import EXPORTED
from bigplan.spec.hf.towers import text_model
from bigplan.spec.hf.weights import CONFIG, SINGLE, HfTensor, ParameterPiece, hf_tensors
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter
from bigplan.units import format_bytes

SHARD_BYTES = 5 * 10**9  # as transformers writes them
# What a folder says of its tokenizer, if the run started from one: files, and keys of config.json.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
METADATA = {"format": "pt"}  # of safetensors: transformers asks for it

Values = Callable[[int, Parameter], Tensor]


def export_checkpoint(found: FoundCheckpoint, folder: Path, precision: str) -> None:
    """A checkpoint's weights, whatever plan wrote it, as a Hugging Face folder.

    Its positions reach as far as it was trained, if that is farther than it was described with.
    If the run started from such a folder that is still there, its tokenizer comes along. Raises
    InputError and RefusedError as write_folder does, CheckpointError where the checkpoint is
    damaged; then nothing is left behind.
    """

    def values(layer: int, parameter: Parameter) -> Tensor:
        return reader.parameter(layer, parameter.name)

    manifest = found.manifest
    with Reader(found.path, manifest) as reader:
        write_trained(manifest, values, folder, DTYPES[precision])


def write_trained(
    manifest: Manifest,
    values: Values,
    folder: Path,
    dtype: torch.dtype,
    adapters: str = "",
) -> None:
    """As write_folder, of a checkpoint's model; its tokenizer comes along if it is still there."""
    model, training = manifest.model, manifest.training
    trained = max(model.max_sequence_length, training.sequence_length)
    model = model.model_copy(update={"max_sequence_length": trained})
    origin = Path(training.weights).expanduser() if training.weights else None
    write_folder(model, values, folder, dtype, origin=origin, adapters=adapters)


def write_folder(
    model: ModelSpec,
    values: Values,
    folder: Path,
    dtype: torch.dtype,
    origin: Path | None = None,
    adapters: str = "",
) -> None:
    """Write config.json and safetensors; `values(layer, parameter)` has the parameter's shape.

    `origin` is a Hugging Face folder whose tokenizer the model has, if it is there; its family is
    written if its files can say the same. `adapters`: those that were added, as `spec.hf.peft`
    knows them. Raises InputError where the folder exists or cannot be written, RefusedError where
    no Hugging Face family is like the model; then nothing is left behind.
    """
    like = "" if origin is None else str(_config(origin).get("model_type"))
    config = to_hf_config(model, like) | {"torch_dtype": NAMES[dtype]}
    with written_whole(folder, model.parameter_count * dtype.itemsize) as partial:
        if origin is not None:
            config |= _tokenizer(origin, partial)
        write_json(partial / CONFIG, config)
        shards = _shards(hf_tensors(config["model_type"], model), dtype)
        _write_shards(shards, values, partial, dtype, adapters)


@contextmanager
def written_whole(folder: Path, nbytes: int) -> Iterator[Path]:
    """Where to write what becomes `folder` once all is there; else nothing is left behind.

    Raises InputError where the folder exists or cannot be written.
    """
    if exists(folder):
        raise InputError(f"{folder} exists already; name a folder that does not, or remove it")
    # One that a killed export left is removed: its name is none that a user would choose.
    partial = folder.with_name(f".{folder.name}.bigplan-export")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(
            f"cannot write {folder}: {reason}; {format_bytes(nbytes)} are needed there; "
            "make room, or name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tokenizer(origin: Path, folder: Path) -> dict[str, Any]:
    """Copy what `origin` has of a tokenizer; its special tokens as keys of config.json."""
    for name in TOKENIZER:
        if is_file(origin / name):
            shutil.copyfile(origin / name, folder / name)
    config = _config(origin)
    return {key: config[key] for key in TOKENS if key in config}


def _config(origin: Path) -> dict[str, Any]:
    """A folder's config.json; nothing where it is gone or damaged since the run started."""
    try:
        config = read_json(origin / CONFIG).data
        whole = config if isinstance(config, dict) else {}
        return dict(text_model(whole, {}, str(origin / CONFIG))[0])
    except InputError:
        return {}


def _shards(tensors: Iterable[HfTensor], dtype: torch.dtype) -> list[list[HfTensor]]:
    """Tensors in order, cut where the next one would carry a file above SHARD_BYTES."""
    shards: list[list[HfTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * dtype.itemsize
        if shards[-1] and filled + nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += nbytes
    return shards


def _write_shards(
    shards: Sequence[Sequence[HfTensor]],
    values: Values,
    folder: Path,
    dtype: torch.dtype,
    adapters: str,
) -> None:
    metadata = METADATA | ({EXPORTED: adapters} if adapters else {})
    whole = lru_cache(maxsize=1)(values)  # experts' tensors follow each other
    weight_map: dict[str, str] = {}
    total, readable = 0, stat.S_IMODE((folder / CONFIG).stat().st_mode)
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            tensor.name: joined(tensor, [_piece(piece, whole, dtype) for piece in tensor.pieces])
            for tensor in shard
        }
        total += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file, metadata=metadata)
        (folder / file).chmod(readable)  # safetensors leaves it to its owner alone
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _piece(piece: ParameterPiece, values: Values, dtype: torch.dtype) -> Tensor:
    whole, experts = values(piece.layer, piece.parameter), piece.parameter.experts
    if piece.parameter.constant:
        return values_of(whole)  # in fp32, as transformers keeps it
    return (whole[piece.expert :: experts] if experts else whole).to(dtype)


def joined(tensor: HfTensor, parts: Sequence[Tensor]) -> Tensor:
    """The tensor, of the values of its pieces in their shapes."""
    if tensor.stacked:
        count = tensor.stacked
        mine = [slice(expert, None, count) for expert in range(count)]
        one = replace(tensor, stacked=0)
        return torch.stack([joined(_of_expert(one, own), parts[own]) for own in mine])
    ordered = map(side_by_side, parts, tensor.pairs)
    sized = zip(ordered, tensor.runs, strict=True)
    whole = torch.cat([part.view(-1, run, *part.shape[1:]) for part, run in sized], dim=1)
    whole = whole.flatten(0, 1)
    if tensor.as_number:
        return whole.view(())
    if tensor.as_row:
        return whole.unsqueeze(0)
    if tensor.as_filters:
        return whole.unsqueeze(1)
    return whole.T.contiguous() if tensor.transposed else whole


def _of_expert(tensor: HfTensor, own: slice) -> HfTensor:
    """One expert's matrix of a tensor of all."""
    pieces, runs, pairs = tensor.pieces[own], tensor.runs[own], tensor.pairs[own]
    return replace(tensor, pieces=pieces, runs=runs, pairs=pairs)


def write_json(path: Path, data: Any) -> None:
    """Write it as people read it. Raises OSError."""
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
