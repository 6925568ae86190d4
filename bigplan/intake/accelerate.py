"""Hugging Face Accelerate's configuration file, by accelerate 1.15's keys (commands/config)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.graph.graph import Recompute
from bigplan.intake import deepspeed
from bigplan.intake.copies import ONE_COPY, Copies
from bigplan.intake.section import Section
from bigplan.intake.setup import ALL, BatchSizes, Given, Offload, Recomputation, Setup
from bigplan.placement import Tier
from bigplan.spec.files.document import load_data
from bigplan.spec.files.reading import read_json, read_text
from bigplan.spec.unplanned import OTHER_CONTEXT_PARALLEL

_PRECISIONS = {"no": "fp32", "false": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_PRECISIONS["fp8"] = "bf16"
_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_ZERO = (3, 2, 0, 3, 2)
_HARMLESS = {
    *["compute_environment", "debug", "downcast_bf16", "machine_rank", "main_training_function"],
    *["rdzv_backend", "same_network", "use_cpu", "main_process_ip", "main_process_port", "gpu_ids"],
    *["enable_cpu_affinity", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone"],
    *["commands", "command_file", "tpu_vm", "mpirun_config", "num_machines", "fp16"],
}
_PARTS = ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config")
_HARMLESS_FSDP = {
    *["fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_cpu_ram_efficient_loading"],
    *["fsdp_forward_prefetch", "fsdp_state_dict_type", "fsdp_sync_module_states"],
    *["fsdp_transformer_layer_cls_to_wrap", "fsdp_use_orig_params", "fsdp_min_num_params"],
    *["fsdp_backward_prefetch_policy"],
}
_HARMLESS_DEEPSPEED = {
    *["zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"],
    *["deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"],
    *["offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_moe_layer_cls_names"],
}
_HARMLESS_MEGATRON = {
    *["megatron_lm_no_load_optim", "megatron_lm_no_save_optim", "megatron_lm_eod_mask_loss"],
    *["megatron_lm_attention_softmax_in_fp32", "megatron_lm_calculate_per_token_loss"],
    *["megatron_lm_use_rotary_position_embeddings", "megatron_lm_attention_dropout"],
    *["megatron_lm_use_precision_aware_optimizer"],
}


def read(path: Path, given: Given) -> Setup:
    """The file's training. Raises InputError, and RefusedError for what is never planned."""
    file = str(path)
    data = read_json(path).data if path.suffix == ".json" else load_data(read_text(path), file)[0]
    top = Section.of(data, file)
    kind = top.text("distributed_type", _KINDS)
    if kind is None:
        raise InputError(
            f"{file}: distributed_type is missing, which accelerate needs; write one of "
            f"{', '.join(_KINDS)}"
        )
    precision = _precision(top, given)
    stated = replace(given, precision=precision)
    setup = {"DEEPSPEED": _deepspeed, "MEGATRON_LM": _megatron, "FSDP": _fsdp}.get(kind, _plain)(
        top, path, stated
    )
    training = {**setup.training}
    if precision is not None:
        training.setdefault("precision", precision)
    if top.text("mixed_precision") == "fp8":
        training["fp8_gemms"] = True
    processes = top.whole("num_processes", -1) if kind != "NO" else 1
    processes = processes if processes and processes > 0 else None
    setup = replace(setup, training=training, processes=processes)
    for name in _PARTS:
        top.seen.add(name)  # of several sections, accelerate reads the one of its distributed_type
    return setup.with_told(
        (), [*_unpriced(top), *top.left(_HARMLESS)], top.without_effect(_HARMLESS)
    )


def _precision(top: Section, given: Given) -> str | None:
    stated = top.text("mixed_precision", _PRECISIONS)
    return given.precision if stated is None else _PRECISIONS[stated]


def _unpriced(top: Section) -> Iterator[str]:
    part = top.part("dynamo_config")
    backend = part.text("dynamo_backend") if part else top.text("dynamo_backend")
    if backend not in (None, "NO", "no"):
        yield f"dynamo_backend {backend}: priced as fused kernels, the loss apart"
    fp8 = top.part("fp8_config")
    if fp8 is not None and fp8.data:
        yield "fp8_config: priced as fp8 GEMMs of the blocks"
    top.seen.update({"dynamo_backend", "fp8_config", "dynamo_config"})
    parallel = top.part("parallelism_config")
    for key, value in (parallel.data if parallel else {}).items():
        if key.endswith(("cp_size", "sp_size")) and isinstance(value, int) and value > 1:
            raise RefusedError(f"{top.file}: parallelism_config.{key}: {OTHER_CONTEXT_PARALLEL}")


def _plain(top: Section, path: Path, given: Given) -> Setup:
    """A training with DistributedDataParallel, or with one process."""
    return Setup("accelerate", split={"zero": 0}, again=None)


def _fsdp(top: Section, path: Path, given: Given) -> Setup:
    part = top.part("fsdp_config") or Section({}, top.file, "fsdp_config")
    version = part.whole("fsdp_version", 1) or 1
    told = list[str]()
    stated = part.text("fsdp_sharding_strategy") or ""
    reshard = part.text("fsdp_reshard_after_forward") or ""
    word = (stated if version == 1 or not reshard else reshard) or reshard or "FULL_SHARD"
    zero = _stage(part, word)
    copies, hybrid = _copies(top, version), word.upper().startswith("HYBRID") or word in ("4", "5")
    if hybrid and version == 1:  # torch's default groups (fsdp/_init_utils.py)
        copies = Copies(of_node=True)
    elif hybrid:
        told.append(
            f"fsdp_config: {word} is FSDP1's: FSDP2 shards over all ranks, or over the "
            "dp_shard_size of parallelism_config"
        )
    if version == 1:
        told.append("fsdp_config.fsdp_version 1: priced as FSDP2, which moves and keeps the same")
    stated_again = part.flag("fsdp_activation_checkpointing")
    again = (
        Recomputation(Recompute.FULL)
        if stated_again
        else None
        if stated_again is None
        else Recomputation()
    )
    if part.flag("fsdp_activation_checkpointing_offload"):
        told.append("fsdp_config.fsdp_activation_checkpointing_offload: activations leave the GPU")
    offload = Offload(Tier.HOST, Tier.HOST) if part.flag("fsdp_offload_params") else Offload()
    split = {"zero": zero}
    parallel = top.part("parallelism_config")
    if parallel is not None:
        split["tp"] = parallel.whole("parallelism_config_tp_size", 1) or 1
    setup = Setup("accelerate", split=split, copies=copies, offload=offload, again=again)
    return setup.with_told(
        (), (*told, *part.left(_HARMLESS_FSDP)), part.without_effect(_HARMLESS_FSDP)
    )


def _copies(top: Section, version: int) -> Copies:
    """Groups of ParallelismConfig (accelerate/parallelism_config.py): dp_replicate is outside."""
    part = top.part("parallelism_config") or Section({}, top.file, "parallelism_config")
    where = "parallelism_config_dp_replicate_size"
    number = part.whole(where, 1) or 1
    ranks = part.whole("parallelism_config_dp_shard_size", 1) or 1
    if number == 1:
        return ONE_COPY
    if version == 1 or ranks == 1:
        needed = "fsdp_version 2" if version == 1 else "a dp_shard_size of several ranks"
        raise part.wrong(where, f"for which accelerate needs {needed}")
    return Copies(ranks, number)


def _stage(part: Section, word: str) -> int:
    """ZeRO's stage for a sharding strategy: by its name, its number, or whether it reshards."""
    if word.lower() in ("true", "false"):
        return 3 if word.lower() == "true" else 2
    name = word.upper()
    if word.isdecimal() and 1 <= int(word) <= len(_SHARDING):
        name = _SHARDING[int(word) - 1]
    if name not in _SHARDING:
        raise InputError(
            f"{part.file}: fsdp_config's sharding is {quoted(word)}, which must be true, false or "
            f"one of {', '.join(_SHARDING)}; correct it"
        )
    return _ZERO[_SHARDING.index(name)]


def _deepspeed(top: Section, path: Path, given: Given) -> Setup:
    part = top.part("deepspeed_config") or Section({}, top.file, "deepspeed_config")
    named = part.text("deepspeed_config_file")
    if named is not None:
        file = path.parent / named
        ignored = part.without_effect(_HARMLESS_DEEPSPEED)
        return deepspeed.read(file, given).with_told((), (), ignored)
    zero: dict[str, Any] = {"stage": part.whole("zero_stage") if "zero_stage" in part.data else 2}
    for name in ("offload_optimizer", "offload_param"):
        device = part.text(f"{name}_device", ("none", "cpu", "nvme"))
        if device not in (None, "none"):
            zero[name] = {"device": device}
    written: dict[str, Any] = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": part.whole("gradient_accumulation_steps", 1),
        "gradient_clipping": part.number("gradient_clipping"),
    }
    if given.precision != "fp32":
        enabled = True if given.precision else "auto"
        written[given.precision or "bf16"] = {"enabled": enabled}
    left = [*part.left(_HARMLESS_DEEPSPEED)]
    setup = deepspeed.setup_of(written, top.file, given)
    return setup.with_told((), left, part.without_effect(_HARMLESS_DEEPSPEED))


def _megatron(top: Section, path: Path, given: Given) -> Setup:
    part = top.part("megatron_lm_config") or Section({}, top.file, "megatron_lm_config")

    def whole(name: str) -> int | None:
        return part.whole(f"megatron_lm_{name}", 1)

    def flag(name: str) -> bool:
        return bool(part.flag(f"megatron_lm_{name}"))

    _refuse(part)
    tp = whole("tp_degree") or 1
    split = {
        "tp": tp,
        "pp": whole("pp_degree") or 1,
        "zero": int(flag("use_distributed_optimizer")),
    }
    if tp > 1:
        split["sequence_parallel"] = int(flag("sequence_parallelism"))
    for end in ("first", "last"):
        if count := whole(f"decoder_{end}_pipeline_num_layers"):
            split[f"{end}_blocks"] = count
    training: dict[str, Any] = {
        "gradient_precision": "fp16" if given.precision == "fp16" else "fp32"
    }
    if (clip := part.number("megatron_lm_gradient_clipping")) is not None:
        training["clip_norm"] = clip or None
    if (dropout := part.number("megatron_lm_hidden_dropout")) is not None:
        training["dropout"] = dropout
    again, told = _megatron_again(part)
    if flag("use_custom_fsdp"):
        split["zero"] = 3
    offload = Offload(Tier.HOST) if flag("optimizer_cpu_offload") else Offload()
    if flag("overlap_cpu_optimizer_d2h_h2d"):
        told.append("megatron_lm_overlap_cpu_optimizer_d2h_h2d: copies run beside the update")
    if part.text("megatron_lm_attention_backend") == "unfused":
        training["attention"] = "materialised"
    told += part.left(_HARMLESS_MEGATRON)
    batch = BatchSizes(accumulation=whole("num_micro_batches"))
    setup = Setup("megatron", training, batch, split, offload, again)
    return setup.with_told((), told, part.without_effect(_HARMLESS_MEGATRON))


def _refuse(part: Section) -> None:
    for name, why in (
        ("context_parallel_size", OTHER_CONTEXT_PARALLEL),
        ("expert_model_parallel_size", "it is not planned"),
    ):
        if (part.whole(f"megatron_lm_{name}", 1) or 1) > 1:
            raise RefusedError(f"{part.file}: megatron_lm_{name}: {why}")
    part.whole("megatron_lm_expert_tensor_parallel_size", 0)


def _megatron_again(part: Section) -> tuple[Recomputation, list[str]]:
    granularity = part.text("megatron_lm_recompute_granularity", ("full", "selective"))
    method = part.text("megatron_lm_recompute_method", ("uniform", "block"))
    count = part.whole("megatron_lm_recompute_num_layers", 1)
    selective = part.flag("megatron_lm_recompute_activations")
    if granularity == "full":
        return Recomputation(Recompute.FULL, count if method == "block" and count else ALL), []
    if granularity == "selective" or selective:
        return Recomputation(), [
            "megatron_lm_recompute_activations: priced without, as FlashAttention's backward makes "
            "the scores again anyway"
        ]
    return Recomputation(), []
