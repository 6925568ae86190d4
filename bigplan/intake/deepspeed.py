"""DeepSpeed's JSON, by the keys and defaults of DeepSpeed 0.19.8 (runtime/config.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigplan.errors import InputError, RefusedError
from bigplan.intake.copies import ONE_COPY, Copies
from bigplan.intake.section import Section
from bigplan.intake.setup import BatchSizes, Given, Offload, Setup
from bigplan.placement import Tier
from bigplan.spec.files.reading import read_json

_TIERS = {"none": Tier.GPU, "cpu": Tier.HOST, "nvme": Tier.NVME}
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "half": "fp16", "fp32": "fp32"}
_DTYPES["float32"] = "fp32"
_ADAM = {"Adam", "AdamW", "FusedAdam", "adam", "adamw"}
_HARMLESS = {
    *["steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "tensorboard"],
    *["wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler", "log_level", "checkpoint"],
    *["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last"],
    *["monitor_config", "scheduler", "seed", "prescale_gradients", "gradient_predivide_factor"],
    *["gradient_allreduce_op", "disable_python_gc", "vocabulary_size", "elasticity"],
}
_HARMLESS_ZERO = {
    *["contiguous_gradients", "reduce_scatter", "allgather_partitions", "load_from_fp32_weights"],
    *["elastic_checkpoint", "round_robin_gradients", "ignore_unused_parameters", "legacy_stage1"],
    *["stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"],
    *["memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"],
    *["log_trace_cache_warnings", "enable_sanity_checks", "parameter_alignment", "overlap_comm"],
    *["allgather_bucket_size", "stage3_max_reuse_distance", "use_multi_rank_bucket_allreduce"],
    *["stage3_model_persistence_threshold", "compute_grad_norm", "leaf_module"],
    *["stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"],
    *["stage3_module_granularity_threshold"],
}
_HARMLESS_OFFLOAD = {"nvme_path", "pipeline_read", "pipeline_write", "fast_init", "max_in_cpu"}
_HARMLESS_OFFLOAD |= {"buffer_count", "buffer_size"}
_READ = {
    "bf16": {"enabled"},
    "bfloat16": {"enabled"},
    "fp16": {"enabled"},
    "data_types": {"grad_accum_dtype"},
    "optimizer": {"type", "params"},
    "aio": set[str](),
}
_LOW_STATES = (
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
    "fp16_master_weights_and_grads",
)
# DeepSpeed's defaults, in elements.
BUCKET, SUB_GROUP, LIVE, BUFFER = 500_000_000, 1_000_000_000, 1_000_000_000, 100_000_000
PARAMETER_BUFFERS, STATE_BUFFERS, STATE_TENSORS = 5, 4, 4
LAYERS = (
    "the layers run as bigplan's own do in DeepSpeed: fused attention, no kernels of Hugging Face's"
)
LOSS = "the loss of a micro-batch is taken at once, unless --set loss_chunk=TOKENS says otherwise"


def read(path: Path, given: Given) -> Setup:
    """The file's training. Raises InputError, and RefusedError for what is never planned."""
    return setup_of(read_json(path).data, str(path), given)


def setup_of(data: object, file: str, given: Given) -> Setup:
    """The training in the file's data."""
    top = Section.of(data, file)
    zero = top.part("zero_optimization") or Section({}, file, "zero_optimization")
    stage = zero.whole("stage") or 0
    if stage > 3:
        raise zero.wrong("stage", "which must be 0, 1, 2 or 3")
    precision, training = _precision(top, given.precision), dict[str, Any]()
    if precision is not None:
        training |= {"precision": precision}
        training |= {"gradient_precision": _gradients(top, precision, stage)}
    training |= _optimizer(top)
    if (clip := top.number("gradient_clipping")) is not None:
        training["clip_norm"] = clip or None
    offload = _offload(zero)
    batch = BatchSizes(
        top.whole("train_micro_batch_size_per_gpu", 1),
        top.whole("gradient_accumulation_steps", 1),
        top.whole("train_batch_size", 1),
        alone=not any(map(top.is_auto, ("gradient_accumulation_steps", "train_batch_size"))),
    )
    copies, removed = _copies(zero, stage, offload)
    sizes = _sizes(zero, offload)
    unpriced = [*removed, *_unpriced(top, zero), *_parallel(top), *_low_states(top)]
    _refuse_others(top)
    unpriced += [*top.left(_HARMLESS), *zero.left(_HARMLESS_ZERO)]
    ignored = [*top.without_effect(_HARMLESS), *zero.without_effect(_HARMLESS_ZERO)]
    ignored += _inner(top)
    return Setup(
        "deepspeed",
        training,
        batch,
        {"zero": stage},
        offload,
        again=None,
        copies=copies,
        sizes=sizes,
        own_pinning=given.environment.get("DS_PIN_MEMORY_BACKEND") == "native",
        assumed=(LAYERS, LOSS, *_pinning(offload, given.environment)),
        unpriced=tuple(unpriced),
        ignored=tuple(ignored),
    )


def _refuse_others(top: Section) -> None:
    """Raise InputError for another kind of JSON: it has keys, and none that was looked for."""
    if top.data and top.seen.union(_HARMLESS).isdisjoint(top.data):
        raise InputError(
            f"{top.file}: none of DeepSpeed's keys is in it, such as "
            "train_micro_batch_size_per_gpu or zero_optimization; name the JSON that "
            "`deepspeed.initialize` or `--deepspeed` takes"
        )


def _pinning(offload: Offload, environment: Mapping[str, str]) -> Iterator[str]:
    away = offload.state is not Tier.GPU or offload.parameters is not Tier.GPU
    if away and "DS_PIN_MEMORY_BACKEND" not in environment:
        yield (
            "torch page-locks memory, in blocks of powers of two, unless "
            "--env DS_PIN_MEMORY_BACKEND=native says otherwise"
        )


def _precision(top: Section, given: str | None) -> str | None:
    """The model's precision; None: neither file nor command line gives one."""
    parts = [(name, top.part(name)) for name in ("bf16", "bfloat16", "fp16")]
    stated = [(name, part) for name, part in parts if part is not None]
    for name, part in stated:
        if part.flag("enabled"):
            return _DTYPES[name]
    return given if any(part.is_auto("enabled") for _, part in stated) else "fp32"


def _gradients(top: Section, precision: str, stage: int) -> str:
    """The precision of summed gradients: by default the model's under ZeRO, else fp32."""
    types = top.part("data_types")
    stated = types.text("grad_accum_dtype", _DTYPES) if types else None
    if stated is not None:
        return _DTYPES[stated]
    return precision if stage or precision == "fp16" else "fp32"


def _inner(top: Section) -> Iterator[str]:
    """Keys of sections that are read for one purpose."""
    for name, keys in _READ.items():
        part = top.part(name)
        for key in part.data if part else ():
            if key not in keys and key not in _LOW_STATES:
                yield f"{name}.{key}"


def _low_states(top: Section) -> Iterator[str]:
    for name in ("bf16", "fp16"):
        part = top.part(name)
        for key in _LOW_STATES:
            if part and part.flag(key):
                yield f"{name}.{key}: priced with master weights and moments in 32 bits"


def _optimizer(top: Section) -> dict[str, Any]:
    part = top.part("optimizer")
    values = part.part("params") if part else None
    if values is None:
        return {}
    keys = {"lr": "learning_rate", "eps": "epsilon", "weight_decay": "weight_decay"}
    found = {ours: values.number(theirs) for theirs, ours in keys.items()}
    return {f"optimizer.{ours}": value for ours, value in found.items() if value is not None}


def _offload(zero: Section) -> Offload:
    state, parameters = zero.part("offload_optimizer"), zero.part("offload_param")
    ratio = state.number("ratio") if state else None
    if state is not None and ratio is not None and ratio > 1:
        raise state.wrong("ratio", "which must be a fraction from 0 to 1")
    tiers = [
        _TIERS[(part.text("device", _TIERS) or "none") if part else "none"]
        for part in (state, parameters)
    ]
    return Offload(tiers[0], tiers[1], 1.0 if ratio is None else ratio)


def _copies(zero: Section, stage: int, offload: Offload) -> tuple[Copies, list[str]]:
    """MiCS's groups (runtime/zero/mics.py of 0.19.6), and what is to say of them."""
    ranks = zero.whole("mics_shard_size", -1) or -1
    if ranks < 1:
        return ONE_COPY, []
    path = zero.path("mics_shard_size")
    if ranks == 1:
        raise zero.wrong("mics_shard_size", "which shares nothing out")
    if stage < 3:
        return ONE_COPY, [f"{path}: MiCS shards by ZeRO 3 alone; priced without"]
    if offload.state is not Tier.GPU:
        raise zero.wrong(
            "mics_shard_size", "but MiCS has no offload_optimizer: leave one of them out"
        )
    return Copies(ranks), [f"{path}: priced as in DeepSpeed 0.19.6; 0.19.8 has no MiCS any more"]


def _sizes(zero: Section, offload: Offload) -> dict[str, int]:
    """Sizes of buffers; Hugging Face fills in "auto" from the model, near a plan's own sizes."""
    found = {
        "bucket": _size(zero, "reduce_bucket_size", BUCKET),
        "sub_group": _size(zero, "sub_group_size", SUB_GROUP),
        "live": _size(zero, "stage3_max_live_parameters", LIVE),
    }
    state, parameters = zero.part("offload_optimizer"), zero.part("offload_param")
    if state is not None and offload.state is Tier.NVME:
        count = state.whole("buffer_count", 1) or STATE_BUFFERS
        found["buffers"] = max(count, STATE_TENSORS)
    if parameters is not None and offload.parameters is Tier.NVME:
        found["swap_buffers"] = parameters.whole("buffer_count", 1) or PARAMETER_BUFFERS
        found["swap_buffer"] = parameters.whole("buffer_size", 1) or BUFFER
    return {name: size for name, size in found.items() if size is not None}


def _size(zero: Section, key: str, default: int) -> int | None:
    return None if zero.is_auto(key) else zero.whole(key, 1) or default


def _unpriced(top: Section, zero: Section) -> Iterator[str]:
    """Settings that are known and not priced."""
    for key, what in (
        ("zero_quantized_weights", "weights are gathered quantised"),
        ("zero_quantized_gradients", "gradients are reduced quantised"),
        ("zero_quantized_nontrainable_weights", "frozen weights are quantised"),
        ("stage3_use_all_reduce_for_fetch_params", "parameters are fetched by all-reduces"),
        ("stage3_allgather_sequential", "gathers wait for each other"),
    ):
        if zero.flag(key):
            yield f"{zero.path(key)}: {what}"
    if (size := zero.whole("zero_hpz_partition_size")) and size > 1:
        yield (
            f"{zero.path('zero_hpz_partition_size')}: {size} ranks keep a second copy of the "
            "parameters, which the backward gathers; priced without, as gathered over all ranks"
        )
    if zero.flag("mics_hierarchical_params_gather"):
        yield (
            f"{zero.path('mics_hierarchical_params_gather')}: parameters are gathered over nodes, "
            "then inside; priced as one ring"
        )
    if zero.part("zenflow"):
        yield "zero_optimization.zenflow: updates run beside later steps"
    for name in ("offload_optimizer", "offload_param"):
        part = zero.part(name)
        if part is None:
            continue
        if part.flag("pin_memory") is False:
            yield f"{part.path('pin_memory')} false: copies are priced from page-locked memory"
        if part.flag("super_offload"):
            yield f"{part.path('super_offload')}: the update runs beside the backward"
        if part.number("cpuadam_cores_perc") is not None:
            yield f"{part.path('cpuadam_cores_perc')}: the update is priced on all cores"
        yield from part.left({"device", "ratio"} | _HARMLESS_OFFLOAD)
    yield from _top_unpriced(top)


def _top_unpriced(top: Section) -> Iterator[str]:
    for key, what in (
        ("torch_autocast", "parameters stay in fp32 beside compute in 16 bits"),
        ("amp", "NVIDIA's apex runs the step"),
        ("compile", "the model is compiled"),
        ("activation_checkpointing", "how the model's own code recomputes"),
        ("compression_training", "weights and activations are compressed"),
        ("sparse_attention", "attention is sparse"),
        ("data_efficiency", "data and layers are dropped"),
        ("curriculum_learning", "sequences grow"),
        ("progressive_layer_drop", "layers are dropped"),
        ("hybrid_engine", "the model generates, too"),
        ("eigenvalue", "eigenvalues are estimated"),
        ("quantize_training", "weights are quantised"),
        ("pipeline", "a PipelineModule's stages are code: priced without"),
        ("sequence_parallel_size", "sequences are split over ranks"),
    ):
        value = top.data.get(key)
        top.seen.add(key)
        off = isinstance(value, Mapping) and value.get("enabled") is False
        if value not in (None, False, {}, 1) and not off:
            yield f"{key}: {what}"
    if dtype := top.text("communication_data_type"):
        yield f"communication_data_type {dtype}: gradients are reduced as they are summed"
    part = top.part("optimizer")
    name = part.text("type") if part else None
    if name is not None and name not in _ADAM:
        yield f"optimizer.type {name}: priced as AdamW"
    top.part("aio")  # bigplan prices a drive's rate with enough requests under way


def _parallel(top: Section) -> Iterator[str]:
    part = top.part("tensor_parallel")
    size = part.whole("autotp_size") if part else None
    if size is not None and size > 1:
        raise RefusedError(
            f"{top.file}: tensor_parallel.autotp_size is {size}: DeepSpeed's AutoTP is not priced; "
            "leave it out, or plan tensor parallelism with `bigplan plan --engine megatron`"
        )
    yield from ()
