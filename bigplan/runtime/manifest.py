"""What a checkpoint says of itself: `manifest.json`, written last.

    {"format": 2, "sha256": of the rest, "checkpoint": {step, specs, files -> tensors, checksums}}

The tensors are in safetensors files, each of one layer, which other tools can read as well. A
tensor is a rectangle of one parameter, of one kind. So the files say nothing of the plan they were
written under, and any plan can read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from bigplan.content import ADAPTERS
from bigplan.errors import CheckpointError, InputError, quoted
from bigplan.rectangle import Rectangle
from bigplan.runtime.memory.adapter_rows import adapter_parameters
from bigplan.spec.files.document import Spec
from bigplan.spec.files.reading import RECORD, read_json
from bigplan.spec.model import ModelSpec
from bigplan.spec.moments import BLOCK as MOMENT_BLOCK
from bigplan.spec.moments import blocks
from bigplan.spec.step import Parameter
from bigplan.spec.training import Training

FORMAT: Final = 2  # one for every change that makes older checkpoints unreadable
NAME: Final = "manifest.json"
ELEMENT: Final = 4  # bytes of fp32, in which all is but moments that the training wants otherwise
BLOCK: Final = 2**20  # bytes under one checksum: what a reader of a few rows reads beside them
STEP_FOLDER: Final = re.compile(r"step-(\d{6,})")  # what a run calls a checkpoint
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # no other folder, not hidden
Kind = Literal["weights", "exp_avg", "exp_avg_sq", "momentum", "master"]
Dtype = Literal["F32", "BF16", "I8", "U8"]  # as safetensors names them
SIZES: Final[Mapping[Dtype, int]] = {"F32": 4, "BF16": 2, "I8": 1, "U8": 1}  # bytes of an element


class Scaled(Spec):
    """Where the fp32 scales of a tensor in 8 bits are: one for each block of its piece."""

    offset: int
    """byte of the file at which the scale of the first element's block is"""
    place: int
    """of the first element in its block"""


class StoredTensor(Spec):
    """A rectangle of one parameter, row by row, at byte `offset` of its file."""

    parameter: str
    kind: Kind
    shape: tuple[int, ...]
    """of the whole parameter"""
    first_row: int
    last_row: int
    first_column: int
    last_column: int
    """a vector is one row"""
    offset: int
    experts: int = Field(default=0, exclude_if=lambda experts: not experts)
    """so many lie side by side in a row, as in Parameter.matrix; 0 in checkpoints that are older,
    whose rows are those of the shape"""
    dtype: Dtype = Field(default="F32", exclude_if=lambda dtype: dtype == "F32")
    scaled: Scaled | None = Field(default=None, exclude_if=lambda scaled: scaled is None)
    """of codes (spec/moments.py), as 8 bits are"""

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns that the rectangle is a part of."""
        *rows, columns = self.shape
        each = self.experts or 1
        return (rows[0] if rows else 1) // each, columns * each

    @property
    def rectangle(self) -> Rectangle:
        """What it holds of its parameter."""
        rows = self.first_row, self.last_row
        return Rectangle(self.parameter, *rows, self.first_column, self.last_column)


class Extent(Spec):
    """Consecutive bytes of a file, with a CRC-32 of every `BLOCK` of them."""

    offset: int
    nbytes: int
    checksums: tuple[int, ...]


class StoredFile(Spec):
    """Tensors of one layer, whose others may be in other files. The first extent is the header."""

    name: str
    layer: int
    nbytes: int
    extents: tuple[Extent, ...]
    tensors: tuple[StoredTensor, ...]
    places: tuple[str, ...] = ()
    """that have it, where the run's machines share no folder"""


class Manifest(Spec):
    """A checkpoint: the state after `step` steps, whose data position is the step alone."""

    step: int
    model: ModelSpec
    training: Training
    plan: str
    """SHA-256 of the plan that wrote it"""
    data: str = ""
    """fingerprint of the training's data; empty in checkpoints that are older"""
    frozen: str = Field(default="", exclude_if=lambda frozen: not frozen)
    """fingerprint of the folder that frozen weights are read from; empty where there is none, and
    in checkpoints that are older"""
    state: Mapping[str, float]
    """the loss scale and what else is no tensor"""
    files: tuple[StoredFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that it says, and so of what its files hold."""
        return _digest(self.model_dump(mode="json"))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and fsync it. Raises OSError."""
    body = manifest.model_dump(mode="json")
    text = json.dumps({"format": FORMAT, "sha256": _digest(body), "checkpoint": body})
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path, place: str | None = None) -> Manifest:
    """The manifest, if every file it names is there in its length.

    If a run's machines share no folder, only files that this `place` wrote must be there; None: all
    files. Their content is checked when it is read. Raises CheckpointError.
    """
    path = folder / NAME
    try:
        data = read_json(path, RECORD).data
    except InputError as error:
        raise CheckpointError(
            f"{error}; only a checkpoint with its manifest is whole, and this one is damaged: "
            "resume from another one"
        ) from None
    if not isinstance(data, dict) or not {"format", "sha256", "checkpoint"} <= data.keys():
        raise _damaged(path, "lacks format, sha256 or checkpoint")
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {data['format']}, this version of bigplan reads {FORMAT}: "
            "resume with the version that wrote it"
        )
    if data["sha256"] != _digest(data["checkpoint"]):
        raise _damaged(path, "does not have the SHA-256 that it states")
    try:
        manifest = Manifest.model_validate_json(json.dumps(data["checkpoint"]))
    except ValidationError as error:
        raise _damaged(path, f"breaks its schema: {error.errors()[0]['msg']}") from error
    _check_step(folder, manifest)
    if why := _impossible(manifest):
        raise _damaged(path, why)
    _check_files(folder, manifest, place)
    return manifest


def _check_step(folder: Path, manifest: Manifest) -> None:
    """A folder that is called as a run calls its checkpoints holds the one of its name."""
    named = STEP_FOLDER.fullmatch(folder.name)
    if named is not None and int(named[1]) != manifest.step:
        raise _damaged(folder / NAME, f"is of step {manifest.step}, not of its folder's name")


def _impossible(manifest: Manifest) -> str:
    """A contradiction in the manifest, as words that follow its name; empty if there is none.

    SHA-256 and CRC-32 find damage. A forged manifest has matching sums, too. It must not make a
    reader take memory of any size, or read bytes from anywhere.
    """
    kinds, sequence = manifest.model.kinds(), manifest.model.layer_sequence()
    lora = manifest.training.lora
    adapted = adapter_parameters(manifest.model, lora, range(len(sequence)))
    for file in manifest.files:
        trains_adapters = lora is not None and file.layer == ADAPTERS
        if not trains_adapters and not 0 <= file.layer < len(sequence):
            return f"has a layer {file.layer}, and its model has {len(sequence)}"
        if not _are_extents(file):
            return f"describes {quoted(file.name)} as no file is"
        described = adapted if trains_adapters else kinds[sequence[file.layer]]
        parameters = {one.name: one for one in described}
        for tensor in file.tensors:
            parameter = parameters.get(tensor.parameter)
            if parameter is None or not _is_part(tensor, parameter):
                return f"has a part of {quoted(tensor.parameter)} that its model has not"
            if not any(_holds(extent, tensor) for extent in file.extents):
                return f"has {tensor.parameter} where {quoted(file.name)} has nothing"
    return ""


def _are_extents(file: StoredFile) -> bool:
    """One after the other within the file, each with its checksums."""
    end = 0
    for extent in file.extents:
        blocks = -(-extent.nbytes // BLOCK)
        if extent.offset < end or extent.nbytes <= 0 or len(extent.checksums) != blocks:
            return False
        end = extent.offset + extent.nbytes
    return 0 < end <= file.nbytes


def _is_part(tensor: StoredTensor, parameter: Parameter) -> bool:
    rows, columns = tensor.matrix
    return (
        tensor.shape == parameter.shape
        and tensor.experts in (0, parameter.experts)
        and 0 <= tensor.first_row < tensor.last_row <= rows
        and 0 <= tensor.first_column < tensor.last_column <= columns
    )


def _holds(extent: Extent, tensor: StoredTensor) -> bool:
    """Whether the extent has the tensor and its scales, each at a whole number of elements."""
    start, nbytes = tensor.offset - extent.offset, tensor.rectangle.elements * tensor.size
    if start < 0 or start % tensor.size or start + nbytes > extent.nbytes:
        return False
    if tensor.scaled is None:
        return tensor.size > 1  # 8 bits mean nothing without
    start, place = tensor.scaled.offset - extent.offset, tensor.scaled.place
    nbytes = ELEMENT * blocks(place + tensor.rectangle.elements)
    known = tensor.size == 1 and 0 <= place < MOMENT_BLOCK
    return known and start >= 0 and start % ELEMENT == 0 and start + nbytes <= extent.nbytes


def _check_files(folder: Path, manifest: Manifest, place: str | None) -> None:
    for file in manifest.files:
        if not PLAIN_NAME.fullmatch(file.name):
            raise _damaged(folder / NAME, f"names {quoted(file.name)}, which is no file in it")
        if place is not None and place not in file.places:
            continue
        path = folder / file.name
        try:
            found = path.stat().st_size
        except OSError as error:
            where = f", and places {', '.join(file.places)} have it" if file.places else ""
            raise _damaged(path, f"cannot be read ({error.strerror}{where})") from error
        if found != file.nbytes:
            raise _damaged(path, f"has {found} bytes, not the {file.nbytes} that were written")


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {how}: the checkpoint is damaged; resume from another one, or restore the file"
    )


def _digest(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
