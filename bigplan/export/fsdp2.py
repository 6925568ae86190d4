"""FSDP2 of torch: a function that shards a model of blocks as the plan says."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.export.written import (
    Blocks,
    WrittenConfig,
    attention_of,
    heading,
    lost_without_context,
)
from bigplan.graph.graph import Recompute
from bigplan.plan import Plan

_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def written(plan: Plan) -> WrittenConfig:
    """A Python file with `shard(model, blocks)`."""
    lost, blocks = tuple(_lost(plan)), Blocks.of(plan)
    away = blocks.away("parameters")
    again = blocks.recomputed(Recompute.FULL)
    imported, together, mesh = _grouped(plan) if plan.strategy.zero_group else ("", "", "")
    text = f'''{heading(plan, lost)}{attention_of(plan)}
import torch
{imported}from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

MICRO_BATCH = {plan.strategy.micro_batch}  # sequences of {plan.training.sequence_length} tokens
MICRO_BATCHES = {plan.strategy.micro_batches(plan.training)}  # of each rank in a step
RECOMPUTED = {again}  # blocks, from their inputs
{together}

def shard(model, blocks):
    """Shard `model` in place; `blocks` is the ModuleList of its transformer blocks."""
    options = dict(
{mesh}        mp_policy=MixedPrecisionPolicy(
            param_dtype={_DTYPES[plan.training.precision]},
            reduce_dtype={_DTYPES[plan.training.gradient_precision]},
        ),
        offload_policy={"CPUOffloadPolicy()" if away else "OffloadPolicy()"},
        reshard_after_forward={plan.strategy.zero == 3 or away},
    )
    for number, block in enumerate(blocks):
        if number < RECOMPUTED:
            blocks[number] = block = checkpoint_wrapper(block)
        fully_shard(block, **options)
    return fully_shard(model, **options)
'''
    return WrittenConfig({"fsdp2.py": text}, lost)


def _grouped(plan: Plan) -> tuple[str, str, str]:
    """Imports, a constant and an option: fully_shard replicates over a mesh's first dimension."""
    imported = """from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
"""
    together = f"TOGETHER = {plan.strategy.zero_group}  # ranks that share one copy of the state\n"
    mesh = f"""        mesh=init_device_mesh(
            "{plan.cluster.group.gpu.device}",
            (get_world_size() // TOGETHER, TOGETHER),
            mesh_dim_names=("replicate", "shard"),
        ),
"""
    return imported, together, mesh


def _lost(plan: Plan) -> Iterator[str]:
    blocks, strategy = Blocks.of(plan), plan.strategy
    yield from lost_without_context(plan)
    if strategy.tp > 1 or strategy.pp > 1:
        yield f"tensor parallelism of {strategy.tp} and {strategy.pp} pipeline stages"
    if strategy.zero in (0, 1) and strategy.dp > 1:
        yield f"ZeRO {strategy.zero}: fully_shard shards gradients too"
    if blocks.recomputed(Recompute.SELECTIVE):
        yield f"selective recomputation of {blocks.recomputed(Recompute.SELECTIVE)} blocks"
    if blocks.state_away and not blocks.away("parameters"):
        yield "optimizer state off the GPU with parameters on it: FSDP moves both or neither"
    if blocks.on_drives:
        yield "anything on drives"
