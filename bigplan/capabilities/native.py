"""What the native runtime executes, and why not the rest."""

from __future__ import annotations

from collections.abc import Mapping

from bigplan.capabilities.splits import (
    carried_refusal,
    copies_refusal,
    muon_refusal,
    spread_refusal,
)
from bigplan.graph.strategy import Strategy
from bigplan.spec.gpu import Gpu
from bigplan.spec.model import ModelSpec
from bigplan.spec.places import places_refusal
from bigplan.spec.training import Training

NATIVE_ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope", "proportional")
EIGHT_BIT_SIDES = 16  # cuBLAS's 8-bit products take rows of whole 16 bytes
# Keys of a training, each with the values that the native runtime executes. Other values can be
# planned, but not run.
NATIVE_TRAINING: Mapping[str, tuple[object, ...]] = {
    "attention": ("flash",),
    "dropout": (0.0,),
}


def device_refusal(gpu: Gpu) -> str | None:
    """Why no engine runs on such a device; None: an engine may run there."""
    if gpu.device == "rocm":
        return (
            f"no engine has ever run on a ROCm device, and the {gpu.name} is one: "
            "engines run on CUDA GPUs and on CPUs"
        )
    return None


def gpu_refusal(gpu: Gpu, model: ModelSpec, training: Training) -> str | None:
    """Why the native runtime does not train this on such a device; None: it may."""
    if why := device_refusal(gpu):
        return why
    if training.fp8_gemms and model.experts and gpu.runs_kernels and not gpu.grouped_eight_bits:
        return (
            f"fp8_gemms: products of experts in fp8 run on compute capability 9 alone (H100, H200, "
            f"GH200), for which torch has a kernel, and {model.name} has {model.experts} in each "
            f"block: leave it off on the {gpu.name}"
        )
    return None


def native_refusal(model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
    """Why the native runtime cannot execute this; None: it can."""
    if refusal := muon_refusal(training, dict(strategy)):
        return refusal
    if refusal := carried_refusal(model, dict(strategy)):
        return refusal
    spread = strategy.ep > 1
    if spread and (refusal := spread_refusal(model, training, dict(strategy))):
        return refusal
    tokens = strategy.rank_tokens(training)
    if strategy.sequence_parallel and tokens % strategy.tp:
        return (
            f"the native runtime shares out the tokens of a micro-batch to tensor-parallel ranks, "
            f"and {tokens} do not divide by tp {strategy.tp}: use a sequence_length that does, or "
            "sequence_parallel 0"
        )
    conv, own = model.convolution, training.sequence_length // strategy.cp
    if strategy.cp > 1 and conv is not None and own < conv.taps - 1:
        return (
            f"cp {strategy.cp}: a rank has {own} tokens of a sequence, but a convolution of "
            f"{conv.taps} taps reads {conv.taps - 1} of the rank before: use a smaller cp"
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.name not in NATIVE_ROPE_SCALINGS:
        *some, last = NATIVE_ROPE_SCALINGS
        return (
            f"the native runtime executes the rope_scaling {', '.join(some)} and {last} only, not "
            f"{scaling.name}: use one of them, or none up to the length of the pre-training"
        )
    return (
        places_refusal(model, training)
        or _training_refusal(training)
        or copies_refusal(model, training, strategy.tp, strategy.ep)
        or _eight_bits_refusal(model, training, strategy)
    )


def _eight_bits_refusal(model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
    """Products in 8 bits want every side in whole vectors of 16 bytes."""
    if not training.fp8_gemms:
        return None
    if model.experts and training.precision != "bf16":
        return (
            f"fp8_gemms: products of experts in fp8 give bf16, and precision is "
            f"{training.precision}: use precision bf16, or leave fp8_gemms off"
        )
    sides = _sides_of_products(model, strategy, strategy.rank_tokens(training))
    odd = [f"{name} is {side}" for name, side in sides.items() if side % EIGHT_BIT_SIDES]
    if not odd:
        return None
    return (
        f"products in fp8 have sides that divide by {EIGHT_BIT_SIDES}, and {', '.join(odd)}: leave "
        "fp8_gemms out"
    )


def _sides_of_products(model: ModelSpec, strategy: Strategy, tokens: int) -> dict[str, int]:
    """Rows and columns of a rank's products, by what the user knows them as.

    `tokens`: of a micro-batch on a rank.
    """
    tp = strategy.tp
    sides = {
        "hidden": model.hidden,
        f"ffn / tp {tp}": model.ffn // tp,
        f"heads x head_dim / tp {tp}": model.attention_width // tp,
        f"kv_heads x head_dim / tp {tp}": max(model.head_dim, model.kv_width // tp),
        "tokens of a micro-batch": tokens,
    }
    if (far := model.global_heads) is not None:
        width = max(far.head_dim, far.kv_heads * far.head_dim // tp)
        sides |= {
            f"heads x global_heads.head_dim / tp {tp}": model.heads * far.head_dim // tp,
            f"global_heads.kv_heads x head_dim / tp {tp}": width,
        }
    if model.block_inputs is not None:
        sides["block_inputs.width"] = model.block_inputs.width
    if model.key_sharing is not None:
        sides["key_sharing.ffn"] = model.key_sharing.ffn
    if model.gate_of_heads:
        sides[f"heads / tp {tp}"] = model.heads // tp
    sides |= _sides_of_mixers(model, tp)
    if model.experts:
        sides[f"dense_ffn / tp {tp}"] = (model.dense_ffn or 0) // tp
        sides[f"shared_ffn / tp {tp}"] = model.shared_ffn // tp
        sides["the score of shared_gate"] = int(model.shared_gate)
        sides["expert_latent"] = model.expert_latent
    if (latent := model.latent_attention) is not None:
        sides |= {
            "query_rank": latent.query_rank or 0,
            "kv_rank": latent.kv_rank,
            "rope_dim": latent.rope_dim,
            f"heads x plain_dim / tp {tp}": model.heads * latent.plain_dim // tp,
        }
    if model.latent_attention is not None or model.expert_latent:  # products of a rank's own tokens
        own = tokens // (tp if strategy.sequence_parallel else 1)
        sides["tokens of a tensor-parallel rank"] = own
    return sides


def _sides_of_mixers(model: ModelSpec, tp: int) -> dict[str, int]:
    """The same, of what stands in place of attention or beside it."""
    sides: dict[str, int] = {}
    if model.convolution is not None:
        sides[f"hidden / tp {tp}"] = model.hidden // tp
    if (rule := model.delta_rule) is not None:
        sides[f"value_heads / tp {tp}"] = rule.value_heads // tp
        sides[f"key_heads x key_dim / tp {tp}"] = rule.key_heads * rule.key_dim // tp
        sides[f"value_heads x value_dim / tp {tp}"] = rule.value_heads * rule.value_dim // tp
    if (space := model.state_space) is not None:
        sides |= {
            f"state_space.heads / tp {tp}": space.heads // tp,
            f"state_space.heads x head_dim / tp {tp}": space.width // tp,
            f"state_space.groups x state / tp {tp}": max(space.state, space.keys // tp),
        }
    return sides


def _training_refusal(training: Training) -> str | None:
    unlike = [
        name for name, values in NATIVE_TRAINING.items() if getattr(training, name) not in values
    ]
    if unlike:
        given = ", ".join(f"{name} {getattr(training, name)}" for name in unlike)
        usual = ", ".join(f"{name} {NATIVE_TRAINING[name][0]}" for name in unlike)
        return f"the native runtime does not execute {given}: use {usual}"
    reduced, stored = training.reduce_precision, training.gradient_precision
    if reduced not in (None, stored):
        return (
            f"the native runtime reduces gradients as it stores them, in {stored}, not in "
            f"{reduced}: leave reduce_precision out"
        )
    return None


def deepspeed_refusal() -> str:
    """Why DeepSpeed cannot execute the plan."""
    return "bigplan writes no DeepSpeed configuration"


def executable(
    model: ModelSpec, training: Training, strategy: Strategy, gpu: Gpu
) -> dict[str, bool | str]:
    """For each engine: True if it can execute this, else the reason why not."""
    return {
        "native": gpu_refusal(gpu, model, training)
        or native_refusal(model, training, strategy)
        or True,
        "deepspeed": deepspeed_refusal(),
    }
