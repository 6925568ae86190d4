"""Which tensor of a Hugging Face model holds which of our parameters.

Hugging Face's rotary halves are ours, so most tensors are the same under another name, which the
families' files have (bigplan/spec/families).
"""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.spec.families import FAMILIES
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter

_TENSORS = {name: family.tensors for name, family in FAMILIES.items() if family.tensors}
WEIGHT_FAMILIES = tuple(_TENSORS)  # model types whose weights are read and written


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter within a tensor: share `part` of `parts` of its rows, once it is [out, in]."""

    tensor: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter of a layer (its index in layer_sequence())."""

    layer: int
    parameter: Parameter


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face file: its pieces one below the other, then transposed or not."""

    name: str
    pieces: tuple[Piece, ...]
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file has it."""
        rows = sum(piece.parameter.shape[0] for piece in self.pieces)
        shape = (rows, *self.pieces[0].parameter.shape[1:])
        return shape[::-1] if self.transposed else shape


def stored(family: str, layer: int, parameter: str) -> Stored:
    """Where `family`'s files hold our `parameter` ("q_proj.weight") of a layer."""
    tensors = _TENSORS[family]
    module, _, part = parameter.rpartition(".")
    name = f"{tensors.names[module].format(layer - 1)}.{part}"
    transposed = part == "weight" and module in tensors.transposed
    if module in tensors.fused:
        return Stored(name, transposed, tensors.fused.index(module), len(tensors.fused))
    return Stored(name, transposed)


def hf_tensors(family: str, model: ModelSpec) -> tuple[HfTensor, ...]:
    """Every tensor of the model's files, layer by layer."""
    pieces: dict[tuple[str, bool], list[Piece]] = {}
    for layer, kind in enumerate(model.layer_sequence()):
        for parameter in model.kinds()[kind]:
            place = stored(family, layer, parameter.name)
            pieces.setdefault((place.tensor, place.transposed), []).append(Piece(layer, parameter))
    return tuple(
        HfTensor(name, tuple(parts), transposed) for (name, transposed), parts in pieces.items()
    )
