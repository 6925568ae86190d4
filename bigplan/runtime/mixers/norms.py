"""Norms of a block, by torch's operators or generated kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from bigplan.runtime import generated
from bigplan.runtime.generated import NormRule
from bigplan.runtime.mixers.ways import Parameters, Ways, keep
from bigplan.runtime.operators import RmsRule, layer_norm, rms_norm
from bigplan.runtime.parallel.wide_norm import wide_norm
from bigplan.spec.model import ModelSpec

if TYPE_CHECKING:
    from bigplan.kernels.fusion.single import NormKind
    from bigplan.kernels.library import Library


def norm_of(
    p: Parameters,
    name: str,
    x: Tensor,
    model: ModelSpec,
    ways: Ways,
    *,
    over: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm called `name` of x [..., h], as the model has it, and x for all others to read.

    An RMSNorm, and any norm by a generated kernel, adds the gradient by that x to its own. With
    `over` it writes the sum over that gradient, so nothing else may hold the gradient then. A
    block's caller may hold a block's gradient.
    """
    weights, forget = norm_weights(p, name), ways.forget
    if ways.kernels is not None:
        rule = norm_rule(model, ways.kernels)
        normed, x = generated.norm(rule, x, *weights, over=over)
        forget(normed, partial(generated.normed, rule), x, *weights)
        return normed, x
    if model.norm == "rmsnorm":
        rms, weight = rms_rule(model), weights[0] if weights else None
        normed, x = rms_norm(x, weight, rms, over=over)
        again = partial(rms_normed, rule=rms) if weights else partial(_unweighted, rms)
        forget(normed, again, x, *weights)
        return normed, x
    inputs = (x, *weights)
    norm = partial(layer_norm, epsilon=model.norm_epsilon, plus_one=model.norm_plus_one)
    normed = norm(*inputs)
    forget(normed, norm, *inputs)
    return normed, x


def norm_weights(p: Parameters, name: str) -> tuple[Tensor, ...]:
    """Weight and bias, where it has them."""
    found = (p.get(f"{name}.{part}") for part in ("weight", "bias"))
    return tuple(part for part in found if part is not None)


def norm_rule(model: ModelSpec, kernels: Library) -> NormRule:
    """The model's norm, by generated kernels."""
    kinds: dict[str, NormKind] = {
        "rmsnorm": "rmsnorm_plus_one",
        "layernorm": "layernorm_plus_one",
    }
    kind = kinds[model.norm] if model.norm_plus_one else model.norm
    return NormRule(kernels, kind, model.norm_epsilon)


def rms_rule(model: ModelSpec) -> RmsRule:
    """The model's RMSNorm, by torch's operators."""
    return RmsRule(model.norm_epsilon, model.norm_plus_one)


def norm_alone(p: Parameters, name: str, x: Tensor, model: ModelSpec, ways: Ways) -> Tensor:
    """A norm whose result is added and not saved, and whose input nobody else reads."""
    return norm_of(p, name, x, model, ways._replace(forget=keep))[0]


def normed_whole(p: Parameters, name: str, x: Tensor, model: ModelSpec, ways: Ways) -> Tensor:
    """The RMSNorm called `name` of all heads together, of which x [..., heads * d] may be some."""
    weight, rule = p[f"{name}.weight"], rms_rule(model)
    if ways.ranks.alone:
        return rms_normed(x, weight, rule, ways.kernels)
    return wide_norm(x, weight, rule, ways.ranks.group)


def _unweighted(rule: RmsRule, x: Tensor) -> Tensor:
    return rms_norm(x, None, rule)[0]


def rms_normed(
    x: Tensor, weight: Tensor | None, rule: RmsRule, kernels: Library | None = None
) -> Tensor:
    """The RMSNorm of x [..., h] alone, by weight [h] or none."""
    if kernels is not None:
        kind: NormKind = "rmsnorm_plus_one" if rule.plus_one else "rmsnorm"
        return generated.normed(NormRule(kernels, kind, rule.epsilon), x, weight)
    return rms_norm(x, weight, rule)[0]
