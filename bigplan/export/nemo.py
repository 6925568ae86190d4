"""Overrides of a NeMo 2 recipe, as `nemo llm pretrain` takes them."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.export.megatron import _lost as lost_by_megatron
from bigplan.export.written import Blocks, WrittenConfig, heading, lost_eight_bits, lost_groups
from bigplan.graph.graph import Recompute
from bigplan.plan import Plan


def written(plan: Plan) -> WrittenConfig:
    """A script; RECIPE is the factory of the model, such as llama3_8b."""
    lost = tuple(_lost(plan))
    each = " \\\n  ".join(overrides(plan))
    text = f'nemo llm pretrain --factory "${{RECIPE:?}}" \\\n  {each} \\\n  "$@"\n'
    return WrittenConfig({"nemo.sh": "#!/usr/bin/env bash\n" + heading(plan, lost) + text}, lost)


def overrides(plan: Plan) -> Iterator[str]:
    """The overrides."""
    strategy, training, nodes = plan.strategy, plan.training, plan.cluster.group
    yield f"trainer.num_nodes={nodes.nodes}"
    yield f"trainer.devices={nodes.gpus_per_node}"
    yield f"trainer.max_steps={training.steps}"
    where = "trainer.strategy."
    yield f"{where}tensor_model_parallel_size={strategy.tp}"
    yield f"{where}pipeline_model_parallel_size={strategy.pp}"
    if strategy.cp > 1:
        yield f"{where}context_parallel_size={strategy.cp}"
        yield "model.config.cp_comm_type=a2a"
    if strategy.vpp > 1:
        yield f"{where}virtual_pipeline_model_parallel_size={strategy.vpp}"
    yield f"{where}sequence_parallel={strategy.tp > 1 and strategy.sequence_parallel}"
    yield f"{where}ddp.use_distributed_optimizer={strategy.zero > 0}"
    yield f"data.micro_batch_size={strategy.micro_batch}"
    yield f"data.global_batch_size={training.global_batch}"
    yield f"data.seq_length={training.sequence_length}"
    yield f"optim.config.lr={training.optimizer.learning_rate}"
    yield f"optim.config.clip_grad={training.clip_norm or 0.0}"
    if window := plan.model.window_within(training.sequence_length):
        # Tokens before a token, and after it. The factories of models count the token itself twice.
        yield f"'model.config.window_size=[{window - 1},0]'"
    full = Blocks.of(plan).recomputed(Recompute.FULL)
    if full:
        yield "model.config.recompute_granularity=full"
        yield "model.config.recompute_method=block"
        yield f"model.config.recompute_num_layers={-(-full // strategy.vpp)}"


def _lost(plan: Plan) -> Iterator[str]:
    blocks, strategy = Blocks.of(plan), plan.strategy
    yield from lost_by_megatron(plan)
    if strategy.zero > 1:
        yield f"ZeRO {strategy.zero}: the distributed optimizer (1) is written"
    yield from lost_groups(plan)
    yield from lost_eight_bits(plan)
    if strategy.first_blocks or strategy.last_blocks:
        yield "stages of different numbers of blocks"
    if blocks.state_away:
        yield "optimizer state off the GPU"
