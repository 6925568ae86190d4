"""Weights in Hugging Face's files: which tensor holds which parameter, and of which model they are.

Hugging Face's rotary halves are ours, so most tensors are the same under another name. The files of
the families have those names (bigplan/spec/hf/families).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bigplan.errors import InputError
from bigplan.paths import is_dir, is_file
from bigplan.spec.files.reading import read_json
from bigplan.spec.hf.config import Own, differences, load_hf_config
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.families.family import Tensors
from bigplan.spec.hf.towers import text_model
from bigplan.spec.layers import first_block
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter

# Experts' matrices of which a parameter has the columns as rows (Parameter.experts).
TURNED = ("experts.down_proj",)


class Pairs(NamedTuple):
    """Rows of a head, and how many of them, its first, a file has in pairs that rope turns.

    `swapped`: in two halves, as we do, but the second first.
    """

    head: int
    turned: int
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter within a tensor, once that is [out, in], or a vector.

    The tensor is made of cycles: `run` rows of the parameter in each, below `above` rows of others.
    If experts take turns in the parameter's rows, one expert's are all of the tensor, or if it is
    `stacked`, all of its entry of this expert.
    """

    tensor: str
    run: int
    transposed: bool = False
    above: int = 0
    cycle: int = 0  # rows of a cycle; 0: the parameter's alone
    expert: int = 0
    experts: int = 1
    pairs: Pairs | None = None  # how the file orders the rows of each head; None: as we do
    stacked: bool = False  # the tensor has a matrix for each expert

    def before(self, row: int) -> int:
        """Rows of other parameters above a row of this one."""
        others = max(0, self.cycle - self.run)
        return row // self.run * others + self.above


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """A parameter of a layer (its index in layer_sequence()), or one expert's rows of it."""

    layer: int
    parameter: Parameter
    expert: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the expert's rows, or of the whole parameter."""
        rows, *columns = self.parameter.shape
        if self.parameter.constant:  # a file has the sum of its terms
            return tuple(columns)
        return (rows // max(1, self.parameter.experts), *columns)


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face file: its pieces as Stored says, then transposed or not."""

    name: str
    pieces: tuple[ParameterPiece, ...]
    runs: tuple[int, ...]  # rows of each piece in a cycle
    transposed: bool
    pairs: tuple[Pairs | None, ...]  # of each piece, as Stored's
    stacked: int = 0  # matrices of as many experts, whose pieces take turns; 0: it is one matrix
    as_row: bool = False  # a vector that the file has as a matrix of one row
    as_number: bool = False  # one that the file has as a number, without a shape

    @property
    def as_filters(self) -> bool:
        """Whether the file has each row as a matrix of one row, as torch's convolutions have it."""
        return self.pieces[0].parameter.filters

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file has it."""
        rows = sum(piece.shape[0] for piece in self.pieces[:: self.stacked or 1])
        shape = (rows, *self.pieces[0].shape[1:])
        matrix = shape[::-1] if self.transposed else shape
        if self.as_number:
            return ()
        if self.as_row:
            return (1, *matrix)
        if self.as_filters:
            return (rows, 1, *shape[1:])
        return (self.stacked, *matrix) if self.stacked else matrix


def stored(
    family: str, model: ModelSpec, layer: int, parameter: Parameter, layout: int = 0
) -> tuple[Stored, ...]:
    """Where `family`'s files hold a parameter of a layer: in one tensor, or in each expert's.

    `layout`: of those that its files may have (ModelFamily.layouts).
    """
    tensors = FAMILIES[family].layouts[layout]
    block = layer - first_block(model.layer_sequence())
    if not parameter.experts:
        return (_stored(tensors, model, layer, parameter),)
    module, _, part = parameter.name.rpartition(".")
    rows = parameter.shape[0] // parameter.experts
    if parameter.name in tensors.names:
        every = _stored(tensors, model, layer, parameter)
        whole = replace(every, experts=parameter.experts, stacked=True)
        whole = whole if every.cycle else replace(whole, run=rows)
        return tuple(replace(whole, expert=expert) for expert in range(parameter.experts))
    return tuple(
        Stored(
            f"{tensors.names[module].format(block, expert=expert)}.{part}",
            rows,
            module in TURNED,
            expert=expert,
            experts=parameter.experts,
        )
        for expert in range(parameter.experts)
    )


def _stored(tensors: Tensors, model: ModelSpec, layer: int, parameter: Parameter) -> Stored:
    module, _, part = parameter.name.rpartition(".")
    names = {**tensors.names, **(tensors.with_shared_norm if model.shared_norm else {})}
    name = (names.get(parameter.name) or f"{names[module]}.{part}").format(
        layer - first_block(model.layer_sequence())
    )
    transposed, rows = part == "weight" and module in tensors.transposed, parameter.shape[0]
    transposed = transposed or parameter.name in tensors.transposed
    if parameter.constant:
        rows = parameter.shape[1]
    group = next((modules for modules in tensors.fused if module in modules), None)
    swapped = module in tensors.swapped
    paired = (swapped or module in tensors.paired) and model.positions == "rope"
    pairs = Pairs(model.head_dim, model.rotary_width, swapped) if paired else None
    if group is None:
        return Stored(name, rows, transposed, pairs=pairs)
    shapes = {p.name: p.shape for p in model.kinds()[model.layer_sequence()[layer]]}
    cycles = model.kv_heads if module in tensors.by_head else 1
    if module in tensors.grouped:
        cycles = tensors.grouped[module](model)
    if module in tensors.in_turns:
        cycles = rows
    elif parameter.experts:  # a cycle of each
        cycles = parameter.experts
    runs = [shapes[f"{other}.{part}"][0] // cycles for other in group]
    place = group.index(module)
    return Stored(name, runs[place], transposed, sum(runs[:place]), sum(runs), pairs=pairs)


def hf_tensors(family: str, model: ModelSpec, layout: int = 0) -> tuple[HfTensor, ...]:
    """Every tensor of the model's files in a layout, layer by layer."""
    tensors = FAMILIES[family].layouts[layout]
    pieces: dict[tuple[str, bool], list[tuple[ParameterPiece, Stored]]] = {}
    for layer, kind in enumerate(model.layer_sequence()):
        for parameter in model.kinds()[kind]:
            for place in stored(family, model, layer, parameter, layout):
                found = pieces.setdefault((place.tensor, place.transposed), [])
                found.append((ParameterPiece(layer, parameter, place.expert), place))
    for parts in pieces.values():  # as they stand in the tensor
        parts.sort(key=lambda part: part[1].above)
    return tuple(
        HfTensor(
            name,
            tuple(piece for piece, _ in parts),
            tuple(place.run for _, place in parts),
            transposed,
            tuple(place.pairs for _, place in parts),
            parts[0][1].experts if parts[0][1].stacked else 0,
            parts[0][0].parameter.name in tensors.as_row,
            parts[0][0].parameter.name in tensors.as_number,
        )
        for (name, transposed), parts in pieces.items()
    )


CONFIG = "config.json"
SINGLE = "model.safetensors"


def family_of(folder: Path, model: ModelSpec) -> str:
    """The folder's model_type, its config being that of `model`. Raises InputError."""
    path = folder / CONFIG
    if not is_file(path):
        problem = f"has no {CONFIG}" if is_dir(folder) else "is no folder"
        raise InputError(
            f"training.weights: {folder} {problem}; name a Hugging Face folder with "
            f"{CONFIG} and {SINGLE} (--weights names its new place where it has moved), or leave "
            "weights out to start from random ones"
        )
    theirs = load_hf_config(path)
    found = read_json(path)
    model_type = str(found.data["model_type"])
    # The coefficient of a loss says nothing of weights.
    different = [key for key in differences(model, theirs) if key != "router_loss"]
    if different:
        config, lines = text_model(found.data, found.lines, str(path))
        own = Own(config, FAMILIES[model_type].keys, lines)
        shown = ", ".join(
            f"{own.key((), key)} {getattr(theirs, key)} instead of {getattr(model, key)}"
            for key in different
        )
        raise InputError(
            f"{path} has {shown}: these weights are not those of {model.name}; plan with this "
            f"config.json as the model, or name the folder of {model.name}"
        )
    return model_type
