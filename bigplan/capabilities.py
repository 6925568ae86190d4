"""Limits of the engines: why an engine cannot run a training with a strategy, or that it can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from math import prod

from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import undivided, unexchanged
from bigplan.spec.gpu import Gpu
from bigplan.spec.lora import trained
from bigplan.spec.model import ModelSpec
from bigplan.spec.moments import sharing_scales
from bigplan.spec.places import places_refusal
from bigplan.spec.training import Training
from bigplan.spec.unplanned import (
    ISOLATES_ALONE,
    OTHER_EXPERT_PARALLEL,
    OTHERS_ISOLATE,
    PREFERS_ALONE,
)

NATIVE_ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope", "proportional")
WITH_EXPERTS = ("megatron",)  # other tools that are planned for models with experts
# Parts of models that Megatron-LM is planned for with, and those of bigplan's own runtime.
MEGATRON_PARTS = ("latent_attention", "routing", "shared_ffn", "dense_blocks")
NATIVE_PARTS = (
    *MEGATRON_PARTS,
    *("norm_plus_one", "weightless_norms", "norms", "shared_norm", "qk_norm_whole", "head_bias"),
    *("embedding_scale", "residual_scale", "score_scale", "score_cap", "logit_scale", "logit_cap"),
    *("attention_pattern", "attention_sinks", "qk_norm_turned", "value_norm", "block_scale"),
    *("mixer_pattern", "attention_gate", "delta_rule", "state_space", "expert_pattern"),
    *("attention_chunk", "attention_beside", "mlp_scale", "gate_scale", "global_heads"),
    *("convolution", "keys_as_values", "expert_norms", "gate_of_heads"),
)
EIGHT_BIT_SIDES = 16  # cuBLAS's 8-bit products take rows of whole 16 bytes
NATIVE_MLPS = ("clamped_swiglu", "geglu", "relu2", "xielu")
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


def other_tools_refusal(model: ModelSpec, training: Training | None, tool: str) -> str | None:
    """Why a tool is not planned for with this model and training; None: it may be."""
    if training is not None and (why := _training_elsewhere_refusal(model, training, tool)):
        return why
    usual = ModelSpec.model_fields
    known = MEGATRON_PARTS if tool == "megatron" else ()
    parts = [
        key
        for key in NATIVE_PARTS
        if key not in known and getattr(model, key) != usual[key].default
    ]
    if model.positions == "none":
        parts.append("positions none")
    if model.experts and model.mlp_bias:
        parts.append("mlp_bias")
    parts += [f"routing.{part}" for part in model.routed_by.own]
    if model.of_latents is not model:  # Megatron-LM has one epsilon for all norms
        parts.append("latent_attention.norm_epsilon")
    scaling = model.rope_scaling if model.latent_attention else None
    if scaling is not None and scaling.query_growth:
        parts.append("rope_scaling.query_growth")
    if model.experts and tool not in WITH_EXPERTS:
        others = " or megatron" if set(parts) <= set(MEGATRON_PARTS) else ""
        return (
            "bigplan plans experts for its own runtime and for Megatron-LM alone, not for "
            f"{tool}: {model.name} has {model.experts} experts; plan with --engine native"
            f"{others}"
        )
    if parts or model.mlp in NATIVE_MLPS:
        told = ", ".join(parts or [f"mlp {model.mlp}"])
        return (
            f"bigplan plans models with {told} for its own runtime alone, not for {tool}: "
            f"{model.name} has it; plan with --engine native"
        )
    return None


def _training_elsewhere_refusal(model: ModelSpec, training: Training, tool: str) -> str | None:
    if training.lora is not None:
        return "lora runs with --engine native alone"
    if (moments := training.optimizer.moments) != "fp32":
        return (
            f"bigplan stores moments in {moments} in its own runtime alone, not for {tool}: plan "
            "with --engine native, or with moments fp32"
        )
    if training.fp8_gemms and model.experts:
        return (
            f"fp8_gemms: bigplan plans experts in fp8 for its own runtime alone, not for {tool}, "
            f"and {model.name} has {model.experts} experts: plan with --engine native, or "
            "leave it off"
        )
    if training.preference is not None:
        return PREFERS_ALONE.format(tool=tool)
    if training.isolate_documents:
        return f"isolate_documents: {OTHERS_ISOLATE.get(tool, ISOLATES_ALONE.format(tool=tool))}"
    if training.optimizer.name == "muon":
        return (
            f"bigplan runs and plans Muon in its own runtime alone, not for {tool}: plan with "
            "--engine native, or with optimizer adamw"
        )
    return None


def expert_parallel_refusal(ways: object, model: ModelSpec, tool: str) -> str | None:
    """Why experts are not spread over so many ranks by `tool`; None: they may be."""
    if str(ways) == "1" or (model.experts and tool in (*WITH_EXPERTS, "native")):
        return None
    if not model.experts:
        return (
            f"ep {ways}: {model.name} has no experts to spread over ranks; leave ep out, or plan "
            "a model with `experts`"
        )
    return f"ep {ways}: {OTHER_EXPERT_PARALLEL}"


def spread_refusal(model: ModelSpec, training: Training, fixed: Mapping[str, object]) -> str | None:
    """Why the native runtime does not spread experts over ranks so; None: it does.

    `fixed`: values of a strategy, all or some.
    """
    ep = int(str(fixed.get("ep", 1)))
    if ep == 1 or (why := expert_parallel_refusal(ep, model, "native")):
        return None if ep == 1 else why
    if fixed.get("replicas"):
        return f"ep {ep}: unlike nodes with unequal micro-batches spread no experts; use ep 1"
    if model.experts % ep:
        return (
            f"ep {ep} does not divide the {model.experts} experts of {model.name}: use an ep that "
            "does"
        )
    dp, cp = fixed.get("dp"), int(str(fixed.get("cp", 1)))
    if isinstance(dp, int) and dp * cp % ep:
        ranks = f"dp {dp}" if cp == 1 else f"dp {dp} x cp {cp}"
        return f"ep {ep} does not divide {ranks}, whose ranks spread experts: use an ep that does"
    return None


def tensor_parallel_refusal(model: ModelSpec, tp: object) -> str | None:
    """Why so many ranks do not share out what is in a layer; None: they do."""
    if odd := undivided(model, int(str(tp))):
        return (
            f"tp {tp} does not divide {' and '.join(odd)} of {model.name}, of which "
            "tensor-parallel ranks have equal parts: use a tp that does"
        )
    return None


def context_parallel_refusal(model: ModelSpec, fixed: Mapping[str, object]) -> str | None:
    """Why so many ranks do not exchange heads for tokens; None: they do, or with some tp.

    `fixed`: values of a strategy, all or some.
    """
    cp, tp = (int(str(fixed.get(name, 1))) for name in ("cp", "tp"))
    tried = (
        [tp] if "tp" in fixed else [n for n in range(1, model.heads + 1) if not undivided(model, n)]
    )
    if not all(unexchanged(model, n, cp) for n in tried):
        return None
    beside = f" on each of tp {tp} ranks" if tp > 1 else ""
    return (
        f"cp {cp} does not divide {' and '.join(unexchanged(model, tp, cp))} of {model.name}"
        f"{beside}, of which ranks that share sequences have equal parts: use a cp that does, or "
        "that is a multiple of kv_heads, key_heads or groups alone"
    )


def zero_group_refusal(fixed: Mapping[str, object]) -> str | None:
    """Why no runtime shards over groups of so many ranks; None: some do.

    `fixed`: values of a strategy, all or some.
    """
    ranks = int(str(fixed.get("zero_group", 0)))
    if not ranks:
        return None
    if fixed.get("zero") == 0:
        return f"zero_group {ranks} with zero 0, which shards nothing: use zero 1, 2 or 3"
    if int(str(fixed.get("ep", 1))) > 1:
        return (
            f"zero_group {ranks} with ep {fixed['ep']}: experts that are spread over ranks are "
            "shared by all ranks that have them; use ep 1, or leave zero_group out"
        )
    if ranks == 1:
        return "zero_group 1 shards nothing: use zero 0, or a zero_group of several ranks"
    dp = fixed.get("dp")
    shards = dp * int(str(fixed.get("cp", 1))) if isinstance(dp, int) else ranks
    if shards % ranks:
        return (
            f"zero_group {ranks} does not divide the {shards} ranks with the same parameters "
            "(dp x cp): use a divisor"
        )
    return None


def muon_refusal(training: Training, fixed: Mapping[str, object]) -> str | None:
    """Why Muon does not update what is split so; None: it does, or another optimizer does.

    `fixed`: values of a strategy, all or some.
    """
    if training.optimizer.name != "muon":
        return None
    if training.lora is not None:
        return "optimizer muon: adapters are trained by adamw or sgd; use one of them with lora"
    if (ways := fixed.get("ep", 1)) != 1:
        return (
            f"ep {ways}: Muon's updates are not planned where experts are spread over ranks; use "
            "ep 1, or optimizer adamw"
        )
    if fixed.get("replicas"):
        return (
            "replicas: Muon is not planned for unlike nodes with unequal micro-batches; leave them "
            "equal, or use optimizer adamw"
        )
    return None


def copies_refusal(model: ModelSpec, training: Training, tp: int, ep: int = 1) -> str | None:
    """Why copies of a tensor that several ranks have would come apart; None: they do not.

    Elements that share a scale get another one where ranks have other elements among them. A layer
    is cut between such blocks, and what more ranks have copies of comes last (`LayerKind`,
    `Adapters`): of experts that are spread over `ep` ranks, then of the rest.
    """
    block = sharing_scales(training.optimizer.moments)
    for kind in model.kinds() if block > 1 else ():
        sizes = Counter[tuple[bool, int]]()
        for parameter in trained(model, kind, training.lora):
            rest = ep > 1 and not parameter.experts
            sizes[rest, parameter.holders(tp)] += prod(parameter.local(tp, ep))
        ends = list(accumulate(size for _, size in sorted(sizes.items())))
        if odd := [end for end in ends[:-1] if end % block]:
            ways = f"tp {tp}" if ep == 1 else f"tp {tp} and ep {ep}"
            return (
                f"moments int8 with {ways}: {block} elements share a scale, and what more ranks "
                f"have, such as norms, follows {odd[-1]:,} elements that a rank has of a layer, "
                "which do not divide by it, so that ranks would round it otherwise: use other "
                "degrees, or moments bf16"
            )
    return None


def native_refusal(model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
    """Why the native runtime cannot execute this; None: it can."""
    if refusal := muon_refusal(training, dict(strategy)):
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
    if model.convolution is not None:
        sides[f"hidden / tp {tp}"] = model.hidden // tp
    if model.gate_of_heads:
        sides[f"heads / tp {tp}"] = model.heads // tp
    if (rule := model.delta_rule) is not None:
        sides[f"value_heads / tp {tp}"] = rule.value_heads // tp
        sides[f"key_heads x key_dim / tp {tp}"] = rule.key_heads * rule.key_dim // tp
        sides[f"value_heads x value_dim / tp {tp}"] = rule.value_heads * rule.value_dim // tp
    if model.experts:
        sides[f"dense_ffn / tp {tp}"] = (model.dense_ffn or 0) // tp
        sides[f"shared_ffn / tp {tp}"] = model.shared_ffn // tp
        sides["the score of shared_gate"] = int(model.shared_gate)
    if (space := model.state_space) is not None:
        sides |= {
            f"state_space.heads / tp {tp}": space.heads // tp,
            f"state_space.heads x head_dim / tp {tp}": space.width // tp,
            f"state_space.groups x state / tp {tp}": max(space.state, space.keys // tp),
        }
    if (latent := model.latent_attention) is not None:
        sides |= {
            "query_rank": latent.query_rank or 0,
            "kv_rank": latent.kv_rank,
            "rope_dim": latent.rope_dim,
            f"heads x plain_dim / tp {tp}": model.heads * latent.plain_dim // tp,
            "tokens of a tensor-parallel rank": tokens // (tp if strategy.sequence_parallel else 1),
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
