"""Graphs of shipped families, written from their steps, have the kernels of captured ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

import torch

from bigplan.cost.compute import attention_seconds
from bigplan.graph.build import build_graph
from bigplan.graph.operators import Attention
from bigplan.graph.strategy import Strategy
from bigplan.kernels.fusion.cover import CoverUnit
from bigplan.kernels.fusion.covered import uncovered
from bigplan.kernels.fusion.families import block_graph
from bigplan.kernels.fusion.keep import KeepPlan, best_plan
from bigplan.kernels.optimised import Optimiser, optimise
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from tests.kernels.fused_rms_norm import fused_rms_norm
from tests.kernels.generated import DEVICE
from tests.kernels.plain import PlainBlock
from tests.presets import one_of_each

LENGTH = 256
# On a CPU attention of grouped heads is no kernel of its own: each has all heads here.
SIZES = {"hidden": 256, "ffn": 768, "heads": 4, "kv_heads": 4, "head_dim": 64}
NEOX = {"positions": "rope", "rotary_fraction": 0.25, "parallel_residual": True}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2-xl", {}),
    "opt": ("opt-13b", {}),
    "neox": ("gpt2-xl", NEOX),
    "llama": ("llama-3-8b", {}),
    "qwen3": ("llama-3-8b", {"qk_norm": True}),
    "olmo2": ("llama-3-8b", {"norms": "after", "qk_norm": True, "qk_norm_whole": True}),
    "granite": ("llama-3-8b", {"residual_scale": 0.3}),
}


def _model(name: str) -> ModelSpec:
    shipped, changes = FAMILIES[name]
    return ModelSpec.model_validate(find_model(shipped).model_dump() | SIZES | changes)


def _captured(model: ModelSpec) -> KeepPlan:
    block = PlainBlock(model).to(DEVICE, torch.bfloat16)
    table = ((LENGTH, 1, model.rotary_width), torch.bfloat16)
    shapes = [((2, LENGTH, model.hidden), torch.bfloat16), table, table]
    with fused_rms_norm():
        plan: KeepPlan = optimise(block, shapes, gpu="h200-sxm").kernels.plans[0]
    return plan


def _kernels(units: Iterable[CoverUnit], *, backward: bool) -> Counter[tuple[str, ...]]:
    """The operators of every generated kernel, but for copies."""
    side = (u for u in units if u.fused is not None and u.members[0].backward == backward)
    return Counter(_operators([node.op for node in unit.members]) for unit in side)


def _operators(names: list[str]) -> tuple[str, ...]:
    """Autograd puts halves of heads together by other operators than families.py does."""
    moved = {"cat", "slice_backward", "add"} if "neg" in names else set[str]()
    return tuple(sorted(name for name in names if name not in {"clone", "_to_copy", *moved}))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_graph_has_the_kernels_of_a_captured_one(name: str) -> None:
    model = _model(name)
    written = best_plan(block_graph(model, 2, LENGTH, "bf16"), Optimiser("h200-sxm", 0.0).pricer)
    captured = _captured(model)
    for backward in (False, True):
        ours, theirs = (
            _kernels(plan.cover.units, backward=backward) for plan in (written, captured)
        )
        assert ours == theirs
    # Attention's statistics are larger on a CPU; all else is kept alike.
    assert written.kept_bytes == pytest.approx(captured.kept_bytes, rel=0.02)


@pytest.mark.parametrize(("name", "length"), [("mistral-7b", 16_384), ("phi-3-mini", 4096)])
def test_attention_within_a_window_is_priced_as_in_a_plan(name: str, length: int) -> None:
    """As the plan's operators are, forward and backward; bytes do not matter beside arithmetic."""
    model, pricer = find_model(name), Optimiser("h200-sxm", 0.0).pricer
    training = Training(sequence_length=length, global_batch=1)
    kind = build_graph(model, training, Strategy(dp=1), fused=True).kinds["block"]
    planned = [op for op in (*kind.forward, *kind.backward) if isinstance(op, Attention)]
    graph = block_graph(model, 1, length, "bf16")
    nodes = [node for node in graph.nodes if "scaled_dot_product" in node.op]
    assert model.window_within(length)
    for node, operator in zip(nodes, planned, strict=True):
        seconds = pricer.torch(graph, node) - pricer.sm.kernel_start
        assert seconds == pytest.approx(attention_seconds(operator, pricer.device))


def test_every_shipped_model_has_a_graph_or_what_it_lacks_is_named() -> None:
    for model in map(find_model, one_of_each()):
        if not uncovered(model):
            assert block_graph(model, 1, 64, "bf16").outputs
