"""Hugging Face Accelerate's configuration file: DeepSpeed's plugin, or FSDP2's."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.export import deepspeed
from bigplan.export.written import (
    Blocks,
    WrittenConfig,
    attention_of,
    heading,
    lost_without_context,
)
from bigplan.graph.graph import Recompute
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.spec.files.document import dump_document

NAME = "accelerate.yaml"


def written(plan: Plan) -> WrittenConfig:
    """For `accelerate launch --config_file`; a plan for DeepSpeed adds DeepSpeed's own file."""
    nodes = plan.cluster.group
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes.nodes,
        "num_processes": plan.strategy.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if plan.config:
        return _deepspeed(plan, config)
    lost = tuple(_lost(plan))
    precision = {"fp32": "no"}.get(plan.training.precision, plan.training.precision)
    config |= {"mixed_precision": precision} | _fsdp(plan)
    return WrittenConfig({NAME: heading(plan, lost) + _script(plan) + dump_document(config)}, lost)


def _script(plan: Plan) -> str:
    """A comment with what the training script has to set."""
    return (
        f"# The training script's: batches of {plan.strategy.micro_batch} for each process, "
        f"gradient_accumulation_steps={plan.strategy.micro_batches(plan.training)}\n"
        f"{attention_of(plan)}"
    )


def _deepspeed(plan: Plan, config: dict[str, object]) -> WrittenConfig:
    found = deepspeed.written(plan)
    config |= {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": deepspeed.NAME,
            "zero3_init_flag": plan.config["json"]["zero_optimization"]["stage"] == 3,
        },
    }
    text = heading(plan, found.lost) + dump_document(config)
    return WrittenConfig({NAME: text, **found.files}, found.lost)


def _fsdp(plan: Plan) -> dict[str, object]:
    blocks = Blocks.of(plan)
    if _replicates(plan):
        return {"distributed_type": "MULTI_GPU" if plan.strategy.ranks > 1 else "NO"}
    ranks, groups = plan.strategy.ranks, plan.strategy.zero_group
    sizes = {"dp_replicate_size": ranks // groups, "dp_shard_size": groups} if groups else {}
    copies = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return {
        "distributed_type": "FSDP",
        **({"parallelism_config": copies} if groups else {}),
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.strategy.zero == 3 or blocks.away("parameters"),
            "fsdp_offload_params": blocks.away("parameters"),
            "fsdp_activation_checkpointing": bool(blocks.recomputed(Recompute.FULL)),
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }


def _replicates(plan: Plan) -> bool:
    """Whether each process holds the whole model; a single one recomputes through FSDP as well."""
    blocks, strategy = Blocks.of(plan), plan.strategy
    alone = strategy.ranks == 1 and bool(blocks.recomputed(Recompute.FULL))
    return strategy.zero < 2 and not blocks.away("parameters") and not alone


def _lost(plan: Plan) -> Iterator[str]:
    blocks, strategy = Blocks.of(plan), plan.strategy
    yield from lost_without_context(plan)
    training = plan.training
    reduced = training.reduce_precision or training.gradient_precision
    if plan.engine != "accelerate" and strategy.dp > 1 and reduced != training.precision:
        yield f"gradients reduced in {reduced}: in {training.precision}, as all of its policy"
    if strategy.tp > 1 or strategy.pp > 1:
        yield f"tensor parallelism of {strategy.tp} and {strategy.pp} pipeline stages"
    if strategy.zero == 1:
        yield "ZeRO 1: plain data parallelism is written"
    again = plan.model.layers - blocks.recomputed(Recompute.NONE)
    in_part = again - blocks.recomputed(Recompute.FULL)
    if again and _replicates(plan):
        yield f"recomputation of {again} blocks: DistributedDataParallel has no key for it"
    elif in_part:
        yield f"recomputation of {in_part} blocks in part: whole blocks run again, all or none"
    elif 0 < again < plan.model.layers:
        yield f"recomputation of {again} of {plan.model.layers} blocks: of all or none"
    if blocks.state_away and not blocks.away("parameters"):
        yield "optimizer state off the GPU with parameters on it: FSDP moves both or neither"
    if blocks.placed.parameters.get(Tier.NVME) or blocks.on_drives:
        yield "anything on drives"
