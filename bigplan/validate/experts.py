"""Rows of models with experts: which model it is, and how its tokens reach the experts.

A row names the model, and a shipped one of that name has what the table has no columns for, its
latent attention, shared experts and first blocks without experts among it. Runs of DeepSeek-V3
count a layer that predicts a second token (MTP) as one block more, unless the name says that there
is none: Megatron-Bridge's recipes have it, and by the table's FLOPs a token (260 GFLOP, without
250) so have runs that say nothing. Its second product with the vocabulary is left out. Experts are
whole on their ranks, as the sources say: Megatron-Bridge's performance configurations of Qwen3
have `expert_tensor_parallel_size` 1, the table of Megatron-Core's model zoo has ETP 1. Tokens are
sent as the notes say, else:

    Megatron-Bridge   as its recipes of the release do (`recipes.py`), and with one virtual stage
                      where the table names none
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
from bigplan.validate.recipes import DEEPSEEK, Way, recipe_way, runs_modules_again
from bigplan.validate.rows import PublishedRow

STATED = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")
BRIDGE = "Megatron-Bridge"
# What tables call shipped models, by the start of the name; the rest says which run it was.
CALLED = {"deepseekv3": DEEPSEEK, "deepseekv2": "deepseek-v2"}
NO_SECOND = "w/o MTP"  # in a row's model: nothing predicts a second token
CUT = " cut to "  # in a row's model: fewer blocks than the model has, of which `layers` tells
# In the notes of Megatron-Bridge's rows; other fp8 there is `fp8_cs`, current scaling.
MXFP8 = re.compile(r"MXFP8|FP8-MX")
# Of exchanges beside compute that Python launches, the part that it hides: a profile of Qwen3
# 30B-A3B on 16 H100s by HybridEP (Megatron-Bridge's skills/nemo-mbridge-perf-moe-comm-overlap,
# 067f987): 3.96 s of 10.8 a step.
HIDDEN = 0.3655
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
    deep = "DeepEP" in row.notes
    way = Way(once=deep, pads=deep, beside="moe_dev" in row.framework)
    if BRIDGE in row.framework:
        way = recipe_way(_name(row), row)
    sent = replace(framework, dispatches_once=way.once, dispatches_beside=way.beside)
    found = replace(sent, pads_rows=way.pads)
    if way.whole:
        whole = replace(found, host=0.0, fused_experts=True)
        return replace(whole, mxfp8_attention=way.mxfp8_attention)
    scaled = BRIDGE in row.framework and MXFP8.search(row.notes) is None
    return replace(found, dispatch_hidden=HIDDEN, current_scaling=scaled)


def again_by_recipe(row: PublishedRow) -> bool:
    """Whether the recipe of a run with experts recomputes modules that the row does not name."""
    return BRIDGE in row.framework and runs_modules_again(_name(row), row)


def _name(row: PublishedRow) -> str:
    name = re.sub(r"[\s_]+", "-", row.model_name.strip().lower())
    return next((full for start, full in CALLED.items() if name.startswith(start)), name)
