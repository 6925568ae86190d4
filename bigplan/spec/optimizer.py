"""The optimizer's constants, which parameters have constants of their own, and which Muon's.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) updates the blocks' matrices by
their momentum made about orthogonal, as torch.optim.Muon does; AdamW updates all else, by the same
learning rate. Experts are a matrix each, and so is whatever a block multiplies by: queries, keys
and values apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bigplan.errors import InputError, quoted
from bigplan.spec.files.document import Spec
from bigplan.spec.files.words import did_you_mean
from bigplan.spec.layers import BLOCKS, first_block
from bigplan.spec.lora import Lora, trained
from bigplan.spec.model import ModelSpec
from bigplan.spec.moments import ELEMENT, MOST_BETA1, Moments
from bigplan.spec.step import Parameter


class ParameterGroup(Spec):
    """Parameters with constants of their own. Of several matching groups, the first counts."""

    match: str = Field(min_length=1)
    """glob over full names, such as "layers.*.input_norm.weight"; * also matches dots"""
    weight_decay: float | None = Field(default=None, ge=0)
    """default: as without the group"""
    learning_rate_factor: float = Field(default=1.0, ge=0)
    """the learning rate, of every step, times this"""


def _usual_decay(data: dict[str, str]) -> float:
    return 0.0 if data["name"] == "sgd" else 0.1


def _usual_momentum(data: dict[str, str]) -> float:
    return 0.95 if data["name"] == "muon" else 0.9


AdjustRate = Literal["match_rms_adamw", "original"]
NS_STEPS = 5
# What each optimizer has not.
_FOREIGN = {
    "adamw": {"momentum", "ns_steps", "adjust_lr_fn"},
    "sgd": {"beta1", "beta2", "epsilon", "moments", "ns_steps", "adjust_lr_fn"},
    "muon": {"moments"},
}


class Optimizer(Spec):
    """AdamW, SGD or Muon; AdamW's defaults are those of Llama-style pre-training.

    Muon's matrices have `momentum`, `ns_steps` and `adjust_lr_fn`, what AdamW updates beside them
    `beta1`, `beta2` and `epsilon`.
    """

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    moments: Moments = Field(default="fp32", exclude_if=lambda moments: moments == "fp32")
    """how AdamW's are stored: fp32, bf16, or int8 with a scale for each 256 elements"""
    momentum: float = Field(default_factory=_usual_momentum, ge=0, lt=1)
    """of SGD, default 0.9; 0: none, and no state for it. Of Muon, default 0.95"""
    ns_steps: int = Field(default=NS_STEPS, ge=1, le=99, exclude_if=lambda steps: steps == NS_STEPS)
    """of Muon: iterations that make an update about orthogonal"""
    adjust_lr_fn: AdjustRate = Field(
        default="match_rms_adamw", exclude_if=lambda name: name == "match_rms_adamw"
    )
    """of Muon, the rate of a matrix [out, in] over the learning rate, as torch.optim.Muon names it:
    match_rms_adamw (0.2 sqrt(max(out, in)), with which AdamW's rates serve) or original
    (sqrt(max(1, out / in)))"""
    weight_decay: float = Field(default_factory=_usual_decay, ge=0)
    """of matrices; biases and norms have none unless a group says so; default: 0.1, of SGD 0"""
    groups: tuple[ParameterGroup, ...] = ()
    """parameters with constants of their own"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "muon" and self.moments != "fp32":
            raise InputError(
                f"moments {self.moments} are of adamw; muon keeps its momentum in fp32, and the "
                "moments of what AdamW updates beside it: leave moments out"
            )
        usual = type(self).model_fields
        stated = sorted(
            name
            for name in _FOREIGN[self.name] & self.model_fields_set
            if getattr(self, name)
            != usual[name].get_default(
                call_default_factory=True, validated_data={"name": self.name}
            )
        )
        if stated:
            raise InputError(
                f"{self.name} has no {', '.join(stated)}; remove it, or use another name"
            )
        if self.moments != "fp32" and self.beta1 > MOST_BETA1:
            raise InputError(
                f"moments {self.moments} round the first moment to 8 bits, in which changes by a "
                f"share of {1 - self.beta1:.2g} (beta1 {self.beta1}) vanish; use beta1 up to "
                f"{MOST_BETA1}, or moments: fp32"
            )
        return self

    @property
    def kept(self) -> int:
        """Values of optimizer state per parameter, besides a master copy.

        Of Muon one: parameters that AdamW updates have `seconds` besides.
        """
        if self.name == "adamw":
            return 2
        return 1 if self.momentum or self.name == "muon" else 0

    @property
    def seconds(self) -> int:
        """Second moments per parameter that AdamW updates beside Muon's, which have none."""
        return int(self.name == "muon")

    @property
    def kept_bytes(self) -> int:
        """Bytes of these, without scales."""
        return self.kept * ELEMENT[self.moments]


def orthogonalised(optimizer: Optimizer, kind: str, parameter: Parameter) -> bool:
    """Whether Muon updates the parameter of a layer of that kind.

    It leaves embedding, positions and head to AdamW, and all vectors: biases of experts are a
    vector each, and a channel's filter is one.
    """
    matrix = len(parameter.shape) == 2 and not parameter.name.endswith(".bias")
    matrix = matrix and not parameter.filters
    return optimizer.name == "muon" and kind in BLOCKS and matrix and not parameter.constant


class ParameterRule(NamedTuple):
    """The constants that a group sets for a tensor."""

    weight_decay: float
    learning_rate_factor: float


def full_name(layers: Sequence[str], layer: int, parameter: str) -> str:
    """A parameter's name in the whole model, whose layers are of these kinds.

    `layer` counts from the embedding, which is 0, or is content.ADAPTERS, whose names are whole.
    """
    if layer >= len(layers) or layers[layer] not in BLOCKS:
        return parameter
    return f"layers.{layer - first_block(layers)}.{parameter}"


def rules(
    optimizer: Optimizer, model: ModelSpec, layer: int, lora: Lora | None = None
) -> dict[str, ParameterRule]:
    """Weight decay and rate factor of a layer's trained tensors, by their names in the layer."""
    layers = model.layer_sequence()
    return {
        parameter.name: _rule(optimizer, full_name(layers, layer, parameter.name), parameter)
        for parameter in trained(model, layers[layer], lora)
    }


def _rule(optimizer: Optimizer, name: str, parameter: Parameter) -> ParameterRule:
    if parameter.constant:  # its gradient is zero, and so is every update without decay
        return ParameterRule(0.0, 1.0)
    usual = optimizer.weight_decay if parameter.decay else 0.0
    for group in optimizer.groups:
        if fnmatchcase(name, group.match):
            decay = usual if group.weight_decay is None else group.weight_decay
            return ParameterRule(decay, group.learning_rate_factor)
    return ParameterRule(usual, 1.0)


def check_groups(optimizer: Optimizer, model: ModelSpec, lora: Lora | None = None) -> None:
    """Raise InputError for a group that no trained parameter of the model is in."""
    names = dict(_names(model, lora))
    taken = set[str]()
    for number, group in enumerate(optimizer.groups):
        matched = {name for name in names if fnmatchcase(name, group.match)}
        if not matched:
            raise InputError(_unmatched(number, group, model, names))
        if matched <= taken:
            raise InputError(
                f"optimizer.groups[{number}] matches {quoted(group.match)}, but groups before it "
                "have all of these parameters, and the first match counts; move it up, or remove it"
            )
        taken |= matched


def _names(model: ModelSpec, lora: Lora | None) -> Iterator[tuple[str, Parameter]]:
    layers = model.layer_sequence()
    for layer, kind in enumerate(layers):
        for parameter in trained(model, kind, lora):
            if parameter.constant:
                continue
            yield full_name(layers, layer, parameter.name), parameter


def _unmatched(
    number: int, group: ParameterGroup, model: ModelSpec, names: Mapping[str, Parameter]
) -> str:
    ends = {"layers.*." + name.split(".", 2)[2] for name in names if name.startswith("layers.")}
    known = sorted(ends | {name for name in names if not name.startswith("layers.")})
    hint = did_you_mean(group.match, [*known, *names])
    return (
        f"optimizer.groups[{number}] matches {quoted(group.match)}, but {model.name} has no such "
        f"parameter{hint}; it has {', '.join(known)}"
    )
