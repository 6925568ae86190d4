"""Files of the tools, as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigplan.intake import TOOLS, Given, Setup
from bigplan.intake.appraisal import Appraisal, appraised
from bigplan.intake.completed import completed
from bigplan.spec.experiment import make_experiment

DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "reduce_bucket_size": 5e8,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true}
  },
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
  "steps_per_print": 10
}
"""
FSDP = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""
INLINE = """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
use_cpu: false
"""
MEGATRON_LM = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MEGATRON_LM
machine_rank: 0
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 8
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: false
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
use_cpu: false
"""
SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=${TP_SIZE:-2}
CHECKPOINT=$1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR}
)
MODEL_ARGS=(
    --num-layers 32  # of blocks
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --swiglu --untie-embeddings-and-output-weights
    --seq-length 4096 --max-position-embeddings 4096
    --attention-dropout 0.0 --hidden-dropout 0.0
)
PARALLEL_ARGS=(--tensor-model-parallel-size $TP --sequence-parallel
    --pipeline-model-parallel-size 2)
MORE="--micro-batch-size 2 --global-batch-size $((WORLD_SIZE * 4))"
DTYPE_ARGS+=("--recompute-granularity full" "--recompute-method block" "--recompute-num-layers 4")
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]} $MORE \\
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --save $CHECKPOINT
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 1
global_batch_size = 32
seq_len = 8192
max_norm = 1.0

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "full"

[compile]
enable = true
"""
FILES = {
    "ds_config.json": ("deepspeed", DEEPSPEED),
    "fsdp.yaml": ("accelerate", FSDP),
    "inline.yaml": ("accelerate", INLINE),
    "megatron.yaml": ("accelerate", MEGATRON_LM),
    "pretrain.sh": ("megatron", SCRIPT),
    "llama3_8b.toml": ("torchtitan", TITAN),
}


def setup(folder: Path, name: str, text: str, given: Given | None = None) -> Setup:
    """The text as a file of that name, read."""
    path = folder / name
    path.write_text(text)
    return TOOLS[FILES[name][0]](path, given or Given())


def priced(found: Setup, cluster: str = "hgx-h200", **stated: Any) -> Appraisal:
    """For llama-3-8b, with further keys of an experiment (dots as double underscores)."""
    base = {f"training.{key}": value for key, value in found.training.items()}
    base |= {"model": "llama-3-8b", "cluster": cluster}
    base |= {key.replace("__", "."): value for key, value in stated.items()}
    experiment = make_experiment(base)
    return appraised(completed(found, experiment, "FILE"), "FILE")
