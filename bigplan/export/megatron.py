"""Arguments of Megatron-LM's pretrain_gpt.py (Megatron Core), as megatron/training names them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from bigplan.export.written import Blocks, WrittenConfig, heading, lost_by_all
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import chunk_blocks
from bigplan.plan import Plan
from bigplan.spec.model import ModelSpec
from bigplan.spec.routing import Routing

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_DECAY = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


def written(plan: Plan) -> WrittenConfig:
    """A script whose last line starts the training; its data arguments are the user's."""
    lost = tuple(_lost(plan))
    lines = [*arguments(plan)]
    each = " \\\n  ".join(lines)
    nodes = plan.cluster.group
    start = (
        f"torchrun --nnodes {nodes.nodes} --nproc-per-node {nodes.gpus_per_node} "
        f'pretrain_gpt.py \\\n  {each} \\\n  "$@"\n'
    )
    return WrittenConfig(
        {"megatron.sh": "#!/usr/bin/env bash\n" + heading(plan, lost) + start}, lost
    )


def arguments(plan: Plan) -> Iterator[str]:
    """Each option with its value."""
    yield from _model(plan)
    yield from _split(plan)
    yield from _memory(plan)
    training, optimizer = plan.training, plan.training.optimizer
    yield f"--micro-batch-size {plan.strategy.micro_batch}"
    yield f"--global-batch-size {training.global_batch}"
    yield f"--seq-length {training.sequence_length}"
    yield f"--train-iters {training.steps}"
    yield f"--lr {optimizer.learning_rate}"
    yield f"--lr-decay-style {_DECAY[training.schedule.name]}"
    yield f"--lr-warmup-iters {training.schedule.warmup_steps}"
    yield f"--min-lr {optimizer.learning_rate * training.schedule.final_fraction}"
    yield f"--weight-decay {optimizer.weight_decay}"
    if optimizer.name == "adamw":
        yield f"--adam-beta1 {optimizer.beta1} --adam-beta2 {optimizer.beta2}"
        yield f"--adam-eps {optimizer.epsilon}"
    else:
        yield f"--optimizer sgd --sgd-momentum {optimizer.momentum}"
    yield f"--clip-grad {training.clip_norm or 0.0}"
    yield f"--seed {training.seed}"
    if training.precision != "fp32":
        yield f"--{training.precision}"
    if training.fp8_gemms:
        yield "--fp8-format hybrid"  # E4M3 forward, E5M2 for gradients
    if training.gradient_precision == "fp32" and training.precision == "bf16":
        yield "--accumulate-allreduce-grads-in-fp32"
    if training.gradient_precision == "bf16":
        yield "--grad-reduce-in-bf16"


def _model(plan: Plan) -> Iterator[str]:
    model = plan.model
    yield f"--num-layers {model.layers} --hidden-size {model.hidden}"
    ffn = model.dense_ffn or model.ffn
    yield f"--ffn-hidden-size {ffn} --num-attention-heads {model.heads}"
    yield f"--max-position-embeddings {model.max_sequence_length}"
    yield from _heads(model) if model.latent_attention is None else _latent(model)
    if model.norm == "rmsnorm":
        yield "--normalization RMSNorm"
    yield f"--norm-epsilon {model.norm_epsilon}"
    if model.mlp == "swiglu":
        yield "--swiglu"
    if model.positions == "rope":
        yield f"--position-embedding-type rope --rotary-base {model.rope_theta:.0f}"
    else:
        yield "--position-embedding-type learned_absolute"
    if not (model.mlp_bias or model.attention_output_bias):
        yield "--disable-bias-linear"
    if model.qkv_bias and not model.mlp_bias:
        yield "--add-qkv-bias"
    if model.experts:
        yield from _experts(model)
    if window := model.window_within(plan.training.sequence_length):
        yield f"--window-size {window - 1},0"  # tokens before a token, and after it
    if not model.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"
    yield f"--attention-dropout {plan.training.dropout} --hidden-dropout {plan.training.dropout}"


def _heads(model: ModelSpec) -> Iterator[str]:
    yield f"--kv-channels {model.head_dim}"
    if model.kv_heads != model.heads:
        yield f"--group-query-attention --num-query-groups {model.kv_heads}"
    if model.qk_norm:
        yield "--qk-layernorm"


def _latent(model: ModelSpec) -> Iterator[str]:
    """As MLATransformerConfig has it; its norms of latents are those of queries and keys."""
    latent = model.latent_attention
    assert latent is not None
    yield "--multi-latent-attention --qk-layernorm"
    if latent.query_rank is not None:
        yield f"--q-lora-rank {latent.query_rank}"
    yield f"--kv-lora-rank {latent.kv_rank} --qk-head-dim {latent.plain_dim}"
    yield f"--qk-pos-emb-head-dim {latent.rope_dim} --v-head-dim {latent.value_dim}"
    scaling = model.rope_scaling
    if scaling is None:
        yield "--rope-type rope"
        return
    yield f"--rope-type yarn --rotary-scaling-factor {scaling.factor}"
    # Its factor of cos and sin is the ratio of both, 1 where neither is told, and it multiplies
    # scores by the second.
    yield f"--mscale {scaling.mscale or 1.0} --mscale-all-dim {scaling.mscale_all_dim or 0.0}"


def _experts(model: ModelSpec) -> Iterator[str]:
    """Dropless, grouped products, a fused permutation and an all-to-all, as they are priced.

    A softmax of the chosen experts' scores, the default, is weights that sum to 1; with
    `--moe-router-pre-softmax` they are shares of all experts. The balancing loss of Megatron-LM
    (switch_load_balancing_loss_func in moe_utils.py) is the mean over a token's choices, and every
    layer adds its own; here choices add up, and layers have a mean.
    """
    yield f"--num-experts {model.experts} --moe-router-topk {model.experts_per_token}"
    yield f"--moe-ffn-hidden-size {model.ffn}"
    if not model.router_normalised:
        yield "--moe-router-pre-softmax"
    yield f"--moe-router-load-balancing-type {'aux_loss' if model.router_loss else 'none'}"
    if model.router_loss:
        each = model.router_loss * model.experts_per_token / model.layers
        yield f"--moe-aux-loss-coeff {each:.6g}"
    if any(model.dense):
        runs = [(not dense, len([*run])) for dense, run in groupby(model.dense)]
        yield f'--moe-layer-freq "({"+".join(f"[{routed:d}]*{n}" for routed, n in runs)})"'
    if model.shared_ffn:
        gate = " --moe-shared-expert-gate" if model.shared_gate else ""
        yield f"--moe-shared-expert-intermediate-size {model.shared_ffn}{gate}"
    if model.routing is not None:
        yield from _routing(model.routing)
    yield "--moe-router-dtype fp32 --moe-token-dispatcher-type alltoall"
    yield "--moe-grouped-gemm --moe-permute-fusion"


def _routing(routing: Routing) -> Iterator[str]:
    if routing.scores == "sigmoid":
        yield "--moe-router-score-function sigmoid"
    if routing.bias:
        yield "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.0"  # kept as it is
    if routing.groups > 1:
        yield f"--moe-router-num-groups {routing.groups}"
        yield f"--moe-router-group-topk {routing.groups_per_token}"
    if routing.scale != 1:
        yield f"--moe-router-topk-scaling-factor {routing.scale}"


def _split(plan: Plan) -> Iterator[str]:
    strategy, model = plan.strategy, plan.model
    yield f"--tensor-model-parallel-size {strategy.tp}"
    yield f"--pipeline-model-parallel-size {strategy.pp}"
    if strategy.tp > 1 and strategy.sequence_parallel:
        yield "--sequence-parallel --tp-comm-overlap"
    if model.experts:
        # Other engines' plans split experts by tensor parallelism, as Megatron-LM does by default.
        whole = plan.engine == "megatron"
        yield f"--expert-model-parallel-size {strategy.ep}"
        yield f"--expert-tensor-parallel-size {1 if whole else strategy.tp}"
    if strategy.cp > 1:
        yield f"--context-parallel-size {strategy.cp} --cp-comm-type a2a"
    if strategy.vpp > 1:
        each = model.layers // (strategy.pp * strategy.vpp)
        yield f"--num-layers-per-virtual-pipeline-stage {each}"
    elif strategy.pp > 1:
        for end, blocks in (("first", strategy.first_blocks), ("last", strategy.last_blocks)):
            if blocks:
                yield f"--decoder-{end}-pipeline-num-layers {blocks}"
    yield from _sharding(plan)


def _sharding(plan: Plan) -> Iterator[str]:
    strategy = plan.strategy
    if strategy.zero == 1:
        yield "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    elif strategy.zero == 0 and Blocks.of(plan).state_away:
        # The precision-aware optimizer exists only in this form.
        yield "--use-distributed-optimizer"
    elif strategy.zero == 0 and strategy.shards > 1:
        yield "--overlap-grad-reduce"
    elif strategy.zero > 1:
        sharding = _SHARDING[strategy.zero]
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {sharding}"
        yield "--use-distributed-optimizer --no-gradient-accumulation-fusion"
    if strategy.zero_group:  # for both: its groups are neighbours among data-parallel ranks, too
        yield f"--num-distributed-optimizer-instances {strategy.zero_copies}"


def _memory(plan: Plan) -> Iterator[str]:
    blocks = Blocks.of(plan)
    full, selective = (blocks.recomputed(p) for p in (Recompute.FULL, Recompute.SELECTIVE))
    if full:
        each = -(-full // plan.strategy.vpp)  # of a virtual stage
        yield f"--recompute-granularity full --recompute-method block --recompute-num-layers {each}"
    elif selective:
        module = "moe_act" if plan.model.experts else "mlp"
        yield f"--recompute-granularity selective --recompute-modules layernorm {module}"
    if blocks.state_away > 0:
        yield f"--optimizer-cpu-offload --optimizer-offload-fraction {blocks.state_away:.3f}"
        yield "--use-precision-aware-optimizer"


def _lost(plan: Plan) -> Iterator[str]:
    blocks, model = Blocks.of(plan), plan.model
    yield from lost_by_all(plan)
    chunks = chunk_blocks(model.layers, plan.strategy)
    between = chunks[plan.strategy.first_blocks > 0 : -1 if plan.strategy.last_blocks else None]
    if len(set(between)) > 1:
        yield (
            f"chunks of {max(between)} and {min(between)} blocks: Megatron-LM has equally many in "
            "all but the first and the last"
        )
    full, selective = (blocks.recomputed(p) for p in (Recompute.FULL, Recompute.SELECTIVE))
    if selective and (full or selective < blocks.placed.layers):
        yield f"selective recomputation of {selective} of {blocks.placed.layers} blocks of a stage"
    elif selective:
        yield "selective recomputation of norms and activation alone: modules are run again whole"
    if full % plan.strategy.vpp:
        yield f"recomputation of {full} blocks of a stage: as many of each of its virtual stages"
    if blocks.away("parameters") or blocks.away("gradients"):
        yield "parameters and gradients off the GPU"
    if blocks.on_drives:
        yield "anything on drives"
    if model.positions == "alibi" or model.parallel_residual or model.embedding_norm:
        yield f"{model.name}'s linear biases, parallel residuals or embedding norm"
    if (routing := model.routing) is not None and routing.groups > 1:
        best = model.experts_per_token // routing.groups_per_token
        if best != routing.group_best:
            yield (
                f"groups of experts chosen by their {routing.group_best} best: Megatron-LM adds up "
                f"{best}, a token's experts by its groups"
            )
    if model.rope_scaling is not None and model.latent_attention is None:
        yield f"the {model.rope_scaling.name} scaling of rotary angles"
    if plan.training.optimizer.groups:
        yield "weight decay and rates of single parameters"
