"""From a measured row to what the model prices: the row's configuration, pinned.

What a row leaves blank is chosen by one rule for all rows:

    model       gated_mlp blank: plain; ffn: 4 hidden (gated: 8/3, to multiples of 256); heads: the
                number whose width is nearest 128; kv_heads: heads; vocab: 50,304, GPT-2's padded
                gated: RMSNorm, rotary positions, no biases; plain: LayerNorm, learned positions,
                biases
    machine     gpus_per_node: 8 (GB200, GB300: 64, one NVLink domain), at most n_gpus; links and
                host: those of the shipped cluster with that GPU
    split       dp: what tp, pp and cp leave; states over all of dp, within nodes where the notes
                begin with "HSDP" or say so; zero: the framework's default; sequence parallelism:
                where the framework has it; virtual stages: of one layer where the framework
                interleaves by default, 2 where the schedule is said to be interleaved, else 1
    batch       global_batch: as many tokens as the source's other runs of the model, else 4
                micro-batches a pipeline stage (1 without a pipeline); micro_batch with pp > 1: 1,
                in torchtitan as many micro-batches as stages, virtual ones counted, its default;
                without a pipeline the largest power of two up to 16 that divides a rank's sequences
    precision   fp16 before 2023 and on V100 and T4, else bf16; gradients are summed in fp32, in
                fp16 runs, Composer's PURE mode and under DeepSpeed's ZeRO in the run's precision;
                fp32 master and moments, in 16 bits where the notes say "bf16 master+states"; no
                master where parameters train in bf16 (torchtune, and notes of "pure bf16" or
                "bf16-true"); parameters in fp32 where the notes say "autocast" or "AMP"
    recompute   none; where it is selective and model and hardware FLOPs are printed: in full, by
                as many layers as these say; else what the framework runs again
                (`graph/policies.py`)
    attention   what the framework had at the time: materialised before 2023, flash since; gated
                models and GPUs of Hopper's time or later are since
    dropout     GPT-2's where the framework trained with it, which was before 2023
    framework   one that is unknown runs plain PyTorch; Megatron-LM on a GPU of Hopper's time or
                later is Megatron Core
    experts     those of the shipped model with the row's name, run as experts.py says; without
                virtual stages
    memory      if the choices above need 1.2 times what the GPU has, the first that need less: more
                state sharded, smaller micro-batches, full recomputation (not in Megatron Core,
                which has finer ways)
    compile     no, but where the framework does by default (fms-fsdp, JAX) or products are in fp8;
                Liger's and Unsloth's kernels fuse as much
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from bigplan.cost.framework import MEGATRON_CORE
from bigplan.cost.memory import framework_memory
from bigplan.cost.run import LOW_STATE_BYTES, PURE_STATE_BYTES, PricedRun, graph_of
from bigplan.cost.step import Execution
from bigplan.errors import quoted
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.validate.adapters import adapters_refusal, lora_of, plain_adapters
from bigplan.validate.experts import (
    CHEAP_AGAIN,
    again_by_recipe,
    dispatching,
    expert_model,
    experts_refusal,
)
from bigplan.validate.frameworks import FrameworkRule, framework_of
from bigplan.validate.machines import machine_of
from bigplan.validate.rows import PublishedRow

PADDED_GPT2_VOCABULARY = 50304
ARCHITECTURE = ("ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp", "tied_embeddings")
NO_DROPOUT = "WITHOUT attention dropout"  # in a row's notes
LOW_STATES = "bf16 master+states"  # in a row's notes: master and moments in 16 bits
WITHIN_NODES = re.compile(r"^HSDP|HYBRID_SHARD|over \d+ ranks of a node")  # in a row's notes
DOCUMENTS = re.compile(r"documents of (\d+) tokens")  # in a row's notes: kept apart
AUTOCAST = re.compile(r"autocast|\bAMP\b")  # in a row's notes: parameters in fp32
CHUNKED_LOSS = re.compile(r"chunked (cross-entropy|loss)", re.IGNORECASE)  # in a row's notes
OVERESTIMATED = 1.2  # memory has been predicted up to a fifth too high
DROPOUT = 0.1  # GPT-2's, where the framework trains with it


class SkippedError(Exception):
    """A row that is not scored; its text says why."""


def completed(rows: list[PublishedRow]) -> list[PublishedRow]:
    """Rows whose blank columns are filled from the same source's rows of the same model.

    A column of the architecture is filled only where those rows agree. What stays blank is chosen
    by the rules at the top of this module.
    """
    known: dict[tuple[str, str, int | None, str], set[object]] = {}
    for row, column in product(rows, ARCHITECTURE):
        value = getattr(row, column)
        if value is not None:
            known.setdefault((row.group, row.model_name, row.hidden, column), set()).add(value)

    tokens: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row.global_batch and row.seq_len:
            batch = row.global_batch * row.seq_len
            tokens.setdefault((row.group, row.model_name), set()).add(batch)

    def filled(row: PublishedRow) -> PublishedRow:
        model = (row.group, row.model_name, row.hidden)
        stated = {column: known.get((*model, column), set()) for column in ARCHITECTURE}
        blank = {
            column: values
            for column, values in stated.items()
            if getattr(row, column) is None and len(values) == 1
        }
        chosen = {column: next(iter(values)) for column, values in blank.items()}
        if row.global_batch is None and row.seq_len:
            per_step = max(tokens.get((row.group, row.model_name), {0}))
            chosen["global_batch"] = per_step // row.seq_len or None
        return row.model_copy(update=chosen)

    return [filled(row) for row in rows]


def run_of(row: PublishedRow) -> PricedRun:
    """The row's configuration. Raises SkippedError."""
    _scored(row)
    rule = framework_of(row.framework, row.gpu)
    usual = _run(row, rule)
    if row.recompute and row.micro_batch and row.zero_stage is not None:
        return usual
    return next((run for run in _open(row, rule, usual) if _fits(run)), usual)


def _open(row: PublishedRow, rule: FrameworkRule, usual: PricedRun) -> Iterator[PricedRun]:
    """The usual run, then those that the row's blanks leave open and that take less memory.

    More of the state is sharded, then micro-batches are halved, then layers run again. Megatron
    shards optimizer state alone, and Megatron Core has finer ways to save activations.
    """
    yield usual
    megatron, pipelined = "Megatron" in usual.framework.name, usual.strategy.pp > 1
    stages = [usual.zero] if usual.strategy.dp == 1 else range(usual.zero, 2 if megatron else 4)
    sizes = [usual.strategy.micro_batch >> n for n in range(1 if pipelined else 5)]
    finer = usual.framework.name == MEGATRON_CORE.name
    again = [usual.execution.recompute.value] if finer else ["none", "full"]
    for recompute, micro_batch, stage in product(
        [row.recompute] if row.recompute else again,
        [row.micro_batch] if row.micro_batch else [size for size in sizes if size],
        stages if row.zero_stage is None else [row.zero_stage],
    ):
        chosen = {"recompute": recompute, "micro_batch": micro_batch, "zero_stage": stage}
        yield _run(row.model_copy(update=chosen), rule)


def _fits(run: PricedRun) -> bool:
    """Whether its tensors take no more than the GPU has, as far as predictions can tell."""
    graph = graph_of(run)
    parts = framework_memory(graph, run.execution, run.framework, "allocated")
    return sum(parts.values()) < OVERESTIMATED * run.nodes.gpu.memory


def _run(row: PublishedRow, rule: FrameworkRule) -> PricedRun:
    model = _model(row, rule)
    nodes = machine_of(row)
    strategy, micro_batches = _strategy(row, rule)
    batch = micro_batches * strategy.dp * strategy.micro_batch
    training = _training(row, rule, batch)
    framework = rule.behaviour_of(row)
    if row.moe:
        framework = dispatching(row, framework)
    within = WITHIN_NODES.search(row.notes) is not None
    chunked = "Liger" in row.framework or CHUNKED_LOSS.search(row.notes) is not None
    execution = _execution(row, rule)
    documents = DOCUMENTS.search(row.notes)
    state = PURE_STATE_BYTES if rule.trains_purely(row) else 0
    state = LOW_STATE_BYTES if LOW_STATES in row.notes else state
    run = PricedRun(model, training, strategy, nodes, framework, execution, row.cp or 1)
    return replace(
        run,
        zero=_zero(row, rule),
        chunked_loss=chunked,
        fp4=row.precision == "fp4",
        frozen_fp8=row.precision == "fp8" and row.adapter is not None,
        plain_adapters=plain_adapters(row),
        document_tokens=int(documents[1]) if documents else 0,
        state_bytes=state,
        autocast=AUTOCAST.search(row.notes) is not None and training.precision != "fp32",
        within_nodes=within,
        selective="cheap" if CHEAP_AGAIN in row.notes or again_by_recipe(row) else rule.selective,
    )


def _scored(row: PublishedRow) -> None:
    if why := experts_refusal(row):
        raise SkippedError(why)
    if why := adapters_refusal(row):
        raise SkippedError(why)
    if not (row.layers and row.hidden and row.seq_len and row.n_gpus):
        raise SkippedError("layers, hidden size, sequence length or GPUs are not stated")
    ways = (row.dp or 1) * (row.tp or 1) * (row.pp or 1) * (row.cp or 1)
    if row.n_gpus < ways:
        raise SkippedError(f"{ways}-way parallelism needs more GPUs than the row has")
    if row.layers < (row.pp or 1):
        raise SkippedError("there are fewer layers than pipeline stages")
    if row.seq_len % (row.cp or 1):
        raise SkippedError("context parallelism does not divide the sequence")


def _model(row: PublishedRow, rule: FrameworkRule) -> ModelSpec:
    assert row.layers and row.hidden and row.seq_len
    gated, ways = bool(row.gated_mlp), row.tp or 1
    heads = row.heads or _heads(row.hidden, ways)
    ffn = row.ffn or (-(-row.hidden * 8 // 3 // 256) * 256 if gated else 4 * row.hidden)
    if min(heads, ffn) < ways:
        raise SkippedError(f"{heads} heads and ffn {ffn} do not split over {ways} ranks")
    vocab = row.vocab or PADDED_GPT2_VOCABULARY
    if rule.pads_vocabulary:
        vocab = -(-vocab // (128 * ways)) * 128 * ways
    if row.moe:
        return expert_model(row, vocab)
    return ModelSpec(
        name=row.model_name or row.id,
        layers=row.layers,
        hidden=row.hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=row.kv_heads or heads,
        head_dim=row.head_dim or row.hidden // heads,
        vocab=vocab,
        max_sequence_length=row.seq_len,
        norm="rmsnorm" if gated else "layernorm",
        mlp="swiglu" if gated else "gelu",
        positions="rope" if gated else "learned",
        tied_embeddings=bool(row.tied_embeddings) if row.tied_embeddings is not None else not gated,
        qkv_bias=not gated,
        attention_output_bias=not gated,
        mlp_bias=not gated,
        source=f"measured row {row.id}",
    )


def _heads(hidden: int, ways: int) -> int:
    """Number of heads of a width nearest 128, split evenly over the tensor-parallel ranks."""
    possible = [n for n in range(ways, hidden + 1, ways) if hidden % n == 0]
    if not possible:
        raise SkippedError(f"no number of heads splits hidden {hidden} over {ways} ranks")
    return min(possible, key=lambda n: abs(hidden / n - 128))


def _strategy(row: PublishedRow, rule: FrameworkRule) -> tuple[Strategy, int]:
    """The split and the micro-batches of one data-parallel rank."""
    assert row.n_gpus
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    dp = row.dp or max(1, row.n_gpus // (tp * pp * cp))
    sequences = max(1, (row.global_batch or 0) // dp)
    stages = pp * (row.vpp or _virtual_stages(row, rule))
    per_stage = rule.micro_batch_per_stage and sequences % stages == 0
    default = sequences // stages if per_stage else 1
    usual = default if pp > 1 else _power(sequences if row.global_batch else 1)
    micro_batch = row.micro_batch or usual
    micro_batches = row.grad_accum or max(1, sequences // micro_batch)
    if not row.global_batch and not row.grad_accum:
        micro_batches = 4 * pp if pp > 1 else 1
    sequence_parallel = rule.sequence_parallel
    if row.sequence_parallel is not None:
        sequence_parallel = bool(row.sequence_parallel)
    strategy = Strategy(
        dp=dp,
        tp=tp,
        pp=pp,
        zero=_zero(row, rule) if dp > 1 else 0,
        micro_batch=micro_batch,
        sequence_parallel=sequence_parallel,
        ep=row.ep or 1,
    )
    return strategy, micro_batches


def _zero(row: PublishedRow, rule: FrameworkRule) -> int:
    return rule.zero if row.zero_stage is None else row.zero_stage


def _power(sequences: int) -> int:
    return max(m for m in (1, 2, 4, 8, 16) if sequences % m == 0)


def _training(row: PublishedRow, rule: FrameworkRule, batch: int) -> Training:
    assert row.seq_len
    early = (rule.before_flash and not rule.recent(row)) or row.gpu.startswith(("V100", "T4"))
    stated = row.precision or ("fp16" if early else "bf16")
    stated = "fp32" if stated == "tf32" else stated
    low = stated in ("fp8", "fp4")
    precision = "bf16" if low else stated
    if precision not in ("bf16", "fp16", "fp32"):
        raise SkippedError(f"precision {stated} is not modelled")
    gradients = rule.gradient_precision(row, precision)
    return Training(
        sequence_length=row.seq_len,
        global_batch=batch,
        precision=precision,
        gradient_precision=gradients,
        reduce_precision="fp32" if rule.reduces_in_fp32 else None,
        fp8_gemms=low and row.adapter is None,
        attention="materialised" if rule.materialised(row) else "flash",
        dropout=DROPOUT if rule.drops_out(row) and NO_DROPOUT not in row.notes else 0.0,
        clip_norm=1.0,
        lora=lora_of(row),
    )


def _virtual_stages(row: PublishedRow, rule: FrameworkRule) -> int:
    if row.schedule:
        return 2 if row.schedule == "interleaved" else 1
    pp, layers = row.pp or 1, row.layers or 1
    if row.moe:
        return 1
    return layers // pp if rule.interleaves and pp > 1 else 1


def _execution(row: PublishedRow, rule: FrameworkRule) -> Execution:
    virtual = row.vpp or _virtual_stages(row, rule)
    recompute = _recompute(row)
    share = 1.0
    if "--recompute-ffn" in row.notes:
        recompute = Recompute.MLP
    if recompute is Recompute.SELECTIVE and row.hfu_pct and row.mfu_pct:
        # Printed FLOPs say how many layers ran their forward again, which is a third of a step.
        again = 3 * (row.hfu_pct / row.mfu_pct - 1)
        recompute, share = Recompute.FULL, min(max(0.0, again), 1.0)
    where = row.offload_optimizer or "none"
    streamed = "update on GPU" in where
    return Execution(
        recompute=recompute,
        recomputed=share,
        virtual_stages=virtual,
        cpu_update=where != "none" and not streamed,
        passing_bytes=_state_bytes(where, row) if streamed else 0,
        state_on_disk=where.startswith("nvme"),
        parameters_on_host=(row.offload_param or "none") != "none",
        boundaries_on_host=(row.offload_activation or "none") != "none",
    )


def _recompute(row: PublishedRow) -> Recompute:
    if row.recompute and row.recompute not in tuple(Recompute):
        told = f"recompute {quoted(row.recompute)} is not known"
        raise SkippedError(f"{told}; write full, selective or none, or leave it blank")
    by_recipe = Recompute.SELECTIVE if again_by_recipe(row) else Recompute.NONE
    return Recompute(row.recompute or by_recipe)


def _state_bytes(where: str, row: PublishedRow) -> int:
    """Bytes an element of the states that `where` names, of m, v and master: 16 or 32 bits each."""
    named = sum(bool(re.search(rf"\b{kind}\b", where)) for kind in ("m", "v", "master"))
    return named * (2 if LOW_STATES in row.notes else 4)
