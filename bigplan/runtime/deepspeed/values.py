"""What a run's parameters and moments begin with: first values, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bigplan.plan import Plan
from bigplan.rectangle import all_of
from bigplan.runtime.checkpoint import FoundCheckpoint, Reader
from bigplan.runtime.deepspeed import state
from bigplan.runtime.deepspeed.model import Values
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.weights.first_values import first_values, whole_values
from bigplan.spec.step import Parameter


def values_of(
    plan: Plan, found: FoundCheckpoint | None, apart: Apart | None
) -> Callable[[state.Kind], Values]:
    """By kind ("master" or a moment): what gives a parameter's first value, or a checkpoint's."""
    if found is None:
        first = first_values(plan.model, plan.training)

        def made(kind: str, layer: int, parameter: Parameter) -> Tensor:
            return whole_values(first, kind, layer, parameter).float()

        return lambda wanted: made
    reader = Reader(found.path, found.manifest, bring=apart.bring if apart else None)

    def stored(wanted: state.Kind) -> Values:
        def read(kind: str, layer: int, parameter: Parameter) -> Tensor:
            if wanted == "master":
                return reader.parameter(layer, parameter.name)
            values = torch.empty(parameter.shape)
            reader.read(layer, wanted, all_of(parameter), values.view(-1))
            return values

        return read

    return stored
