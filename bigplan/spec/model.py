"""A model: its architecture, with the layers and parameters that this implies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from bigplan.spec.architecture import Architecture
from bigplan.spec.layers import described
from bigplan.spec.step import LayerStep, Parameter


class ModelSpec(Architecture):
    """A decoder-only transformer: embedding, `layers` equal blocks, head."""

    @cached_property
    def _steps(self) -> Mapping[str, tuple[LayerStep, ...]]:
        return described(self)

    def steps(self, kind: str) -> tuple[LayerStep, ...]:
        """What one layer of a kind ("embedding", "block", "head") does."""
        return self._steps[kind]

    @cached_property
    def _kinds(self) -> dict[str, tuple[Parameter, ...]]:
        return {
            kind: tuple(parameter for step in steps for parameter in step.parameters)
            for kind, steps in self._steps.items()
        }

    def kinds(self) -> dict[str, tuple[Parameter, ...]]:
        """Parameters of each kind of layer: "embedding", "block", "head"."""
        return dict(self._kinds)

    def layer_sequence(self) -> tuple[str, ...]:
        """The kind of every layer, in forward order."""
        return ("embedding", *("block",) * self.layers, "head")

    def kind_parameter_count(self, kind: str) -> int:
        """Elements in one layer of this kind (a tied head holds only its norm)."""
        return sum(parameter.count for parameter in self._kinds[kind])

    def passed(self, parameter: Parameter) -> int:
        """Elements of a parameter that a token passes: those of the experts picked for it."""
        if not parameter.experts:
            return parameter.count
        return parameter.count // parameter.experts * self.experts_per_token

    @property
    def active_parameter_count(self) -> int:
        """Elements that a token passes; without experts, all that `parameter_count` counts."""
        idle = sum(parameter.count - self.passed(parameter) for parameter in self._kinds["block"])
        return self.parameter_count - self.layers * idle

    @property
    def parameter_count(self) -> int:
        """Elements in the whole model; a tied table counts once."""
        blocks = self.layers * self.kind_parameter_count("block")
        return self.kind_parameter_count("embedding") + blocks + self.kind_parameter_count("head")
