"""Rows that trained adapters: which matrices have one, and how frozen matrices are stored.

The notes say "rank N", "targets q_proj v_proj" (or "targets all") and "lora dropout P"; else what
the row's own script has by default:

    Answer.AI fsdp_qlora     rank 64, dropout 0.1, all but o_proj (`train.py`, 1058 to 1061, 1159)
    Qwen                     rank 64, dropout 0.05, all: c_attn, c_proj, w1, w2 (`finetune.py`, 53)
    others                   rank 8, no dropout, queries and values (`LoraConfig` of peft, and its
                             default targets of Llama)

Adapters run by plain torch, each matrix's apart; Megatron joins those of a product. Unsloth's,
AutoModel's (`use_triton`) and compiled ones are fused. Gradients flow through every frozen
product. Frozen matrices of QLoRA are bitsandbytes' NF4. Adapters train in the frozen matrices'
dtype where nothing else is said: peft cast them so until 0.12 (`autocast_adapter_dtype`), and
`train.py` loads all in bf16; ZeRO adds its fp32 master.
"""

from __future__ import annotations

import re
from typing import Literal

from bigplan.spec.lora import Lora
from bigplan.validate.rows import PublishedRow

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FSDP_QLORA = "fsdp_qlora"  # in a row's source
RANK = re.compile(r"\brank[ =](\d+)")
TARGETS = re.compile(r"\btargets[ =]((?:\w+_proj|all)(?:[ +]\w+_proj)*)")
DROPOUT = re.compile(r"\blora dropout[ =]([\d.]+)")
# Frameworks whose adapters have kernels of their own.
FUSED = re.compile(r"Unsloth|Automodel|bigplan")
JOINED = re.compile(r"Megatron|NeMo(?!.*Automodel)")  # those with one A and B for a product
KINDS = ("lora", "qlora")


def adapters_refusal(row: PublishedRow) -> str | None:
    """Why the row's adapters are not priced; None: they are, or it has none."""
    if row.adapter is None:
        return None
    if row.adapter.lower() not in KINDS:
        return f"adapters are priced for {' and '.join(KINDS)}, not for {row.adapter}"
    if row.moe:
        return "adapters beside experts are not modelled"
    if not row.gated_mlp:
        return "adapters are priced of models with a gated MLP"
    return None


def lora_of(row: PublishedRow) -> Lora | None:
    """The adapters that the row trained; None: all parameters are trained."""
    if row.adapter is None:
        return None
    rank, targets = _usual(row)
    if found := RANK.search(row.notes):
        rank = int(found[1])
    if found := TARGETS.search(row.notes):
        targets = ALL if found[1] == "all" else tuple(re.split(r"[ +]", found[1]))
    packed = "nf4" if row.adapter.lower() == "qlora" else None
    return Lora(rank=rank, targets=targets, frozen=packed, dropout=_dropout(row))


def plain_adapters(row: PublishedRow) -> Literal["", "apart", "joined"]:
    """How the row's adapters run by operators of plain torch; "": by fused kernels, or none."""
    if row.adapter is None or row.compile or FUSED.search(row.framework):
        return ""
    return "joined" if JOINED.search(row.framework) else "apart"


def _usual(row: PublishedRow) -> tuple[int, tuple[str, ...]]:
    if FSDP_QLORA in row.source:
        return 64, tuple(target for target in ALL if target != "o_proj")
    return (64, ALL) if _of_qwen(row) else (8, ("q_proj", "v_proj"))


def _dropout(row: PublishedRow) -> float:
    if found := DROPOUT.search(row.notes):
        return float(found[1])
    if FSDP_QLORA in row.source:
        return 0.1
    return 0.05 if _of_qwen(row) else 0.0


def _of_qwen(row: PublishedRow) -> bool:
    return row.source == "QwenLM/Qwen"
