"""Other tools: for which models and trainings plans are made for them."""

from __future__ import annotations

from bigplan.capabilities.splits import WITH_EXPERTS
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.spec.unplanned import ISOLATES_ALONE, OTHERS_ISOLATE, PREFERS_ALONE

# Parts of models that Megatron-LM is planned for with, and those of bigplan's own runtime.
MEGATRON_PARTS = ("latent_attention", "routing", "shared_ffn", "dense_blocks", "expert_pattern")
NATIVE_PARTS = (
    *MEGATRON_PARTS,
    *("norm_plus_one", "weightless_norms", "norms", "shared_norm", "qk_norm_whole", "head_bias"),
    *("embedding_scale", "residual_scale", "score_scale", "score_cap", "logit_scale", "logit_cap"),
    *("attention_pattern", "attention_sinks", "qk_norm_turned", "value_norm", "block_scale"),
    *("mixer_pattern", "attention_gate", "delta_rule", "state_space"),
    *("attention_chunk", "attention_beside", "mlp_scale", "gate_scale", "global_heads"),
    *("convolution", "keys_as_values", "expert_norms", "gate_of_heads", "expert_latent"),
    *("key_sharing", "block_inputs"),
)
NATIVE_MLPS = ("clamped_swiglu", "geglu", "relu2", "xielu")


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
