"""The weights that a run starts from: seeded random ones, or those of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from bigplan.runtime import blocks
from bigplan.runtime.hf_weights import HfFolder
from bigplan.spec.model import ModelSpec, Parameter
from bigplan.spec.training import Training

FirstValues = Callable[[str, int, Parameter], Tensor]


def first_values(model: ModelSpec, training: Training) -> FirstValues:
    """A function of kind, layer and parameter: fp32 values on the CPU, in the parameter's shape.

    `training.weights` is checked whole here, before any of it is read or memory is taken. Raises
    InputError, and RefusedError for what is not read.
    """
    if training.weights is not None:
        folder = HfFolder.open(Path(training.weights).expanduser(), model)
        return lambda kind, layer, parameter: folder.values(layer, parameter)
    seed = training.seed
    return lambda kind, layer, parameter: blocks.initial_values(kind, layer, parameter, seed)
