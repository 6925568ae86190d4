"""First weights out of a Hugging Face folder: config.json and safetensors, rectangle by rectangle.

Experts in MXFP4, as GPT-OSS is published, are read as bf16.

Nothing is unpickled, and no more than a rectangle of a parameter is in memory beside what the
caller keeps. Files are mapped, and stay so while the folder is in use: a mixture's rectangle has a
few rows of each of a hundred experts, and to map a file takes as long as to read 100 KiB of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bigplan.errors import InputError, RefusedError
from bigplan.paths import exists
from bigplan.rectangle import Rectangle
from bigplan.runtime.constants import terms_of
from bigplan.runtime.weights import mxfp4
from bigplan.runtime.weights.mxfp4 import Packed
from bigplan.runtime.weights.rope_pairs import apart
from bigplan.spec.files.reading import INDEX as INDEX_BYTES
from bigplan.spec.files.reading import read_json, require_regular
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.families.beside_towers import BESIDE_TOWERS
from bigplan.spec.hf.towers import names_in_files
from bigplan.spec.hf.weights import SINGLE, HfTensor, Stored, family_of, hf_tensors, stored
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter

INDEX = "model.safetensors.index.json"
BLOCKS, SCALES = "_blocks", "_scales"  # ends of names of what is in MXFP4
ENDS = 1024  # elements of a tensor's beginning and end that are in a fingerprint
FLOATS = ("F32", "F16", "BF16", "F64")  # safetensors' names of the dtypes that are read
# Ends of names of what older files keep and transformers works out: masks and rope's frequencies.
BUFFERS = (".attn.bias", ".attention.bias", ".masked_bias", ".inv_freq")


@dataclass(frozen=True, slots=True)
class HfFolder:
    """A folder whose tensors were found to be those of a model."""

    family: str
    model: ModelSpec
    files: Mapping[str, Path]  # tensor, as the family names it -> its file
    names: Mapping[str, str]  # tensor, as the family names it -> as the file does
    layout: int = 0  # of those that the family's files may have
    parts: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of those in several tensors
    left_out: tuple[str, ...] = ()  # the files' other tensors, which the model has no place for
    _mapped: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path, model: ModelSpec) -> HfFolder:
        """Check config and headers against `model`; reads no weights.

        Raises InputError, and RefusedError for what is not read.
        """
        family, in_files = family_of(folder, model), _tensor_files(folder)
        problems = list[InputError]()
        for layout in range(len(FAMILIES[family].layouts)):
            try:
                opened = cls._in_layout(layout, family, model, in_files, folder)
                opened._check_shapes()
            except InputError as problem:
                problems.append(problem)
            else:
                return opened
        # What is refused is so in the layout that the folder has.
        raise next((one for one in problems if isinstance(one, RefusedError)), problems[0])

    @classmethod
    def _in_layout(
        cls,
        layout: int,
        family: str,
        model: ModelSpec,
        in_files: Mapping[str, Path],
        folder: Path,
    ) -> HfFolder:
        names, parts = dict[str, str](), dict[str, tuple[str, ...]]()
        in_parts = FAMILIES[family].layouts[layout].in_parts
        for tensor in hf_tensors(family, model, layout):
            *before, word, end = tensor.name.split(".")
            several = tuple(".".join((*before, part, end)) for part in in_parts.get(word, ()))
            if several and set(several) <= set(in_files):
                parts[tensor.name] = several
                names |= dict(zip(several, several, strict=True))
                continue
            found = [n for n in _names(family, tensor.name) if n in in_files]
            if {tensor.name + BLOCKS, tensor.name + SCALES} <= set(in_files):
                names[tensor.name + SCALES] = tensor.name + SCALES
                found = [tensor.name + BLOCKS]
            if (
                not found
                and tensor.pieces[0].parameter.name in FAMILIES[family].layouts[layout].absent
            ):
                continue
            if not found:
                raise InputError(
                    f"{folder}: tensor {tensor.name!r} is missing from its safetensors files, and "
                    f"{model.name} needs it; take a complete copy of the model"
                )
            names[tensor.name] = found[0]
        files = {name: in_files[own] for name, own in names.items()}
        ends = (*BUFFERS, "lm_head.weight") if model.tied_embeddings else BUFFERS
        others = sorted(set(in_files) - set(names.values()))
        left_out = tuple(name for name in others if not name.endswith(ends))
        return cls(family, model, files, names, layout, parts, left_out)

    def _check_shapes(self) -> None:
        model = self.model
        expected, longer = dict[str, tuple[int, ...]](), set[str]()
        for tensor in hf_tensors(self.family, model, self.layout):
            expected |= self._shapes(tensor)
            if tensor.pieces[0].parameter.name in FAMILIES[self.family].layouts[self.layout].longer:
                longer.add(tensor.name)
        for path in sorted(set(self.files.values())):
            with opened(path) as file:
                for name in (name for name in expected if self.files.get(name) == path):
                    header = file.get_slice(self.names[name])
                    shape, dtype = tuple(header.get_shape()), header.get_dtype()
                    if name in longer:
                        shape = min(shape[0], expected[name][0]), *shape[1:]
                    if shape != expected[name]:
                        raise InputError(
                            f"{path}: {self.names[name]} has the shape {list(shape)}, but "
                            f"{model.name} needs {list(expected[name])}; the file belongs to "
                            "another model than its config.json"
                        )
                    wanted = ("U8",) if self.names[name].endswith((BLOCKS, SCALES)) else FLOATS
                    if dtype not in wanted:
                        raise RefusedError(
                            f"{path}: {self.names[name]} is stored as {dtype}, which is not read "
                            f"(read: {', '.join(wanted)}); take an unquantised copy of the model"
                        )

    def _shapes(self, tensor: HfTensor) -> dict[str, tuple[int, ...]]:
        """Of a tensor in its file, of its parts, or of its blocks and scales in MXFP4."""
        if parts := self.parts.get(tensor.name):
            rows = [len(part) for part in torch.empty(tensor.shape[0]).chunk(len(parts))]
            return {name: (n, *tensor.shape[1:]) for name, n in zip(parts, rows, strict=True)}
        if tensor.name + SCALES not in self.names:
            return {tensor.name: tensor.shape}
        count, inner, outer = tensor.shape
        scales = count, outer, inner // mxfp4.BLOCK
        return {tensor.name: (*scales, mxfp4.BLOCK // 2), tensor.name + SCALES: scales}

    def values(self, layer: int, parameter: Parameter, rectangle: Rectangle) -> Tensor:
        """A rectangle of a parameter on the CPU [rows, columns]; a vector is one row.

        In the file's dtype, or fp32 where it has fp64 or tensors of several. `layer` is its index
        in layer_sequence(). No more of the file is read.
        """
        places = stored(self.family, self.model, layer, parameter, self.layout)
        if parameter.constant:
            (place,) = places
            if place.tensor not in self.names:
                return torch.zeros(rectangle.rows, rectangle.columns)
            whole = terms_of(self._tensor(place.tensor).flatten())  # of some families [1, n]
            rows, columns = rectangle.in_matrix
            return whole[rows, columns]
        vector = len(parameter.shape) == 1
        if vector:  # each element is a row of the tensor
            first, last = rectangle.first_column, rectangle.last_column
            rectangle = Rectangle(parameter.name, first, last, 0, 1)
        tensors = [*self._matrices(places)]
        if parameter.filters:
            tensors = [tensor.squeeze(1) for tensor in tensors if isinstance(tensor, Tensor)]
        dtypes = {torch.bfloat16 if isinstance(t, Packed) else t.dtype for t in tensors}
        alike = len(dtypes) == 1 and torch.float64 not in dtypes
        dtype = dtypes.pop() if alike else torch.float32
        values = torch.empty(rectangle.rows, rectangle.columns, dtype=dtype)
        for place, tensor in zip(places, tensors, strict=True):
            if place.stacked or place.experts > 1:
                _read_expert(tensor, place, rectangle, values)
            else:
                assert isinstance(tensor, Tensor), place
                _read(tensor, place, rectangle, values)
        return values.T if vector else values

    def _matrices(self, places: Sequence[Stored]) -> Iterator[Tensor | Packed]:
        """The tensor of each place, or its expert's matrix of one with all."""
        scales, found = None, dict[str, Tensor]()
        for place in places:
            name = place.tensor
            if name not in found:  # experts may share it, and to look it up takes time
                found[name] = self._tensor(name)
                scales = self._tensor(name + SCALES) if name + SCALES in self.names else None
            matrix = found[name][place.expert] if place.stacked else found[name]
            yield matrix if scales is None else Packed(matrix, scales[place.expert])

    def fingerprint(self) -> str:
        """A short digest of every tensor's shape, dtype, beginning and end, as all takes minutes.

        The same whichever files hold them.
        """
        found = hashlib.sha256()
        for name in sorted(self.names):
            tensor = self._in_file(name)
            flat = tensor.flatten()
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            for end in (flat[:ENDS], flat[-ENDS:]):
                found.update(end.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def _tensor(self, name: str) -> Tensor:
        """A tensor in its mapped file; nothing of it is read here."""
        if name in self.parts:
            return torch.cat([self._tensor(part) for part in self.parts[name]])
        return self._in_file(name)

    def _in_file(self, name: str) -> Tensor:
        path = self.files[name]
        if path not in self._mapped:
            self._mapped[path] = _mapped(path)  # by whichever thread comes last
        tensor: Tensor = self._mapped[path].get_tensor(self.names[name])
        return tensor


def _names(family: str, name: str) -> Iterator[str]:
    """What files may call a tensor of the family."""
    yield from names_in_files(name) if family in BESIDE_TOWERS else (name,)
    # A file of the model without its head leaves out the first word: "wte.weight".
    yield name.partition(".")[2]


def _read(tensor: Tensor, place: Stored, rectangle: Rectangle, into: Tensor) -> None:
    if place.pairs is not None:
        _read_pairs(tensor, place, rectangle, into)
        return
    if _in_turns(place):
        into.copy_(_part(tensor, place, rectangle))
        return
    for band in rectangle.bands(place.run):
        part = _part(tensor, place, band.moved(place.before(band.first_row), 0))
        into[band.within(rectangle)] = part


def _read_pairs(tensor: Tensor, place: Stored, rectangle: Rectangle, into: Tensor) -> None:
    """As _read, by way of the whole heads that the rectangle has rows of."""
    assert place.pairs is not None
    head, name = place.pairs.head, rectangle.parameter
    first, last = rectangle.first_row // head * head, -(-rectangle.last_row // head) * head
    heads = Rectangle(name, first, last, rectangle.first_column, rectangle.last_column)
    rows = torch.empty(heads.rows, heads.columns, dtype=into.dtype)
    _read(tensor, replace(place, pairs=None), heads, rows)
    into.copy_(apart(rows, place.pairs)[rectangle.within(heads)])


def _read_expert(
    tensor: Tensor | Packed, place: Stored, rectangle: Rectangle, into: Tensor
) -> None:
    """The expert's columns of a rectangle of all experts', which lie side by side."""
    width = tensor.shape[0 if place.transposed else 1]
    everything = Rectangle(rectangle.parameter, 0, rectangle.last_row, 0, width)
    before = place.expert * width
    shared = rectangle.shared(everything.moved(0, before))
    if shared is not None:
        above = 0 if _in_turns(place) else place.before(shared.first_row)
        into[shared.within(rectangle)] = _part(tensor, place, shared.moved(above, -before))


def _in_turns(place: Stored) -> bool:
    """Whether the parameter has a single row of each cycle."""
    return place.run == 1 and place.cycle > 1


def _part(tensor: Tensor | Packed, place: Stored, rectangle: Rectangle) -> Tensor:
    """A rectangle of the tensor once that is [out, in], or of a vector of one column."""
    rows, columns = rectangle.in_matrix
    if _in_turns(place):
        last = (rows.stop - 1) * place.cycle + place.above
        rows = slice(rows.start * place.cycle + place.above, last + 1, place.cycle)
    part: Tensor
    if isinstance(tensor, Packed):
        return tensor.part(columns, rows).T if place.transposed else tensor.part(rows, columns)
    if tensor.dim() == 1:
        part = tensor[rows].unsqueeze(1)
    else:
        part = tensor[columns, rows].T if place.transposed else tensor[rows, columns]
    return part


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Every tensor of the folder's safetensors files, with its file."""
    index = folder / INDEX
    if exists(index):
        return _indexed(index)
    single = folder / SINGLE
    if not exists(single):
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise RefusedError(
                f"{folder}: holds {pickles[0]}, a pickle, which may run any code when it is read, "
                f"and no {SINGLE}; load it where you trust it and write it again with "
                "transformers' save_pretrained, which writes safetensors"
            )
        raise InputError(
            f"{folder}: holds neither {SINGLE} nor {INDEX}; take a complete copy of the model"
        )
    with opened(single) as file:
        return dict.fromkeys(file.keys(), single)


def _indexed(index: Path) -> dict[str, Path]:
    try:
        files = read_json(index, INDEX_BYTES).data["weight_map"]
        found = {str(name): index.parent / str(file) for name, file in files.items()}
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{index}: is no index of safetensors files (JSON with a `weight_map`); "
            "take a complete copy of the model"
        ) from None
    for path in sorted(set(found.values())):
        if path.parent != index.parent:
            raise InputError(f"{index}: names {path}, which is outside of its folder; correct it")
        with opened(path) as file:
            inside = set(file.keys())
        missing = next((n for n, p in found.items() if p == path and n not in inside), None)
        if missing is not None:
            raise InputError(
                f"{path}: tensor {missing!r} is missing, which {index.name} says is in it; "
                "take a complete copy of the model"
            )
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file while it is looked at."""
    with _mapped(path) as file:
        yield file


def _mapped(path: Path) -> Any:
    """A safetensors file, its header checked against its length."""
    require_regular(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; take a complete copy of the model") from None
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read as safetensors ({error}); it is cut off or damaged: "
            "copy it again"
        ) from None
