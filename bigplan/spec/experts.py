"""What the fields of a model with experts may be together."""

from __future__ import annotations

from typing import Any

from bigplan.errors import InputError
from bigplan.spec.mixers import MLP

DENSE, ROUTED = "dense", "routed"  # blocks of an `expert_pattern`
OF_EXPERTS = (  # keys that say something only where there are experts
    *("experts", "experts_per_token", "router_normalised", "router_loss", "routing"),
    *("shared_ffn", "shared_gate", "dense_blocks", "dense_ffn"),
    *("expert_pattern", "expert_norms", "expert_latent"),
)


def check_experts(model: Any) -> None:
    """Raise InputError where an Architecture's fields of experts contradict each other, or others.

    Any, because that module imports this one.
    """
    if not model.experts:
        _check_unused(model)
        return
    _check_choice(model)
    _check_beside(model)
    _check_mlp(model)


def _check_unused(model: Any) -> None:
    """What only models with experts have."""
    if model.mlp == "clamped_swiglu":
        raise InputError(
            "`mlp: clamped_swiglu` without `experts`, which alone have it; "
            "state them, or use swiglu"
        )
    values = {key: getattr(model, key) for key in OF_EXPERTS[1:]}
    usual = {key: type(model).model_fields[key].default for key in values}
    unused = [
        f"`{key}`" if key in ("routing", "expert_pattern", "expert_norms") else f"`{key}` {value:g}"
        for key, value in values.items()
        if value != usual[key] and key != "router_normalised"
    ]
    if unused:
        raise InputError(f"{' and '.join(unused)} without `experts`; state `experts`, or remove it")


def _check_choice(model: Any) -> None:
    """How a token chooses its experts."""
    if not 1 <= model.experts_per_token <= model.experts:
        raise InputError(
            f"`experts_per_token` is {model.experts_per_token}, which must be from 1 to "
            f"`experts` {model.experts}; correct it"
        )
    if problem := model.routed_by.problem(model.experts, model.experts_per_token):
        raise InputError(problem)
    if model.routed_by.scores == "sparsemixer" and model.router_normalised:
        raise InputError(
            "`routing.scores` is sparsemixer with `router_normalised`, but each of its weights is "
            "a share of its own; set `router_normalised: false`"
        )
    if model.routed_by.scores == "sigmoid" and model.router_loss:
        raise InputError(
            f"`router_loss` {model.router_loss:g} balances a softmax, but `routing.scores` is "
            "sigmoid; remove it"
        )


def _check_beside(model: Any) -> None:
    """The MLPs beside experts, and in first blocks in place of them."""
    if model.shared_gate and not model.shared_ffn:
        raise InputError(
            "`shared_gate` without `shared_ffn`, the MLP that it gates; state it, or remove it"
        )
    if model.expert_norms == "after" and model.norms != "before":
        raise InputError(
            f"`expert_norms: after` with `norms: {model.norms}`, by which one stands behind "
            "experts already; remove it"
        )
    if model.expert_norms == "each" and (model.norms != "around" or not model.shared_ffn):
        raise InputError(
            f"`expert_norms: each` with `norms: {model.norms}` and `shared_ffn` "
            f"{model.shared_ffn}, but it is of experts beside an MLP, whose sum has norms around "
            "it; state `norms: around` and `shared_ffn`, or remove it"
        )
    if model.expert_latent and (model.expert_norms == "each" or model.mlp_bias):
        beside = "mlp_bias" if model.mlp_bias else "expert_norms: each"
        raise InputError(
            f"`expert_latent` {model.expert_latent} with `{beside}`, but experts of a latent have "
            "no biases, and no norms of their own; remove one"
        )
    if model.expert_pattern:
        _check_pattern(model)
    elif bool(model.dense_blocks) != bool(model.dense_ffn):
        raise InputError(
            f"`dense_blocks` is {model.dense_blocks} and `dense_ffn` {model.dense_ffn}, the "
            "inner width of their MLP; state both, or remove both"
        )
    if model.dense_blocks >= model.layers:
        raise InputError(
            f"`dense_blocks` {model.dense_blocks} of `layers` {model.layers} leaves no block "
            "with experts; use fewer, or remove `experts`"
        )


def _check_pattern(model: Any) -> None:
    """Blocks with experts and without, in turns."""
    told = ", ".join(model.expert_pattern)
    alone = MLP in model.mixers
    blocks = zip(model.dense, model.mixers, strict=True)
    if len({dense for dense, mixer in blocks if mixer == MLP or not alone}) == 1:
        raise InputError(f"`expert_pattern` {told} makes all blocks alike; remove it")
    if model.dense_blocks:
        raise InputError(
            f"`expert_pattern` {told} with `dense_blocks`, which says too what blocks are; remove "
            "one"
        )
    if not model.dense_ffn:
        raise InputError(
            f"`expert_pattern` {told} without `dense_ffn`, the inner width of the MLP of blocks "
            "without experts; state it"
        )


def _check_mlp(model: Any) -> None:
    """What an expert is."""
    unlike = {
        f"`mlp: {model.mlp}`": model.mlp not in ("swiglu", "clamped_swiglu", "geglu", "relu2"),
        "`parallel_residual`": model.parallel_residual,
    }
    if found := [name for name, there in unlike.items() if there]:
        raise InputError(
            f"`experts` {model.experts} with {' and '.join(found)}, but experts are swiglu "
            "MLPs, clamped or not, geglu or relu2 MLPs, after attention; change that, or remove "
            "`experts`"
        )
    of_gates = [key for key in ("mlp_bias", "shared_gate") if getattr(model, key)]
    if of_gates and not model.gated:
        raise InputError(
            f"`experts` {model.experts} with `mlp: {model.mlp}` and `{of_gates[0]}`, which experts "
            "with a gate have; remove one"
        )
    if model.mlp == "geglu" and of_gates:
        raise InputError(
            f"`experts` {model.experts} with `mlp: geglu` and `{of_gates[0]}`, which swiglu "
            "experts have; remove one"
        )
    if model.routed_by.weighs == "inputs" and (model.mlp != "swiglu" or model.mlp_bias):
        beside = "mlp_bias" if model.mlp == "swiglu" else f"mlp: {model.mlp}"
        raise InputError(
            f"`routing.weighs: inputs` with `{beside}`, but the experts whose inputs are weighed "
            "are swiglu MLPs without biases; change one"
        )
    own = {"`mlp_bias`": model.mlp_bias, "`mlp: clamped_swiglu`": model.mlp == "clamped_swiglu"}
    found = [name for name, there in own.items() if there]
    places = ("shared_ffn", "dense_blocks", "expert_pattern")
    others = [key for key in places if getattr(model, key)]
    if found and others:
        raise InputError(
            f"{' and '.join(found)} of experts with `{others[0]}`, whose MLPs have neither; "
            "remove one"
        )
