"""Megatron-LM's arguments, by the names and defaults of megatron/training in August 2026."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.graph.graph import Recompute
from bigplan.intake.arguments import ArgumentLines
from bigplan.intake.copies import ONE_COPY, Copies
from bigplan.intake.setup import ALL, BatchSizes, Given, Offload, Recomputation, Setup
from bigplan.placement import Tier
from bigplan.spec.files.reading import read_text
from bigplan.spec.unplanned import OTHER_CONTEXT_PARALLEL, unplanned

_ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_MODEL = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn",
    "num-attention-heads": "heads",
}
DROPOUT, CLIP = 0.1, 1.0  # its defaults
# How options begin that change neither memory nor seconds.
_HARMLESS = (
    *["adam-", "add-qkv", "adlr", "apply-layernorm", "async-save", "attention-softmax"],
    *["auto-detect", "batch-p2p", "bias-", "calculate-per-token", "ckpt", "cross-entropy"],
    *["cuda-graph", "data-", "dataloader", "decoupled", "disable-bias", "dist-", "distributed-"],
    *["empty-unused", "enable-msc", "end-weight", "eod", "eval", "exit", "finetune", "fp8-amax"],
    *["fp8-margin", "fp8-recipe", "hysteresis", "init-method", "initial-loss", "lazy-", "load"],
    *["log", "loss-scale", "lr", "make-", "manual-gc", "master-", "max-position", "max-restarts"],
    *["merge-file", "min-l", "mock", "monitor", "no-", "node-rank", "non-persistent"],
    *["norm-epsilon", "normalization", "num-workers", "one-logger", "openai-gelu", "optimizer"],
    *["overlap-p2p", "overlap-param-gather", "override-opt", "per-", "position-embedding"],
    *["profile", "qk-layernorm", "rdzv", "reset-", "role", "rope", "rotary", "save", "seed", "sft"],
    *["sgd-", "split", "squared-relu", "start-weight", "tee", "tensorboard", "test-data"],
    *["tiktoken", "timing", "tokenizer", "train-", "transformer-impl", "use-checkpoint"],
    *["use-cpu-init", "use-dist-ckpt", "use-flash-attn", "use-mcore", "use-nsys"],
    *["use-precision-aware", "use-rotary", "valid-data", "vocab", "wandb", "weight-decay"],
)
_UNPRICED = {
    "overlap-cpu-optimizer-d2h-h2d": "copies of the CPU's update run beside it",
    "fine-grained-activation-offloading": "activations of some modules leave the GPU",
    "cpu-offloading": "activations leave the GPU",
    "cpu-offloading-num-layers": "activations leave the GPU",
    "fp8-param-gather": "parameters are gathered in fp8",
    "fp4-format": "GEMMs in fp4: priced in 16 bits",
    "enable-cuda-graph": "graphs of kernels: launches are priced one by one",
    "external-cuda-graph": "graphs of kernels: launches are priced one by one",
    "delay-wgrad-compute": "gradients of weights are computed later",
    "defer-embedding-wgrad-compute": "the embedding's gradient is computed later",
    "use-nccl-ub": "NCCL works on registered buffers",
    "main-grads-dtype": "gradients of another precision than is priced",
    "main-params-dtype": "master weights of another precision than fp32",
    "exp-avg-dtype": "moments of another precision than fp32",
    "exp-avg-sq-dtype": "moments of another precision than fp32",
    "rampup-batch-size": "the batch grows: its last size is priced",
    "step-batch-size-schedule": "the batch grows: its last size is priced",
    "pipeline-model-parallel-layout": "stages are laid out by hand: even ones are priced",
    "account-for-embedding-in-pipeline-split": "the embedding counts as a block of its stage",
    "account-for-loss-in-pipeline-split": "the loss counts as a block of its stage",
    "distribute-saved-activations": "inputs of blocks are split over tensor-parallel ranks",
    "multi-latent-attention": "attention is latent: priced as the model's own",
    "mtp-num-layers": "further tokens are predicted by more layers",
}


def read(path: Path, given: Given) -> Setup:
    """The script's training. Raises InputError, and RefusedError for what is never planned."""
    found = ArgumentLines.of(read_text(path), str(path))
    _refuse(found)
    pp = found.whole("pipeline-model-parallel-size", 1) or 1
    model: dict[str, str | int | None] = {
        ours: found.known_whole(theirs) for theirs, ours in _MODEL.items()
    }
    model |= {**_heads(found), **_parts(found), "sliding_window": _window(found)}
    again, told = _again(found)
    split = _split(found, pp)
    setup = Setup(
        "megatron",
        _training(found),
        BatchSizes(
            found.whole("micro-batch-size"), None, found.whole("global-batch-size"), alone=True
        ),
        split,
        _offload(found),
        again,
        _processes(found),
        {name: value for name, value in model.items() if value is not None},
        copies=_copies(found, split["zero"]),
        behaviour=_behaviour(found, split),
    )
    unpriced = [*told, *_unpriced(found)]
    left = sorted(set(found.options) - found.seen)
    ignored = [f"--{name}" for name in left if name.startswith(_HARMLESS)]
    unknown = [f"--{name}: bigplan does not know it" for name in left if f"--{name}" not in ignored]
    return setup.with_told((), (*unpriced, *unknown), ignored)


def _refuse(found: ArgumentLines) -> None:
    if (found.whole("context-parallel-size") or 1) > 1:
        raise RefusedError(f"{found.file}: --context-parallel-size: {OTHER_CONTEXT_PARALLEL}")
    for name in (
        "expert-model-parallel-size",
        "expert-tensor-parallel-size",
    ):
        if (found.whole(name) or 1) > 1:
            raise RefusedError(f"{found.file}: --{name}: {unplanned(name) or 'not planned'}")
    for name in found.options:
        if name not in found.seen and (refusal := unplanned(name)):
            raise RefusedError(f"{found.file}: --{name}: {refusal}")


def _split(found: ArgumentLines, pp: int) -> dict[str, int]:
    tp = found.whole("tensor-model-parallel-size", 1) or 1
    parallel = found.flag("sequence-parallel")
    ends = ("first", "last")
    blocks = {f"{end}_blocks": found.whole(f"decoder-{end}-pipeline-num-layers") for end in ends}
    split = {"tp": tp, "pp": pp, "zero": _zero(found)}
    if tp > 1:
        split["sequence_parallel"] = int(parallel)
    split |= {name: count for name, count in blocks.items() if count}
    if pp > 1:
        if virtual := found.whole("num-virtual-stages-per-pipeline-rank"):
            split["vpp"] = virtual
        if each := found.whole("num-layers-per-virtual-pipeline-stage"):
            split["blocks_each"] = each
    return split


def _zero(found: ArgumentLines) -> int:
    sharding = found.text("data-parallel-sharding-strategy", *_ZERO)
    kept = found.flag("torch-fsdp2-no-reshard-after-forward")
    distributed = found.flag("use-distributed-optimizer")
    if found.flag("use-megatron-fsdp", "use-custom-fsdp"):
        return _ZERO[sharding or "optim_grads_params"]
    if found.flag("use-torch-fsdp2"):
        return 2 if kept else 3
    return int(distributed)


def _copies(found: ArgumentLines, zero: int) -> Copies:
    """Instances of the distributed optimizer: neighbours share one (core/parallel_state.py)."""
    number = found.whole("num-distributed-optimizer-instances", 1) or 1
    if number == 1 or found.flag("use-torch-fsdp2"):
        return ONE_COPY
    if zero == 0:
        raise InputError(
            f"{found.file}: --num-distributed-optimizer-instances is {number}, which needs "
            "--use-distributed-optimizer; add it, or leave the instances out"
        )
    return Copies(number=number)


def _training(found: ArgumentLines) -> dict[str, Any]:
    bf16, fp16, low = (found.flag(name) for name in ("bf16", "fp16", "grad-reduce-in-bf16"))
    precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    whole = found.flag("accumulate-allreduce-grads-in-fp32")
    gradients = "bf16" if bf16 and low else "fp16" if fp16 and not whole else "fp32"
    training: dict[str, Any] = {"precision": precision, "gradient_precision": gradients}
    hidden = found.number("hidden-dropout")
    found.number("attention-dropout")
    training["dropout"] = DROPOUT if hidden is None else hidden
    clip = found.number("clip-grad")
    training["clip_norm"] = (CLIP if clip is None else clip) or None
    for name, key in (("seq-length", "sequence_length"), ("encoder-seq-length", "sequence_length")):
        if (length := found.whole(name)) is not None:
            training[key] = length
    if found.text("fp8-format") is not None:
        training["fp8_gemms"] = True
    if found.text("attention-backend") in ("unfused", "local"):
        training["attention"] = "materialised"
    if found.text("optimizer") == "sgd":
        training["optimizer.name"] = "sgd"
    return training


def _window(found: ArgumentLines) -> int | None:
    """Tokens that a token attends to; None: all before it."""
    text = found.text("window-size")
    if text is None:
        return None
    sides = re.fullmatch(r"\(?(-1|\d{1,9}), *(-1|\d{1,9})\)?", text)
    if sides is None:
        raise InputError(
            f"{found.file}: --window-size is {quoted(text)}, which must be two whole numbers, such "
            "as 4095,0: tokens before a token and after it; correct it"
        )
    before, after = map(int, sides.groups())
    if after > 0:
        raise InputError(
            f"{found.file}: --window-size is {quoted(text)}, but no token of a causal model sees "
            f"the {after} after it; write {before},0"
        )
    return before + 1 if before >= 0 else None


def _heads(found: ArgumentLines) -> dict[str, int | None]:
    """Their width, and how many have keys: one a group of queries, or each. None: not told."""
    width, groups = found.known_whole("kv-channels"), found.known_whole("num-query-groups")
    grouped = found.flag("group-query-attention")
    if "multi-latent-attention" in found.options:
        return {}  # heads are made of latents there
    if not grouped:
        groups = found.known_whole("num-attention-heads")
    elif "num-query-groups" not in found.options:
        groups = 1
    return {"kv_heads": groups, "head_dim": width}


def _parts(found: ArgumentLines) -> dict[str, str | int]:
    """MLP and head, where the file describes a model; both are told by flags alone."""
    gated, untied = found.flag("swiglu"), found.flag("untie-embeddings-and-output-weights")
    if found.known_whole("num-layers") is None:
        return {}
    return {"mlp": "swiglu" if gated else "gelu", "tied_embeddings": not untied}


def _offload(found: ArgumentLines) -> Offload:
    share = found.number("optimizer-offload-fraction")
    if not found.flag("optimizer-cpu-offload"):
        return Offload()
    return Offload(Tier.HOST, on_cpu=1.0 if share is None else min(share, 1.0))


def _again(found: ArgumentLines) -> tuple[Recomputation, list[str]]:
    """What is recomputed, and which parts of it are priced as something else."""
    granularity = found.text("recompute-granularity", "full", "selective")
    method = found.text("recompute-method", "uniform", "block")
    count = found.whole("recompute-num-layers")
    modules = found.options.get("recompute-modules", [])
    found.seen.add("recompute-modules")
    if granularity == "full":
        if method == "uniform" and count and count > 1:
            return Recomputation(Recompute.FULL), [
                f"--recompute-num-layers {count}: inputs of every {count}th block alone are kept; "
                "priced with those of all"
            ]
        return Recomputation(Recompute.FULL, count if method == "block" and count else ALL), []
    if granularity == "selective" or found.flag("recompute-activations"):
        what = " ".join(modules) or "core_attn"
        if set(modules) & {"mlp", "layernorm"}:
            return Recomputation(Recompute.SELECTIVE), [
                f"--recompute-modules {what}: priced as norms and activations recomputed"
            ]
        return Recomputation(), [
            f"--recompute-modules {what}: priced without, as FlashAttention's backward makes the "
            "scores again anyway"
        ]
    return Recomputation(), []


def _behaviour(found: ArgumentLines, split: dict[str, int]) -> dict[str, float]:
    """Overlaps that published runs have and this one lacks."""
    behaviour = {}
    overlaps = found.flag("overlap-grad-reduce") or split["zero"] > 1
    if not overlaps:
        behaviour["reduce_exposed"] = 1.0
    if not found.flag("tp-comm-overlap") and split.get("sequence_parallel"):
        behaviour["tensor_exposed"] = 1.0
    return behaviour


def _unpriced(found: ArgumentLines) -> Iterator[str]:
    for name, what in _UNPRICED.items():
        if found.flag(name):
            yield f"--{name}: {what}"
    if found.text("outer-dp-sharding-strategy", "no_shard", "optim") == "optim":
        yield "--outer-dp-sharding-strategy optim: state is shared out over all, priced in groups"
    torchs, instances = found.flag("use-torch-fsdp2"), "num-distributed-optimizer-instances"
    if torchs and found.flag(instances):
        yield f"--{instances}: torch's FSDP2 shards over all ranks there, as is priced"
    optimizer = found.text("optimizer")
    if optimizer not in (None, "adam", "sgd"):
        yield f"--optimizer {optimizer}: priced as AdamW"


def _processes(found: ArgumentLines) -> int | None:
    nodes, each = found.known_whole("nnodes"), found.known_whole("nproc-per-node")
    return each * (nodes or 1) if each else None
