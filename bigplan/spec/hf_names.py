"""Which tensor of a Hugging Face model holds which of our parameters.

Hugging Face's rotary halves are ours, so most tensors are the same under another name, which the
families' files have (bigplan/spec/families).
"""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.spec.families import FAMILIES
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter within a tensor, once that is [out, in], or a vector.

    The tensor has `run` rows of each of its parts, one part below the other, then the next of each.
    """

    tensor: str
    run: int
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def before(self, row: int) -> int:
        """Rows of other parts above a row of the parameter."""
        return (row // self.run * (self.parts - 1) + self.part) * self.run


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter of a layer (its index in layer_sequence())."""

    layer: int
    parameter: Parameter


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face file: its pieces as Stored says, then transposed or not."""

    name: str
    pieces: tuple[Piece, ...]
    run: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file has it."""
        rows = sum(piece.parameter.shape[0] for piece in self.pieces)
        shape = (rows, *self.pieces[0].parameter.shape[1:])
        return shape[::-1] if self.transposed else shape


def stored(family: str, model: ModelSpec, layer: int, parameter: Parameter) -> Stored:
    """Where `family`'s files hold a parameter of a layer."""
    tensors = FAMILIES[family].tensors
    module, _, part = parameter.name.rpartition(".")
    name = f"{tensors.names[module].format(layer - 1)}.{part}"
    transposed, rows = part == "weight" and module in tensors.transposed, parameter.shape[0]
    if module not in tensors.fused:
        return Stored(name, rows, transposed)
    run = model.head_dim if tensors.by_head else rows
    return Stored(name, run, transposed, tensors.fused.index(module), len(tensors.fused))


def hf_tensors(family: str, model: ModelSpec) -> tuple[HfTensor, ...]:
    """Every tensor of the model's files, layer by layer."""
    pieces: dict[tuple[str, int, bool], list[Piece]] = {}
    for layer, kind in enumerate(model.layer_sequence()):
        for parameter in model.kinds()[kind]:
            place = stored(family, model, layer, parameter)
            key = place.tensor, place.run, place.transposed
            pieces.setdefault(key, []).append(Piece(layer, parameter))
    return tuple(
        HfTensor(name, tuple(parts), run, transposed)
        for (name, run, transposed), parts in pieces.items()
    )
