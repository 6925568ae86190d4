"""A model: its architecture, with the layers and parameters that this implies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from bigplan.spec.architecture import Architecture
from bigplan.spec.experts import OF_EXPERTS
from bigplan.spec.layers import BLOCK, DENSE, OF_AN_EXPERT, described
from bigplan.spec.step import LayerStep, Parameter


class ModelSpec(Architecture):
    """A decoder-only transformer: embedding, `layers` blocks, head."""

    @cached_property
    def _steps(self) -> Mapping[str, tuple[LayerStep, ...]]:
        found = dict(described(self))
        if not self.dense_blocks:
            return found
        return {"embedding": found.pop("embedding"), DENSE: self.dense.steps(BLOCK), **found}

    def steps(self, kind: str) -> tuple[LayerStep, ...]:
        """What one layer of a kind does: "embedding", "dense", "block" or "head"."""
        return self._steps[kind]

    @cached_property
    def dense(self) -> ModelSpec:
        """The model as its blocks without experts see it: as if all blocks were like them."""
        usual = {key: ModelSpec.model_fields[key].default for key in OF_EXPERTS}
        return ModelSpec.model_validate(self.model_dump() | usual | {"ffn": self.dense_ffn})

    @property
    def of_latents(self) -> ModelSpec:
        """The model as the norms of its latents see it."""
        latent = self.latent_attention
        if latent is None or latent.norm_epsilon in (None, self.norm_epsilon):
            return self
        return self._of_latents

    @cached_property
    def _of_latents(self) -> ModelSpec:
        latent = self.latent_attention
        assert latent is not None
        return self.model_copy(update={"norm_epsilon": latent.norm_epsilon})

    def seen_by(self, kind: str) -> ModelSpec:
        """The model as layers of a kind see it."""
        return self.dense if kind == DENSE else self

    @cached_property
    def _kinds(self) -> dict[str, tuple[Parameter, ...]]:
        return {
            kind: tuple(parameter for step in steps for parameter in step.parameters)
            for kind, steps in self._steps.items()
        }

    def kinds(self) -> dict[str, tuple[Parameter, ...]]:
        """Parameters of each kind of layer, in forward order."""
        return dict(self._kinds)

    def layer_sequence(self) -> tuple[str, ...]:
        """The kind of every layer, in forward order."""
        dense = self.dense_blocks
        return ("embedding", *(DENSE,) * dense, *(BLOCK,) * (self.layers - dense), "head")

    def kind_parameter_count(self, kind: str) -> int:
        """Elements in one layer of this kind (a tied head holds only its norm)."""
        return sum(parameter.values for parameter in self._kinds[kind])

    def passed(self, parameter: Parameter) -> int:
        """Elements of a parameter that a token passes: those of the experts picked for it."""
        if not parameter.name.startswith(OF_AN_EXPERT):
            return parameter.values
        return parameter.count // self.experts * self.experts_per_token

    @property
    def active_parameter_count(self) -> int:
        """Elements that a token passes; without experts, all that `parameter_count` counts."""
        idle = sum(parameter.values - self.passed(parameter) for parameter in self._kinds[BLOCK])
        return self.parameter_count - (self.layers - self.dense_blocks) * idle

    @property
    def parameter_count(self) -> int:
        """Elements in the whole model; a tied table counts once."""
        counts = {kind: self.kind_parameter_count(kind) for kind in self._kinds}
        return sum(counts[kind] for kind in self.layer_sequence())
