"""A plan's decisions as the configuration that DeepSpeed takes, complete."""

from __future__ import annotations

from typing import Any

from bigplan.engines.deepspeed.decisions import DEVICES, Decisions
from bigplan.engines.deepspeed.sizes import AIO_BLOCK, PREFETCHED_BLOCKS, BufferSizes
from bigplan.placement import Tier
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.training import Training

NEVER = 10**9  # steps between two lines that DeepSpeed prints


def configuration(
    decisions: Decisions, sizes: BufferSizes, training: Training, nodes: NodeGroup
) -> dict[str, Any]:
    """DeepSpeed's own "json", and the "environment" that it reads at its start.

    Paths are no part of a plan: whoever runs it adds `nvme_path`.
    """
    strategy = decisions.strategy
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.micro_batches(training),
        "gradient_clipping": training.clip_norm or 0.0,
        "steps_per_print": NEVER,
        "zero_optimization": _zero(decisions, sizes, nodes),
        "data_types": {"grad_accum_dtype": accumulated_in(decisions, training)},
    }
    if strategy.pp > 1:
        found["pipeline"] = {
            "stages": strategy.pp,
            "activation_checkpoint_interval": int(decisions.recompute),
        }
    if Tier.NVME in (decisions.state, decisions.parameters):
        assert nodes.nvme is not None, "what lives on drives was placed where there are some"
        found["aio"] = {
            "block_size": AIO_BLOCK,
            "queue_depth": sizes.queue,
            "intra_op_parallelism": nodes.nvme.drives,
            "single_submit": False,
            "overlap_events": True,
        }
    if training.precision == "bf16":
        # Clipping looks at the norm anyway: a search for overflows would read all gradients again.
        found["bf16"] = {"enabled": True, "check_grad_overflow": False}
    environment = {}
    if nodes.gpu.device == "cuda" and decisions.state is not Tier.GPU:
        environment["DS_PIN_MEMORY_BACKEND"] = "native" if decisions.own_pinning else "torch"
    return {"json": found, "environment": environment}


def accumulated_in(decisions: Decisions, training: Training) -> str:
    """The precision in which DeepSpeed sums micro-batches' gradients.

    ZeRO 1 and 2 keep sums on the CPU in the parameters' precision, whatever is asked for. Without
    ZeRO, DeepSpeed takes no other precision either.
    """
    low = decisions.stage == 0 or (decisions.stage < 3 and decisions.state is not Tier.GPU)
    return training.precision if low else training.gradient_precision


def _zero(decisions: Decisions, sizes: BufferSizes, nodes: NodeGroup) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": decisions.stage,
        "contiguous_gradients": True,
        "overlap_comm": nodes.gpu.runs_kernels and decisions.strategy.pp == 1,
        "reduce_scatter": True,
        "reduce_bucket_size": sizes.bucket,
        "allgather_bucket_size": sizes.bucket,
    }
    if decisions.state is not Tier.GPU:
        zero["offload_optimizer"] = _offload(decisions.state, nodes) | _state(decisions, sizes)
    if decisions.parameters is not Tier.GPU:
        zero["offload_param"] = _offload(decisions.parameters, nodes)
    if decisions.stage < 3:
        return zero
    live, ahead = sizes.live, PREFETCHED_BLOCKS * sizes.block
    if decisions.parameters is Tier.NVME:
        # In 0.19.8, fetching ahead from a drive fails where a parameter stands in the queue twice,
        # as the last one of every forward does: "already assigned swap buffer id".
        ahead = 0
        buffers = {"buffer_count": sizes.swap_buffers, "buffer_size": sizes.swap_buffer}
        zero["offload_param"] |= buffers
        zero["offload_param"]["max_in_cpu"] = 0
    return zero | {
        "sub_group_size": sizes.sub_group,
        "stage3_prefetch_bucket_size": ahead,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        "stage3_param_persistence_threshold": sizes.vector,
    }


def _offload(tier: Tier, nodes: NodeGroup) -> dict[str, Any]:
    """An offload entry; memory is page-locked where there is a GPU to copy to."""
    return {"device": DEVICES[tier], "pin_memory": nodes.gpu.device == "cuda"}


def _state(decisions: Decisions, sizes: BufferSizes) -> dict[str, Any]:
    if decisions.state is Tier.NVME:
        return {
            "buffer_count": sizes.buffers,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    return {"ratio": decisions.on_cpu} if decisions.stage == 3 else {}
