"""A model: its architecture, with the layers and parameters that this implies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from bigplan.spec.architecture import Architecture
from bigplan.spec.carried import INPUTS, shares_keys
from bigplan.spec.experts import OF_EXPERTS
from bigplan.spec.global_heads import seen_heads
from bigplan.spec.layers import (
    BLOCK,
    BLOCKS,
    DENSE,
    OF_AN_EXPERT,
    SHARING,
    block_kind,
    described,
)
from bigplan.spec.mixers import ATTENTION, BESIDE_ATTENTION, DELTA_RULE, MLP, Mixer
from bigplan.spec.pattern import GLOBAL, expanded
from bigplan.spec.step import LayerStep, Parameter


class ModelSpec(Architecture):
    """A decoder-only transformer: embedding, `layers` blocks, head."""

    @cached_property
    def _steps(self) -> Mapping[str, tuple[LayerStep, ...]]:
        if not self._views:
            return described(self)
        ends = described(self._views[BLOCK])
        return {
            kind: ends[kind] if kind not in BLOCKS else self._views[kind].steps(BLOCK)
            for kind in dict.fromkeys(self.layer_sequence())
        }

    def steps(self, kind: str) -> tuple[LayerStep, ...]:
        """What one layer of a kind does: "embedding", "head", or one of layers.BLOCKS."""
        return self._steps[kind]

    @cached_property
    def _views(self) -> Mapping[str, ModelSpec]:
        """The model as each kind of block sees it: as if all blocks were like these.

        Empty where all blocks are alike.
        """
        own = self.global_heads is not None or (self.key_sharing and not self.keys_given)
        if not any(self.dense) and len({*self.mixers}) == 1 and not own:
            return {}
        blocks = dict(zip(reversed(self.block_kinds), reversed(self.mixers), strict=True))
        return {
            kind: ModelSpec.model_validate(self.model_dump() | dict(self._changes(kind, mixer)))
            for kind, mixer in blocks.items()
        }

    def _changes(self, kind: str, mixer: Mixer) -> Iterator[tuple[str, object]]:
        """Fields that blocks of a kind, which have this mixer, see unlike the whole model."""
        if kind.startswith(DENSE):
            yield from ((key, ModelSpec.model_fields[key].default) for key in OF_EXPERTS)
            yield "ffn", self.dense_ffn
        elif MLP in self.mixers and mixer != MLP:  # it has neither an MLP nor experts
            yield from ((key, ModelSpec.model_fields[key].default) for key in OF_EXPERTS)
            yield "ffn", 0
        else:
            yield from (("dense_blocks", 0), ("dense_ffn", 0), ("expert_pattern", ()))
        apart = self.global_heads is not None or self.key_sharing is not None
        if apart or (self.attention_pattern and self.mixer_pattern):
            yield from seen_heads(self, kind)
        if self.key_sharing is not None:
            ffn = self.key_sharing.ffn
            given = {"blocks": self.layers, "ffn": ffn} if kind in SHARING.values() else None
            yield "key_sharing", given
            if given:
                yield "ffn", ffn
        if self.mixer_pattern:
            yield "mixer_pattern", (f"1 {MLP}",) if mixer == MLP else ()
            yield from ((name, None) for name in BESIDE_ATTENTION if name != mixer)
            if mixer == DELTA_RULE and self.delta_rule is not None and self.delta_rule.norms_before:
                yield "norms", "before"

    @cached_property
    def _sequence(self) -> tuple[str, ...]:
        if self.block_inputs is None:
            return ("embedding", *self._blocks, "head")
        return ("embedding", INPUTS, *self._blocks, "head")

    @cached_property
    def _blocks(self) -> tuple[str, ...]:
        sharing = self.key_sharing is not None and not self.keys_given
        if self.global_heads is not None or sharing:
            local = expanded(self.attention_pattern, self.layers)
            kinds = [BLOCK if one else GLOBAL for one in local]
            shared = zip(kinds, shares_keys(self), strict=True)
            return tuple(SHARING[kind] if given and sharing else kind for kind, given in shared)
        mixers = self.mixers if self.mixer_pattern else (ATTENTION,) * self.layers
        blocks = [
            block_kind(mixer, dense=dense) for mixer, dense in zip(mixers, self.dense, strict=True)
        ]
        if self.attention_pattern and self.mixer_pattern:
            local = expanded(self.attention_pattern, self.layers)
            pairs = zip(blocks, local, strict=True)
            blocks = [GLOBAL if kind == BLOCK and not one else kind for kind, one in pairs]
        alike = (BLOCK,) * self.layers
        several = any(self.dense) or len({*mixers}) > 1
        return tuple(blocks) if several else alike

    @property
    def carries(self) -> bool:
        """Whether something passes from block to block beside the residual stream."""
        return self.block_inputs is not None or self.key_sharing is not None

    @cached_property
    def local_blocks(self) -> tuple[bool, ...]:
        """Whether each block is local; empty: there is no `attention_pattern`."""
        return expanded(self.attention_pattern, self.layers)

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """The kind of every block."""
        return self._blocks

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
        return self._views.get(kind, self)

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
        return self._sequence

    def kind_parameter_count(self, kind: str) -> int:
        """Elements in one layer of this kind (a tied head holds only its norm)."""
        return sum(parameter.values for parameter in self._kinds[kind])

    @property
    def routed_blocks(self) -> int:
        """How many blocks have experts."""
        return sum(self.seen_by(kind).experts > 0 for kind in self.block_kinds)

    def passed(self, parameter: Parameter) -> int:
        """Elements of a parameter that a token passes: those of the experts picked for it."""
        if not parameter.name.startswith(OF_AN_EXPERT):
            return parameter.values
        return parameter.count // self.experts * self.experts_per_token

    @property
    def active_parameter_count(self) -> int:
        """Elements that a token passes; without experts, all that `parameter_count` counts."""
        idle = {
            kind: sum(parameter.values - self.passed(parameter) for parameter in parameters)
            for kind, parameters in self._kinds.items()
        }
        return self.parameter_count - sum(idle[kind] for kind in self.layer_sequence())

    @property
    def parameter_count(self) -> int:
        """Elements in the whole model; a tied table counts once."""
        counts = {kind: self.kind_parameter_count(kind) for kind in self._kinds}
        return sum(counts[kind] for kind in self.layer_sequence())
