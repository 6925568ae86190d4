"""Rows of models with experts: which model it is, and how its tokens reach the experts.

A row names the model, and a shipped one of that name has what the table has no columns for, its
latent attention, shared experts and first blocks without experts among it. Runs of DeepSeek-V3
count a layer that predicts a second token (MTP) as one block more, unless the name says that there
is none: Megatron-Bridge's recipes have it, and by the table's FLOPs a token (260 GFLOP, without
250) so have runs that say nothing. Its second product with the vocabulary is left out. Experts are
whole on their ranks, as the sources say: Megatron-Bridge's performance configurations of Qwen3
have `expert_tensor_parallel_size` 1, the table of Megatron-Core's model zoo has ETP 1. Tokens are
sent as the notes say, else as those configurations do, whatever the release:

    Megatron-Bridge   `CONFIGURED`, by its scripts/performance/configs: Qwen3 as in
                      qwen3_workload_base_configs.py (01b2977), DeepSeek-V3 in
                      deepseek_workload_base_configs.py (0426418), on H100 as in
                      deepseek_llm_pretrain.py (0132842), GPT-OSS as the configurations V2 of
                      gpt_oss_workload_base_configs.py (07eea52). Where these have DeepEP or
                      HybridEP, once to each node and rank; with moe_a2a_overlap beside compute
    model zoo         best-practice/qwen3/run_235b.sh: beside compute (A2A_OVERLAP) on the branch
                      `moe_dev`
    others            by all-to-all, while compute waits: Megatron Core's default

Routing is balanced, by force in both sources.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from bigplan.cost.framework import MEGATRON_CORE, Framework
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.model import ModelSpec
from bigplan.validate.frameworks import framework_of
from bigplan.validate.rows import PublishedRow

STATED = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")
# What tables call shipped models, by the start of the name; the rest says which run it was.
DEEPSEEK = "deepseek-v3"
CALLED = {"deepseekv3": DEEPSEEK, "deepseekv2": "deepseek-v2"}
NO_SECOND = "w/o MTP"  # in a row's model: nothing predicts a second token
CUT = " cut to "  # in a row's model: fewer blocks than the model has, of which `layers` tells


class _Way(NamedTuple):
    """How Megatron-Bridge sends tokens of a model on these GPUs, all where none is named."""

    model: str
    gpus: tuple[str, ...]
    precision: str | None  # None: in any
    once: bool
    beside: bool

    def of(self, row: PublishedRow) -> bool:
        """Whether the row is such a run."""
        there = not self.gpus or row.gpu.startswith(self.gpus)
        precise = self.precision in (None, row.precision or "bf16")
        return there and precise and _name(row) == self.model


# The first that a row is one of counts; others are sent once, while compute waits.
CONFIGURED = (
    _Way("qwen3-235b-a22b", ("H100",), None, once=False, beside=True),
    _Way("qwen3-235b-a22b", ("B200", "B300"), None, once=False, beside=False),
    _Way(DEEPSEEK, ("H100",), None, once=True, beside=True),
    _Way(DEEPSEEK, (), "fp8", once=True, beside=True),
    _Way("gpt-oss-120b", ("B200", "H100"), None, once=False, beside=False),
    _Way("gpt-oss-120b", ("B300",), "bf16", once=True, beside=False),
    _Way("gpt-oss-120b", ("GB200",), "bf16", once=False, beside=True),
    _Way("gpt-oss-120b", ("GB300",), "bf16", once=False, beside=False),
    _Way("gpt-oss-120b", (), "fp8", once=True, beside=True),
)
# In a row's notes: modules run again that are this project's selective recomputation.
CHEAP_AGAIN = "recompute modules: norm, act"


def experts_refusal(row: PublishedRow) -> str | None:
    """Why the row's experts are not priced; None: they are, or it has none."""
    ep = row.ep or 1
    if not row.moe:
        return "expert parallelism needs a model with experts" if ep > 1 else None
    if framework_of(row.framework, row.gpu).behaviour.name != MEGATRON_CORE.name:
        return "how frameworks other than Megatron Core run experts is not modelled"
    if _name(row) not in list_models() or not (model := find_model(_name(row))).experts:
        return "its experts are not those of a shipped model"
    stated = STATED[1:] if CUT in row.model_name else STATED
    unlike = [key for key in stated if getattr(row, key) not in (None, getattr(model, key))]
    if unlike:
        return f"{' and '.join(unlike)} differ from those of the shipped {model.name}"
    ranks = (row.n_gpus or 1) // (row.pp or 1)
    if ranks % ep or model.experts % ep:
        return f"ep {ep} divides {model.experts} experts or a stage's {ranks} GPUs with a rest"
    return None


def expert_model(row: PublishedRow, vocab: int) -> ModelSpec:
    """The shipped model that the row names, with as many words."""
    model = find_model(_name(row))
    layers = row.layers if CUT in row.model_name and row.layers else model.layers
    layers += model.name == DEEPSEEK and NO_SECOND not in row.model_name
    changed = {"max_sequence_length": row.seq_len, "vocab": vocab, "layers": layers}
    return model.model_copy(update=changed)


def dispatching(row: PublishedRow, framework: Framework) -> Framework:
    """The framework with the way in which the row's tokens reach their experts."""
    once, beside = "DeepEP" in row.notes, "moe_dev" in row.framework
    if "Megatron-Bridge" in row.framework:
        found = (way for way in CONFIGURED if way.of(row))
        once, beside = next(((way.once, way.beside) for way in found), (True, False))
    return replace(framework, dispatches_once=once, dispatches_beside=beside)


def _name(row: PublishedRow) -> str:
    name = re.sub(r"[\s_]+", "-", row.model_name.strip().lower())
    return next((full for start, full in CALLED.items() if name.startswith(start)), name)
