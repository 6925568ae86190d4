"""torchtitan's job configuration as TOML, as the JobConfig of its 0.2 releases names the keys."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.engines.frameworks.tool import unlike_torchtitan, whole_beside_others
from bigplan.export.written import (
    Blocks,
    WrittenConfig,
    heading,
    lost_by_all,
    lost_eight_bits,
    lost_groups,
)
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan

_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp32": "float32"}


def written(plan: Plan) -> WrittenConfig:
    """A file for `--job.config_file`; the model's flavor has to be registered under its name."""
    lost = tuple(_lost(plan))
    sections: dict[str, dict[str, object]] = {
        "model": {"name": "qwen3" if plan.model.qk_norm else "llama3", "flavor": plan.model.name},
        "training": _training(plan),
        "optimizer": _optimizer(plan),
        "lr_scheduler": _schedule(plan),
        "parallelism": _parallelism(plan),
        "activation_checkpoint": _recomputation(plan),
        "compile": {"enable": True},
    }
    text = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in keys.items())
        for name, keys in sections.items()
    )
    return WrittenConfig({"torchtitan.toml": f"{heading(plan, lost)}\n{text}"}, lost)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _training(plan: Plan) -> dict[str, object]:
    training = plan.training
    found: dict[str, object] = {
        "local_batch_size": training.global_batch // plan.strategy.dp,
        "global_batch_size": training.global_batch,
        "seq_len": training.sequence_length,
        "max_norm": training.clip_norm or 0.0,
        "steps": training.steps,
        "mixed_precision_param": _DTYPES[training.precision],
        "mixed_precision_reduce": "float32",  # torchtitan takes no other value
        "enable_cpu_offload": _offloads(plan),
    }
    if plan.strategy.pp == 1:  # a pipeline cuts its batch itself
        found["local_batch_size"] = plan.strategy.micro_batch
    return found


def _offloads(plan: Plan) -> bool:
    blocks = Blocks.of(plan)
    return plan.strategy.zero == 3 and blocks.state_away == 1.0 and blocks.away("parameters")


def _optimizer(plan: Plan) -> dict[str, object]:
    optimizer = plan.training.optimizer
    return {
        "name": "AdamW",
        "lr": optimizer.learning_rate,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }


def _schedule(plan: Plan) -> dict[str, object]:
    schedule = plan.training.schedule
    constant = schedule.name == "constant"
    return {
        "warmup_steps": schedule.warmup_steps,
        "decay_ratio": 0.0 if constant else 1.0,
        "decay_type": "linear" if constant else schedule.name,
        "min_lr_factor": schedule.final_fraction,
    }


def _copies(plan: Plan) -> int:
    """Groups with a copy of all states each; it shards over context-parallel ranks, too."""
    strategy = plan.strategy
    if strategy.zero < 2:
        return strategy.dp
    return 1 if strategy.dp % strategy.zero_copies else strategy.zero_copies


def _parallelism(plan: Plan) -> dict[str, object]:
    strategy = plan.strategy
    copies = _copies(plan)
    found: dict[str, object] = {
        "data_parallel_replicate_degree": copies,
        "data_parallel_shard_degree": strategy.dp // copies,
        "fsdp_reshard_after_forward": "always" if strategy.zero == 3 else "never",
        "tensor_parallel_degree": strategy.tp,
        "pipeline_parallel_degree": strategy.pp,
    }
    if strategy.cp > 1:
        found["context_parallel_degree"] = strategy.cp
    if strategy.pp > 1:
        found |= {
            "pipeline_parallel_schedule": "Interleaved1F1B" if strategy.vpp > 1 else "1F1B",
            "pipeline_parallel_microbatch_size": strategy.micro_batch,
            # This makes stages even; by default torchtitan counts embedding and output as a block
            # each.
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    return found


def _recomputation(plan: Plan) -> dict[str, object]:
    blocks = Blocks.of(plan)
    if blocks.recomputed(Recompute.FULL):
        return {"mode": "full"}
    if blocks.recomputed(Recompute.SELECTIVE) or blocks.recomputed(Recompute.MLP):
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": "none"}


def _lost(plan: Plan) -> Iterator[str]:
    blocks, strategy = Blocks.of(plan), plan.strategy
    yield from lost_by_all(plan)
    yield from _lost_arithmetic(plan)
    yield from _lost_split(strategy)
    if strategy.zero >= 2 and _copies(plan) != strategy.zero_copies:
        yield from lost_groups(plan)
    mixed = [policy for policy in Recompute if blocks.recomputed(policy)]
    if len(mixed) > 1:
        yield "different recomputation of single blocks: all are treated as the most frugal"
    if blocks.recomputed(Recompute.SELECTIVE):
        yield "selective recomputation of norms and activation: torchtitan's choice of operators"
    if not _offloads(plan) and (blocks.state_away or blocks.away("parameters")):
        yield "a part of the state, or state alone, off the GPU: its CPU offload takes all or none"
    if blocks.on_drives:
        yield "anything on drives"


def _lost_split(strategy: Strategy) -> Iterator[str]:
    if strategy.first_blocks or strategy.last_blocks:
        yield "stages of different numbers of blocks"
    if strategy.vpp > 2:
        yield f"{strategy.vpp} virtual stages: two are torchtitan's default"
    if strategy.cp > 1:
        yield "all-to-alls around attention: torchtitan exchanges keys and values within it"
        if strategy.zero < 2:
            yield "states that context-parallel ranks have whole: torchtitan shards them"
    if whole_beside_others(strategy):
        yield "replicas that have whole states: beside another split torchtitan has none"
    if strategy.zero == 1:
        yield "ZeRO 1: torchtitan shards gradients as well (2) or nothing"
    if strategy.tp > 1 and not strategy.sequence_parallel:
        yield "tensor parallelism without sequence parallelism"


def _lost_arithmetic(plan: Plan) -> Iterator[str]:
    training = plan.training
    if unlike := unlike_torchtitan(plan.model):
        yield f"{plan.model.name}'s {unlike}: its blocks are those of Llama and Qwen3"
    if window := plan.model.window_within(training.sequence_length):
        yield f"the sliding window of {window} tokens: its Llama attends to all before a token"
    if training.optimizer.name != "adamw":
        yield f"{training.optimizer.name}: AdamW is written"
    if training.precision == "fp16":
        yield "fp16: bf16 is written"
    yield from lost_eight_bits(plan)
    if training.gradient_precision != "fp32":
        yield f"gradients in {training.gradient_precision}: in fp32"
