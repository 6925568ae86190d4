"""Features that no plan holds yet, by users' words for them, to refuse them by name.

Context parallelism is planned: its other names lead to its own.
"""

from __future__ import annotations

EXPERTS = "experts of other kinds, or as other tools run them, are not planned"
ADAPTERS = "adapters other than those of `training.lora` are not planned"
DORA = "DoRA is not planned"
ON_EXPERTS = "adapters of experts are named as others are"
CONTEXT_PARALLEL = "context parallelism is a decision, cp"
OTHER_CONTEXT_PARALLEL = (
    "bigplan does not price how other tools exchange keys and values between context-parallel "
    "ranks; leave it out, or plan bigplan's own runtime with --set cp=N"
)
EXPERT_PARALLEL = "expert parallelism is a decision, ep"
OTHER_EXPERT_PARALLEL = (
    "bigplan plans expert parallelism for its own runtime and for Megatron-LM alone; leave it out, "
    "or plan with --engine native and --set ep=N"
)
NO_MICS = (
    "DeepSpeed shards over groups of ranks no more (0.19.8 has no MiCS; hpZ keeps a second copy of "
    "parameters in a group, and shards state over all ranks); leave it out, or plan with --engine "
    "native"
)

ISOLATES_ALONE = (
    "bigplan keeps documents apart in its own runtime alone, not for {tool}: plan with --engine "
    "native, or leave isolate_documents off"
)
# Tools that keep documents apart themselves, but by their own data, which bigplan does not write.
OTHERS_ISOLATE = {
    "megatron": "bigplan does not plan for Megatron-LM with it, which finds documents by their end "
    "tokens (--reset-attention-mask, --reset-position-ids, --eod-mask-loss): plan with --engine "
    "native, or leave it off and add these options yourself",
    "torchtitan": "bigplan does not plan for torchtitan with it, which finds documents by their "
    "end tokens (attn_mask_type block_causal): plan with --engine native, or leave it off and set "
    "that yourself",
}
PREFERS_ALONE = (
    "preference: bigplan learns from pairs of responses in its own runtime alone, not with {tool}: "
    "plan with --engine native, or leave preference out"
)

_REMEDIES = {
    EXPERTS: "leave it out; a model has its own as `experts` and `experts_per_token`",
    ADAPTERS: "write `lora` in `training`, such as {rank: 16}, or leave it out",
    DORA: "leave it out; `lora` trains LoRA's adapters",
    ON_EXPERTS: "leave it out, and name them in `targets` of `lora`, such as experts.up_proj",
    CONTEXT_PARALLEL: "leave it out; --set cp=N pins it, and so does `set` in a file",
    EXPERT_PARALLEL: "leave it out; --set ep=N pins it, and so does `set` in a file",
}
_PHRASES = {
    "context_parallel": CONTEXT_PARALLEL,
    "expert_parallel": EXPERT_PARALLEL,
    "dora": DORA,
    "target_parameters": ON_EXPERTS,
}
# Fields that one of the words below stands in.
_PLANNED = (
    *("experts", "experts_per_token", "expert_pattern", "expert_norms", "router_normalised"),
    "expert_latent",
    *("router_loss", "lora"),
)
_WORDS = {
    "ep": EXPERT_PARALLEL,
    "expert": EXPERTS,
    "experts": EXPERTS,
    "moe": EXPERTS,
    "router": EXPERTS,
    "adapter": ADAPTERS,
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
    "peft": ADAPTERS,
    "qlora": ADAPTERS,
}


def unplanned(key: str) -> str | None:
    """Why a key of this name is refused and what to do; None where it asks for nothing unplanned.

    `unplanned("lora_rank")` is "adapters other than those of `training.lora` are not planned; ...".
    """
    key = key.lower().replace("-", "_")
    if key in _PLANNED:
        return None
    found = [what for phrase, what in _PHRASES.items() if phrase in key]
    found += [_WORDS[word] for word in key.split("_") if word in _WORDS]
    return f"{found[0]}; {_REMEDIES[found[0]]}" if found else None
