"""Experts of Megatron Core against published timings that no training run is part of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.cost.collective import LayerGroups, dispatch, dispatched_seconds, expert_group
from bigplan.cost.compute import Device, attention_seconds, operator_seconds
from bigplan.cost.framework import MEGATRON_CORE
from bigplan.cost.price import device_of
from bigplan.cost.run import PricedRun, graph_of
from bigplan.cost.step import Execution
from bigplan.graph.operators import Attention, Collective, doubled_reach
from bigplan.graph.strategy import Strategy
from bigplan.spec.catalog import find_cluster, find_gpu, find_model
from bigplan.spec.layers import BLOCK
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

EIGHT = find_cluster("dgx-h100").with_nodes(1).group
MIXTRAL = find_model("mixtral-8x7b")
# Megatron-LM's proxy: 32 experts of DeepSeek-V3, without the shared one.
PROXY = find_model("deepseek-v3").model_copy(update={"experts": 32, "layers": 4})
PARTS = ("router", "mlp", "route", "sent", "activation", "combine")


@pytest.mark.parametrize(
    ("model", "once", "pads", "forward", "backward"),
    [
        (PROXY, True, False, 5.14, 7.69),
        (PROXY, True, True, 6.03, 8.60),
        (PROXY, False, False, 7.61, 10.13),
        (MIXTRAL, True, False, 3.70, 6.57),
        (MIXTRAL, True, True, 4.10, 6.83),
        (MIXTRAL, False, False, 3.79, 6.62),
    ],
)
def test_a_layer_of_experts_in_8_bits_takes_what_megatron_s_baselines_say(
    model: ModelSpec, once: bool, pads: bool, forward: float, backward: float
) -> None:
    """4,096 tokens on each of 8 H100s, by HybridEP, DeepEP (pads) or all-to-all, ms.

    NVIDIA/Megatron-LM, tests/functional_tests/test_cases/common/moe_perf/baseline.json (d98e8a6).
    """
    training = Training(sequence_length=4096, global_batch=8, fp8_gemms=True)
    framework = replace(MEGATRON_CORE, dispatches_once=once, pads_rows=pads)
    strategy = Strategy(dp=8, ep=8, zero=1)
    run = PricedRun(model, training, strategy, EIGHT, framework, Execution())
    block = graph_of(run).kinds[BLOCK]
    device, groups = device_of(EIGHT, training, framework), LayerGroups.of(strategy, EIGHT)
    for operators, took in ((block.forward, forward), (block.backward, backward)):
        rows = [one for one in operators if isinstance(one, Collective)]
        seconds = dispatched_seconds(rows, groups, framework, 0.0, 132)
        for one in operators:
            if one.name.startswith(PARTS) and "residual" not in one.name:
                seconds += 0.0 if isinstance(one, Collective) else operator_seconds(one, device)
        assert 1e3 * seconds == pytest.approx(took, rel=0.11)


@pytest.mark.parametrize(
    ("cluster", "ranks", "rate", "error"),
    [
        ("dgx-h100", 16, 67.3, 0.06),  # tokens x nodes, GB/s
        ("dgx-h100", 32, 57.6, 0.06),
        ("dgx-h100", 64, 49.9, 0.06),
        ("hgx-b200", 8, 750.6, 0.14),  # tokens x ranks
        ("hgx-b200", 16, 686.6, 0.14),
        ("hgx-b200", 32, 623.7, 0.14),
    ],
)
def test_tokens_that_go_once_take_what_hybridep_s_kernels_took(
    cluster: str, ranks: int, rate: float, error: float
) -> None:
    """4,096 tokens of 7,168 in bf16, 8 experts each anywhere; dispatch and combine, their mean.

    H100s by 16 multiprocessors over InfiniBand, GB200s by 32 over NVLink (deepseek-ai/DeepEP,
    branch hybrid-ep, docs/README_Hybrid-EP.md, kernels alone).
    """
    token, each = 7168 * 2, 8
    nodes = find_cluster(cluster).with_nodes(8).group
    if cluster == "hgx-b200":
        nodes = nodes.model_copy(update={"gpus_per_node": 64, "nodes": 1})
    group = expert_group(Strategy(dp=ranks, ep=ranks), nodes)
    places = ranks // 8 if cluster == "dgx-h100" else ranks
    took = dispatch(Collective("c", "all_to_all", 4096 * token * each, rows=each), group, once=True)
    reached = places * (1 - (1 - 1 / places) ** each)
    assert 4096 * token * reached / took / 1e9 == pytest.approx(rate, rel=error)


@pytest.mark.parametrize(
    ("gpu", "forward", "backward", "error"),
    [("gb200", 0.210, 0.465, 0.05), ("gb300", 0.202, 0.442, 0.05)],
)
def test_a_window_takes_what_cudnn_took(
    gpu: str, forward: float, backward: float, error: float
) -> None:
    """Two sequences of 4,096, 128 heads of 64, a window of 128, ms (cudnn-frontend's results)."""
    device = Device(find_gpu(gpu), "bf16", MEGATRON_CORE.attention)
    tokens, heads, columns, window = 2 * 4096, 128, 64, 128
    flops = 1.0 * tokens * doubled_reach(4096, window) * heads * 2 * columns
    ahead = Attention("a", flops, 0.0, False, columns, 4096, None, window)
    back = replace(ahead, flops=2.5 * flops, backward=True)
    assert 1e3 * attention_seconds(ahead, device) == pytest.approx(forward, rel=error)
    assert 1e3 * attention_seconds(back, device) == pytest.approx(backward, rel=error)


def test_attention_in_8_bits_takes_its_part_of_that_in_16() -> None:
    device = Device(find_gpu("gb200"), "bf16", MEGATRON_CORE.attention)
    for columns, window, parts in (
        (128, None, (0.79, 1.09)),
        (192, None, (0.68, 0.76)),
        (64, 128, (0.93, 4.35)),
    ):
        for backward, part in zip((False, True), parts, strict=True):
            wide = Attention("a", 1e12, 0.0, backward, columns, 4096, None, window)
            narrow = attention_seconds(replace(wide, fp8=True), device)
            assert narrow == pytest.approx(part * attention_seconds(wide, device))
