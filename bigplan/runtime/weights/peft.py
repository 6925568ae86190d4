"""First values of adapters out of a folder as peft has it; spec/hf/peft.py finds what is where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bigplan.errors import RefusedError
from bigplan.rectangle import Rectangle
from bigplan.runtime.weights.hf import opened
from bigplan.runtime.weights.peft_experts import first_of, goes_with_none, last_of, together
from bigplan.runtime.weights.rope_pairs import apart
from bigplan.spec.files.reading import user_path
from bigplan.spec.hf.peft import WEIGHTS, AdapterPlace, Place, adapter_folder, check_same
from bigplan.spec.hf.peft_experts import ExpertPlace, SeparateExperts
from bigplan.spec.lora import Lora, targets_of
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import full_name
from bigplan.spec.training import Training


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """A folder whose adapters were found to be those that a training begins with."""

    path: Path
    lora: Lora
    places: dict[str, Place]  # by an adapter's name in the model

    @classmethod
    def open(cls, model: ModelSpec, training: Training) -> PeftFolder:
        """Check what the folder says against `training.lora`; reads no values.

        Raises InputError, and RefusedError for adapters of other kinds.
        """
        lora = training.lora
        assert lora is not None and lora.weights is not None
        targets, folder = lora.targets or targets_of(model), user_path(lora.weights)
        found = adapter_folder(folder, model, training.weights, targets)
        check_same(found, lora.model_dump() | {"targets": targets}, folder)
        layers = model.layer_sequence()
        places = {
            full_name(layers, place.layer, f"{place.target}.lora_{side}"): place
            for place in found.places
            for side in "AB"
        }
        return cls(folder / WEIGHTS, lora, places)

    def values(self, name: str, rectangle: Rectangle) -> Tensor:
        """A rectangle of an adapter's A [rank, in] or B [out, rank], fp32 on the CPU."""
        place, down = self.places[name], name.endswith("lora_A")
        with opened(self.path) as file:
            end = f"lora_{'A' if down else 'B'}.weight"
            if isinstance(place, SeparateExperts):
                each = (file.get_tensor(f"{module}.{end}") for module in place.modules)
                whole = together(place, each)
            elif isinstance(place, ExpertPlace):
                tensor = file.get_tensor(f"{place.module}.{end}")
                whole = self._of_experts(place, tensor, down=down)
            elif down:
                whole = file.get_tensor(f"{place.module}.lora_A.weight")[self._columns(place)]
            else:
                whole = self._up(place, file.get_tensor(f"{place.module}.lora_B.weight"))
            part: Tensor = whole[rectangle.in_matrix].float()
            return part

    def _of_experts(self, place: ExpertPlace, tensor: Tensor, *, down: bool) -> Tensor:
        """All experts' A or B, as a rectangle is cut from it."""
        rank = self.lora.rank
        if down:
            return first_of(place, tensor, rank).flatten(1)
        beside = [p for p in self._every if p.module == place.module]
        if goes_with_none(tensor, beside, rank):
            raise self._of_others(place.module)
        return last_of(place, tensor, rank).flatten(1)

    @property
    def _every(self) -> set[ExpertPlace]:
        """All that are of experts."""
        return {place for place in self.places.values() if isinstance(place, ExpertPlace)}

    def _of_others(self, module: str) -> RefusedError:
        return RefusedError(
            f"{self.path}: {module} has values that go with none of its matrices that "
            f"have adapters of rank {self.lora.rank}; train all of its matrices, or start from "
            "others"
        )

    def _columns(self, place: AdapterPlace) -> slice:
        return slice(place.first, place.first + self.lora.rank)

    def _up(self, place: AdapterPlace, module: Tensor) -> Tensor:
        """The matrix's rows and columns of a module's B. No others may have some of either."""
        rows, columns = _rows(place, module), self._columns(place)
        others = (p for p in self.places.values() if isinstance(p, AdapterPlace))
        beside = {p for p in others if _together(p, place)}
        shared = sum(int(torch.count_nonzero(_rows(p, module)[:, columns])) for p in beside)
        lost = torch.count_nonzero(module[:, columns]) - shared
        lost += torch.count_nonzero(rows) - torch.count_nonzero(rows[:, columns])
        if lost:
            raise self._of_others(place.module)
        return rows[:, columns]


def _together(one: AdapterPlace, other: AdapterPlace) -> bool:
    """Whether they have the same columns of one module."""
    return (one.module, one.first) == (other.module, other.first)


def _rows(place: AdapterPlace, module: Tensor) -> Tensor:
    """The matrix's rows of a module's, in our order."""
    above, run = place.rows.above, place.rows.run
    cycles = module.view(-1, place.rows.cycle or run, module.shape[1])
    return apart(cycles[:, above : above + run].flatten(0, 1), place.rows.pairs)
