"""torchtitan's job configuration, by the keys and defaults of JobConfig in its 0.2 releases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigplan.cost.framework import FSDP
from bigplan.errors import InputError, RefusedError
from bigplan.graph.graph import Recompute
from bigplan.intake.copies import ONE_COPY, Copies
from bigplan.intake.section import Section
from bigplan.intake.setup import BatchSizes, Given, Offload, Recomputation, Setup
from bigplan.intake.toml import read_toml
from bigplan.placement import Tier
from bigplan.spec.unplanned import OTHER_CONTEXT_PARALLEL, OTHER_EXPERT_PARALLEL

_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_NAMES = (
    *["job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training"],
    *["parallelism", "checkpoint", "activation_checkpoint", "compile", "quantize", "comm"],
    *["memory_estimation", "fault_tolerance", "experimental", "validation", "debug"],
)
_HARMLESS = {
    *["job", "profiling", "metrics", "checkpoint", "comm", "memory_estimation", "validation"],
    *["debug", "lr_scheduler", "quantize"],
}
_HARMLESS_KEYS = {
    *["name", "flavor", "hf_assets_path", "tokenizer_path", "print_after_conversion", "dataset"],
    *["dataset_path", "dataloader", "gc_freq", "gc_debug", "steps", "implementation", "beta1"],
    *["beta2", "early_stop", "preserve_rng_state", "determinism_check", "debug", "backend"],
    *["visualize_memory_budget_pareto", "disable_loss_parallel", "components", "custom_import"],
    *["custom_args_module", "context_parallel_rotate_method", "context_parallel_load_balancer"],
    *["expert_tensor_parallel_degree", "expert_parallel_comm_backend"],
    *["pipeline_parallel_expert_parallel_overlap", "memory_budget"],
    *["per_op_sac_force_recompute_mm_shapes_by_fqns"],
}
# JobConfig's defaults.
LOCAL_BATCH, LENGTH, EVERY = 8, 2048, "2"
_VIRTUAL = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}
_VIRTUAL |= {"LoopedBFS": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}


def read(path: Path, given: Given) -> Setup:
    """The file's training. Raises InputError, and RefusedError for what is never planned."""
    file = str(path)
    top = Section.of(read_toml(path), file)
    if not set(top.data) & set(_NAMES):
        raise InputError(
            f"{file}: none of torchtitan's sections is in it ({', '.join(_NAMES)}); name the file "
            "that --job.config_file takes"
        )
    parts = {name: top.part(name) or Section({}, file, name) for name in _NAMES}
    _refuse(parts["parallelism"])
    split, unpriced = _split(parts["parallelism"])
    offload = bool(parts["training"].flag("enable_cpu_offload"))
    again, told = _again(parts["activation_checkpoint"])
    training = _training(parts)
    setup = Setup(
        "torchtitan",
        training,
        _batch(parts, split),
        split,
        Offload(Tier.HOST, Tier.HOST) if offload else Offload(),
        again,
        _processes(parts["parallelism"], split),
        copies=_copies(parts["parallelism"]),
        behaviour=_behaviour(parts),
        billions=_billions(parts["model"]),
    )
    more = [*_more(parts), *told, *unpriced]
    for name, part in parts.items():
        if name not in _HARMLESS:
            more += part.left(_HARMLESS_KEYS)
    more += top.left(_NAMES)
    return setup.with_told((), more, [name for name in top.data if name in _HARMLESS])


def _billions(part: Section) -> float | None:
    """Parameters by the flavor's name, such as 8B, 0.6B or 30B-A3B; None: it names no size."""
    size = re.match(r"(\d{1,4}(?:\.\d{1,3})?)b\b", str(part.data.get("flavor")), re.IGNORECASE)
    return None if size is None else float(size[1]) or None


def _refuse(parallelism: Section) -> None:
    for key, what in (
        ("context_parallel_degree", OTHER_CONTEXT_PARALLEL),
        ("expert_parallel_degree", OTHER_EXPERT_PARALLEL),
    ):
        if (parallelism.whole(key) or 1) > 1:
            raise RefusedError(f"{parallelism.file}: {parallelism.path(key)}: {what}")


def _split(part: Section) -> tuple[dict[str, int], list[str]]:
    """The split. `shard` is the number of ranks that shard state: 0 all that are left, 1 none."""
    told, names = list[str](), ("tensor_parallel_degree", "pipeline_parallel_degree")
    tp, pp = (part.whole(name, 1) or 1 for name in names)
    shard = part.number("data_parallel_shard_degree", -1)
    reshard = part.text("fsdp_reshard_after_forward", ("default", "always", "never")) or "default"
    always = reshard == "always" or (reshard == "default" and pp == 1)
    split = {"tp": tp, "pp": pp, "zero": 3 if always else 2}
    if shard == 1:
        split["zero"] = 0
    schedule = part.text("pipeline_parallel_schedule") or "1F1B"
    stages = _stages(part)
    if pp > 1:
        if schedule not in _VIRTUAL:
            told.append(f"{part.path('pipeline_parallel_schedule')} {schedule}: priced as 1F1B")
        elif schedule not in ("1F1B", "Interleaved1F1B"):
            like = "1F1B" if _VIRTUAL[schedule] == 1 else "Interleaved1F1B"
            told.append(f"{part.path('pipeline_parallel_schedule')} {schedule}: priced as {like}")
        split["vpp"] = _VIRTUAL.get(schedule, 1)
        split |= stages
    for key in ("pipeline_parallel_schedule_csv", "module_fqns_per_model_part"):
        value = part.data.get(key)
        part.seen.add(key)
        if value and pp > 1:
            told.append(f"{part.path(key)}: stages or schedule by hand; even ones are priced")
    return split, told


def _copies(part: Section) -> Copies:
    """Groups that shard; in its mesh dp_replicate is outside of fsdp (parallel_dims.py)."""
    replicas = part.whole("data_parallel_replicate_degree", 1) or 1
    shard = part.whole("data_parallel_shard_degree", -1) or -1
    if replicas == 1 or shard == 1:
        return ONE_COPY
    return Copies(max(shard, 0), replicas)


def _processes(part: Section, split: dict[str, int]) -> int | None:
    """Processes; None: as many as shard state."""
    replicas = part.whole("data_parallel_replicate_degree", 1) or 1
    shard = part.whole("data_parallel_shard_degree", -1)
    return shard * replicas * split["tp"] * split["pp"] if shard and shard > 0 else None


def _stages(part: Section) -> dict[str, int]:
    """How many blocks fewer the first and the last stage have, and how many each stage has."""
    ends = ("first", "last")
    less = {e: part.whole(f"pipeline_parallel_{e}_stage_less_layers") for e in ends}
    found = {f"{e}_less": 1 if count is None else count for e, count in less.items()}
    each = part.whole("pipeline_parallel_layers_per_stage", 1)
    return found | ({"blocks_each": each} if each else {})


def _batch(parts: dict[str, Section], split: dict[str, int]) -> BatchSizes:
    """Batch sizes; with a pipeline, a rank's local batch is cut into micro-batches."""
    part = parts["training"]
    local = part.whole("local_batch_size", 1) or LOCAL_BATCH
    whole = part.number("global_batch_size", -1)
    micro = parts["parallelism"].whole("pipeline_parallel_microbatch_size", 1) or 1
    if split["pp"] == 1:
        micro = local
    elif local % micro:
        raise part.wrong("local_batch_size", f"which must be a multiple of {micro}, a micro-batch")
    stated = int(whole) if whole is not None and whole > 0 else None
    return BatchSizes(micro, None if stated else local // micro, stated)


def _training(parts: dict[str, Section]) -> dict[str, Any]:
    part = parts["training"]
    dtype = part.text("mixed_precision_param", _DTYPES) or "bfloat16"
    part.text("mixed_precision_reduce", ("float32",))
    clip = part.number("max_norm")
    found: dict[str, Any] = {
        "precision": _DTYPES[dtype],
        "gradient_precision": "fp32",
        "sequence_length": part.whole("seq_len", 1) or LENGTH,
        "clip_norm": 1.0 if clip is None else clip or None,
    }
    optimizer = parts["optimizer"]
    for theirs, ours in (("lr", "learning_rate"), ("eps", "epsilon")):
        if (value := optimizer.number(theirs)) is not None:
            found[f"optimizer.{ours}"] = value
    decay = optimizer.number("weight_decay")
    if decay is not None:
        found["optimizer.weight_decay"] = decay
    if _float8(parts):
        found["fp8_gemms"] = True
    return found


def _float8(parts: dict[str, Section]) -> bool:
    converters = parts["model"].data.get("converters", [])
    parts["model"].seen.add("converters")
    return any("float8" in str(one) for one in converters)


def _again(part: Section) -> tuple[Recomputation, list[str]]:
    modes = ("selective", "full", "memory_budget", "none")
    mode = part.text("mode", modes) or "selective"
    option = part.text("selective_ac_option") or EVERY
    if mode == "full":
        return Recomputation(Recompute.FULL), []
    if mode == "selective" and option.isdecimal() and int(option) > 0:
        every = int(option)
        return Recomputation(Recompute.FULL, every=every), []
    if mode == "selective":
        where = part.path("selective_ac_option")
        return Recomputation(Recompute.SELECTIVE), [
            f"{where} {option}: priced as norms and activations recomputed"
        ]
    if mode == "memory_budget":
        return Recomputation(), [f"{part.path('mode')} memory_budget: priced without recomputation"]
    return Recomputation(), []


def _behaviour(parts: dict[str, Section]) -> dict[str, float | bool]:
    """Differences from a compiled model with torch's default collectives."""
    found: dict[str, float | bool] = {}
    part = parts["compile"]
    if not part.flag("enable"):
        found |= {"eager": 1.0, "compiled_loss": False, "compiles_loss": False}
    if parts["parallelism"].flag("enable_async_tensor_parallel"):
        found["tensor_exposed"] = FSDP.tensor_exposed_async
    return found


def _more(parts: dict[str, Section]) -> Iterator[str]:
    training, optimizer = parts["training"], parts["optimizer"]
    if training.text("dtype", _DTYPES) == "bfloat16":
        yield f"{training.path('dtype')} bfloat16: master weights and moments are priced in fp32"
    name = optimizer.text("name")
    if name not in (None, "AdamW", "Adam"):
        yield f"{optimizer.path('name')} {name}: priced as AdamW"
    if optimizer.flag("early_step_in_backward"):
        yield f"{optimizer.path('early_step_in_backward')}: priced as an update after the backward"
    for name in ("quantize", "fault_tolerance", "experimental"):
        part = parts[name]
        if name == "quantize":  # says how, where model.converters asks for it
            part.seen.update(part.data)
        if name == "fault_tolerance":
            if part.flag("enable"):
                yield "fault_tolerance: replicas synchronise through torchft"
            part.seen.update(part.data)
    model = parts["model"]
    converters = model.data.get("converters") or []
    others = [str(one) for one in converters if "float8" not in str(one)]
    if others:
        yield f"{model.path('converters')} {', '.join(others)}: not priced"
