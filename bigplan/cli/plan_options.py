"""What is planned, as options: model and machine, training, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from bigplan.cli.option import ADAM, STEP
from bigplan.cli.option import option_of as _option
from bigplan.cli.what_options import WhatOptions


@dataclass(frozen=True)
class PlanOptions(WhatOptions):
    """Options that override the keys of an experiment that make its plan."""

    tokens: str | None = _option(
        "training.tokens",
        "Of the whole training, such as 1T: the plan tells its days, dollars and kWh.",
        STEP,
        "N",
    )
    tokens_per_step: str | None = _option(
        "training.tokens_per_step", "In place of --global-batch, such as 65536.", STEP, "N"
    )
    sequence_length: str | None = _option(
        "training.sequence_length",
        "Tokens in a sequence (default: the model's, at most 8192).",
        STEP,
        "N",
        flag="--seq-len",
    )
    global_batch: str | None = _option(
        "training.global_batch",
        "Sequences per step, over all GPUs (default: 4 Mi tokens' worth).",
        STEP,
        "N",
    )
    precision: str | None = _option("training.precision", "Of compute (default: bf16).", STEP)
    gradient_precision: str | None = _option(
        "training.gradient_precision",
        "Of stored gradients: fp32, or the precision (default: fp32).",
        STEP,
    )
    reduce_precision: str | None = _option(
        "training.reduce_precision",
        "In which data-parallel ranks sum gradients (default: as they are stored, and `launch` "
        "refuses another).",
        STEP,
    )
    fp8_gemms: bool | None = _option(
        "training.fp8_gemms",
        "The blocks' GEMMs in fp8 (default: no).",
        STEP,
        flag="--fp8-gemms/--no-fp8-gemms",
    )
    attention: str | None = _option(
        "training.attention", "flash (default), or materialised: scores go through memory.", STEP
    )
    kernels: str | None = _option(
        "training.kernels",
        "The native engine's norms, activations and loss: generated (default), or torch's.",
        STEP,
    )
    dropout: str | None = _option("training.dropout", "Probability of dropout (default: 0).", STEP)
    clip_norm: str | None = _option(
        "training.clip_norm", "Largest gradient norm, or none (default: 1.0).", STEP, "X|none"
    )
    seed: str | None = _option("training.seed", "Seed (default: 0).", STEP)
    deterministic: bool | None = _option(
        "training.deterministic", "The same bits every time on a GPU too, slower.", STEP
    )
    data: str | None = _option(
        "training.data", "Prepared folder or text file (default: a bundled text).", STEP, "PATH"
    )
    isolate_documents: bool | None = _option(
        "training.isolate_documents",
        "A token attends to its own document alone (default: to all before it).",
        STEP,
    )
    document_tokens: str | None = _option(
        "training.document_tokens",
        "Then: tokens of a token's document, on average (default: as the data has them).",
        STEP,
    )
    preference: str | None = _option(
        "training.preference.method",
        "Learn which of two responses was preferred: dpo, orpo or simpo (default: learn the next "
        "token).",
        STEP,
        flag="--preference",
    )
    beta: str | None = _option(
        "training.preference.beta",
        "Then: what log-probabilities count, of dpo beside the starting model's, of orpo what "
        "odds do (default: 0.1, of simpo 2).",
        STEP,
    )
    label_smoothing: str | None = _option(
        "training.preference.label_smoothing",
        "Then: the share of pairs that are told the wrong way round (default: 0).",
        STEP,
    )
    gamma: str | None = _option(
        "training.preference.gamma",
        "Of simpo: by how much a chosen response should lead (default: 1).",
        STEP,
    )
    weights: str | None = _option(
        "training.weights", "Hugging Face folder to start from (default: random).", STEP, "DIR"
    )
    lora_rank: str | None = _option(
        "training.lora.rank",
        "Train low-rank adapters (LoRA) of this rank alone.",
        STEP,
        flag="--lora-rank",
    )
    lora_targets: str | None = _option(
        "training.lora.targets",
        "Products that have adapters, such as q_proj,v_proj (default: all of the blocks but "
        "experts').",
        STEP,
        "NAME,...",
        flag="--lora-targets",
    )
    lora_alpha: str | None = _option(
        "training.lora.alpha",
        "Adapters count alpha / rank (default: 2 x rank).",
        STEP,
        flag="--lora-alpha",
    )
    lora_rank_stabilised: bool | None = _option(
        "training.lora.rank_stabilised",
        "Adapters count alpha / sqrt(rank) in place of alpha / rank (default: no).",
        STEP,
        flag="--lora-rank-stabilised/--no-lora-rank-stabilised",
    )
    lora_dropout: str | None = _option(
        "training.lora.dropout",
        "Probability that an adapter reads an element as 0 in training (default: 0).",
        STEP,
        flag="--lora-dropout",
    )
    lora_weights: str | None = _option(
        "training.lora.weights",
        "Folder of peft's adapters to start from, which tells rank, alpha and targets.",
        STEP,
        "DIR",
        flag="--lora-weights",
    )
    lora_frozen: str | None = _option(
        "training.lora.frozen",
        "nf4: keep the blocks' frozen matrices in 4 bits (QLoRA).",
        STEP,
        flag="--lora-frozen",
    )
    optimizer: str | None = _option(
        "training.optimizer.name", "adamw (default), sgd or muon.", ADAM, flag="--optimizer"
    )
    moments: str | None = _option(
        "training.optimizer.moments",
        "Of adamw, as they are stored: fp32 (default), bf16, or int8.",
        ADAM,
    )
    learning_rate: str | None = _option("training.optimizer.learning_rate", "default: 3e-4.", ADAM)
    beta1: str | None = _option("training.optimizer.beta1", "default: 0.9.", ADAM)
    beta2: str | None = _option("training.optimizer.beta2", "default: 0.95.", ADAM)
    epsilon: str | None = _option("training.optimizer.epsilon", "default: 1e-8.", ADAM)
    momentum: str | None = _option(
        "training.optimizer.momentum", "Of sgd, default: 0.9; of muon, default: 0.95.", ADAM
    )
    ns_steps: str | None = _option(
        "training.optimizer.ns_steps", "Of muon, iterations; default: 5.", ADAM
    )
    adjust_lr_fn: str | None = _option(
        "training.optimizer.adjust_lr_fn",
        "Of muon, what scales a matrix's rate: match_rms_adamw (default) or original.",
        ADAM,
    )
    weight_decay: str | None = _option(
        "training.optimizer.weight_decay", "default: 0.1; of sgd 0.", ADAM
    )
    schedule: str | None = _option(
        "training.schedule.name",
        "Learning rate after the warm-up (default: constant).",
        ADAM,
        flag="--schedule",
    )
    warmup_steps: str | None = _option(
        "training.schedule.warmup_steps",
        "Steps in which the learning rate rises (default: 0).",
        ADAM,
    )
    decay_steps: str | None = _option(
        "training.schedule.decay_steps", "Steps until the decay ends (default: all steps).", ADAM
    )
    final_fraction: str | None = _option(
        "training.schedule.final_fraction",
        "Part of the learning rate left then (default: 0).",
        ADAM,
    )
    loss_scale: str | None = _option(
        "training.loss_scale.initial",
        "fp16's first loss scale (default: 65536).",
        ADAM,
        flag="--loss-scale",
    )
    # Other programs' names: of the decision cp, and of a feature that is refused by name.
    context_parallel: Annotated[int | None, typer.Option("--context-parallel", hidden=True)] = None
    expert_parallel: Annotated[int | None, typer.Option("--expert-parallel", hidden=True)] = None
