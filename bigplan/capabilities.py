"""Limits of the engines: why an engine cannot run a training with a strategy, or that it can."""

from __future__ import annotations

from collections.abc import Mapping

from bigplan.graph.strategy import Strategy
from bigplan.spec.gpu import Gpu
from bigplan.spec.lora import Lora
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.spec.unplanned import unplanned

NATIVE_ROPE_SCALINGS = ("linear", "llama3")
WITH_EXPERTS = ("megatron",)  # other tools that are planned for models with experts
# Parts of models that bigplan plans for its own runtime alone.
NATIVE_PARTS = (
    *("norm_plus_one", "norms", "embedding_scale", "attention_pattern"),
    *("score_scale", "score_cap", "logit_cap"),
)
# Keys of a training, each with the values that the native runtime executes. Other values can be
# planned, but not run.
NATIVE_TRAINING: Mapping[str, tuple[object, ...]] = {
    "fp8_gemms": (False,),
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


def other_tools_refusal(model: ModelSpec, lora: Lora | None, tool: str) -> str | None:
    """Why a tool is not planned for with this model, or with adapters; None: it may be."""
    if lora is not None:
        return "lora runs with --engine native alone"
    if model.experts and tool not in WITH_EXPERTS:
        return (
            "bigplan plans experts for its own runtime and for Megatron-LM alone, not for "
            f"{tool}: {model.name} has {model.experts} in each block; plan with --engine native "
            "or megatron"
        )
    usual = ModelSpec.model_fields
    parts = [key for key in NATIVE_PARTS if getattr(model, key) != usual[key].default]
    if parts or model.mlp == "geglu":
        told = ", ".join(parts or ["mlp geglu"])
        return (
            f"bigplan plans models with {told} for its own runtime alone, not for {tool}: "
            f"{model.name} has it; plan with --engine native"
        )
    return None


def expert_parallel_refusal(ways: object, model: ModelSpec, tool: str) -> str | None:
    """Why experts are not spread over so many ranks by `tool`; None: they may be."""
    if str(ways) == "1" or (model.experts and tool in WITH_EXPERTS):
        return None
    return f"ep {ways}: {unplanned('ep')}"


def native_refusal(model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
    """Why the native runtime cannot execute this; None: it can."""
    if refusal := expert_parallel_refusal(strategy.ep, model, "native"):
        return refusal
    tokens = strategy.rank_tokens(training)
    if strategy.sequence_parallel and tokens % strategy.tp:
        return (
            f"the native runtime shares out the tokens of a micro-batch to tensor-parallel ranks, "
            f"and {tokens} do not divide by tp {strategy.tp}: use a sequence_length that does, or "
            "sequence_parallel 0"
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.name not in NATIVE_ROPE_SCALINGS:
        return (
            "the native runtime executes the rope_scaling "
            f"{' and '.join(NATIVE_ROPE_SCALINGS)} only, not {scaling.name}: use one of them, or "
            "none up to the length of the pre-training"
        )
    return _training_refusal(training)


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
        "native": device_refusal(gpu) or native_refusal(model, training, strategy) or True,
        "deepspeed": deepspeed_refusal(),
    }
