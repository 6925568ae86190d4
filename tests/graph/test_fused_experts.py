"""Experts as one fused kernel a product: bytes by hand."""

from __future__ import annotations

from dataclasses import replace

from bigplan.cost.framework import MEGATRON_CORE
from bigplan.cost.run import PricedRun, graph_of
from bigplan.cost.step import Execution
from bigplan.graph.graph import LayerKind
from bigplan.graph.operators import Attention, Gemm, Stream
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.layers import BLOCK
from bigplan.spec.training import Training

QWEN = find_model("qwen3-30b-a3b")
ROWS, HIDDEN, FFN, LOCAL = 4096 * 8, 2048, 768, 16


def block(*, fused: bool) -> LayerKind:
    framework = replace(MEGATRON_CORE, fused_experts=fused, mxfp8_attention=fused)
    training = Training(sequence_length=4096, global_batch=8, fp8_gemms=True)
    nodes = find_cluster("hgx-b200").with_nodes(1).group
    run = PricedRun(QWEN, training, Strategy(dp=8, ep=8), nodes, framework, Execution())
    return graph_of(run).kinds[BLOCK]


def moved(kind: LayerKind) -> tuple[dict[str, float], dict[str, float]]:
    forward, backward = (
        {one.name: one.nbytes for one in operators if isinstance(one, Stream)}
        for operators in (kind.forward, kind.backward)
    )
    return forward, backward


def test_the_kernels_compute_the_activation_and_cast_it() -> None:
    forward, backward = moved(block(fused=True))
    apart, apart_back = moved(block(fused=False))
    inner = ROWS * FFN
    assert (apart["activation"], forward["activation"]) == (3 * inner * 2, 2 * inner)
    assert (apart_back["activation"], backward["activation"]) == (5 * inner * 2, 6 * inner)
    assert apart["mlp down to fp8"] - forward["mlp down to fp8"] == 4 * inner
    assert (apart_back["mlp up to fp8"], backward["mlp up to fp8"]) == (8 * inner, 0)
    assert forward["mlp up to fp8"] == apart["mlp up to fp8"]


def test_what_the_backward_needs_is_copied_into_pages_and_back() -> None:
    forward, backward = moved(block(fused=True))
    kept = ROWS * HIDDEN + 2 * 2 * ROWS * FFN + ROWS * FFN  # 8 bits, 16 bits of two, 8 bits
    assert forward["paged stash"] == backward["paged stash"] == 2 * kept


def test_each_product_is_a_launch_and_the_host_waits_for_nothing() -> None:
    fused, apart = block(fused=True), block(fused=False)
    assert (fused.waits, apart.waits) == (False, True)
    for kind, launches in ((fused, 1), (apart, LOCAL)):
        products = [one for one in kind.forward if isinstance(one, Gemm) and one.groups > 1]
        assert [one.launches for one in products] == [launches, launches]
    attentions = [one for one in fused.backward if isinstance(one, Attention)]
    assert attentions
    assert all(one.fp8 for one in attentions)
    assert not any(one.fp8 for one in apart.backward if isinstance(one, Attention))


def test_current_scaling_looks_for_the_largest_value_first() -> None:
    """Three kernels a cast, for each expert, which read 2 bytes more."""
    training = Training(sequence_length=4096, global_batch=8, fp8_gemms=True)
    nodes = find_cluster("dgx-h100").with_nodes(1).group
    kinds = []
    for current in (False, True):
        framework = replace(MEGATRON_CORE, current_scaling=current)
        run = PricedRun(QWEN, training, Strategy(dp=8, ep=8), nodes, framework, Execution())
        kinds.append(graph_of(run).kinds[BLOCK])
    known, sought = (
        [x for x in (*kind.forward, *kind.backward) if "to fp8" in x.name] for kind in kinds
    )
    assert len(known) == 8
    for one, other in zip(known, sought, strict=True):
        assert isinstance(one, Stream)
        assert isinstance(other, Stream)
        assert (other.nbytes, other.launches) == (1.5 * one.nbytes, 3 * one.launches)
