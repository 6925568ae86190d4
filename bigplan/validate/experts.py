"""Rows of models with experts: which model it is, and how its tokens reach the experts.

A row names the model, and a shipped one of that name has what the table has no columns for. Experts
are whole on their ranks, as the sources say: Megatron-Bridge's performance configurations of Qwen3
have `expert_tensor_parallel_size` 1, the table of Megatron-Core's model zoo has ETP 1. Tokens are
sent as the notes say, else as those configurations do, whatever the release:

    Megatron-Bridge   qwen3_workload_base_configs.py (01b2977): once to each node and rank (DeepEP,
                      HybridEP); Qwen3 235B on B200 and B300 by all-to-all, on H100 also beside
                      compute (moe_a2a_overlap)
    model zoo         best-practice/qwen3/run_235b.sh: beside compute (A2A_OVERLAP) on the branch
                      `moe_dev`
    others            by all-to-all, while compute waits: Megatron Core's default

Routing is balanced, by force in both sources.
"""

from __future__ import annotations

import re
from dataclasses import replace

from bigplan.cost.framework import MEGATRON_CORE, Framework
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.model import ModelSpec
from bigplan.validate.frameworks import framework_of
from bigplan.validate.rows import PublishedRow

STATED = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")
ALL_TO_ALL = ("B200", "B300", "H100")  # GPUs on which Qwen3 235B is sent so
BESIDE = ("H100",)
# In a row's notes: modules run again that are this project's selective recomputation.
CHEAP_AGAIN = "recompute modules: norm, act"


def experts_refusal(row: PublishedRow) -> str | None:
    """Why the row's experts are not priced; None: they are, or it has none."""
    ep = row.ep or 1
    if not row.moe:
        return "expert parallelism needs a model with experts" if ep > 1 else None
    if "MLA" in row.moe:
        return "latent attention (MLA) and shared experts are not planned"
    if framework_of(row.framework, row.gpu).behaviour.name != MEGATRON_CORE.name:
        return "how frameworks other than Megatron Core run experts is not modelled"
    if _name(row) not in list_models() or not (model := find_model(_name(row))).experts:
        return "its experts are not those of a shipped model"
    unlike = [key for key in STATED if getattr(row, key) not in (None, getattr(model, key))]
    if unlike:
        return f"{' and '.join(unlike)} differ from those of the shipped {model.name}"
    ranks = (row.n_gpus or 1) // (row.pp or 1)
    if ranks % ep or model.experts % ep:
        return f"ep {ep} divides {model.experts} experts or a stage's {ranks} GPUs with a rest"
    return None


def expert_model(row: PublishedRow, vocab: int) -> ModelSpec:
    """The shipped model that the row names, with as many words."""
    length = {"max_sequence_length": row.seq_len, "vocab": vocab}
    return find_model(_name(row)).model_copy(update=length)


def dispatching(row: PublishedRow, framework: Framework) -> Framework:
    """The framework with the way in which the row's tokens reach their experts."""
    once, beside = "DeepEP" in row.notes, "moe_dev" in row.framework
    if "Megatron-Bridge" in row.framework:
        large = "235b" in _name(row)
        once = not (large and row.gpu.startswith(ALL_TO_ALL))
        beside = large and row.gpu.startswith(BESIDE)
    return replace(framework, dispatches_once=once, dispatches_beside=beside)


def _name(row: PublishedRow) -> str:
    return re.sub(r"[\s_]+", "-", row.model_name.strip().lower())
