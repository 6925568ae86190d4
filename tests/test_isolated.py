"""Documents kept apart, planned: what attention computes and takes, refusals, what is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.cost.compute import Device, attention_seconds
from bigplan.engines.deepspeed.refusals import refusal
from bigplan.graph import attention_kernels
from bigplan.graph.attention import attention
from bigplan.graph.build import build_graph, model_flops
from bigplan.graph.operators import Attention
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.launcher.inputs import unreadable_data
from bigplan.lower.program import lower
from bigplan.plan import graph_of
from bigplan.planner import Request, make_plan
from bigplan.program import DOCUMENTS
from bigplan.report.plan_report import documents_text
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.runtime.plans import tiny_model
from tests.tiny import small_cluster

MODEL = find_model("llama-3.1-8b")
CROSSING = Training(sequence_length=8192, global_batch=4)
APART = CROSSING.model_copy(update={"isolate_documents": True})
KNOWN = APART.model_copy(update={"document_tokens": 512.4})


def _operators(training: Training) -> list[Attention]:
    gpu = find_cluster("h200-1x").group.gpu
    shape = RankShape.on(gpu, MODEL, training, Strategy(dp=1))
    return [one for ops in attention(shape) for one in ops if isinstance(one, Attention)]


def test_attention_computes_what_documents_leave() -> None:
    crossing, apart, known = map(_operators, (CROSSING, APART, KNOWN))
    for whole, unknown, one in zip(crossing, apart, known, strict=True):
        assert whole.flops == unknown.flops
        assert one.flops == pytest.approx(whole.flops / 16)
        assert (one.kernel, one.edges, one.length) == ("alibi", 1.5 + one.backward, 512)
    less = model_flops(MODEL, CROSSING) - model_flops(MODEL, KNOWN)
    assert less == pytest.approx(CROSSING.tokens_per_step * 6 * 32 * 4096 * (8192 - 512))


def test_an_edge_more_is_priced() -> None:
    gpu = find_cluster("h200-1x").group.gpu
    device = Device(gpu, "bf16")
    for one in _operators(KNOWN):
        some, alone = (attention_seconds(replace(one, edges=n), device) for n in (2.5, 1))
        assert some / alone == pytest.approx((1 + 320 / 512) / (1 + 128 / 512))
        once = attention_seconds(replace(one, fills=1.0), device)
        half = (gpu.attention_backward_half_length if one.backward else
                gpu.attention_forward_half_length)  # fmt: skip
        assert half is not None
        filled = (1 + 1.5 * half["alibi"] / 512) / (1 + half["alibi"] / 512)
        assert attention_seconds(one, device) / once == pytest.approx(filled)


def test_plain_torch_on_a_gpu_skips_no_document() -> None:
    plain = KNOWN.model_copy(update={"kernels": "torch"})
    for one, whole in zip(_operators(plain), _operators(CROSSING), strict=True):
        assert one.flops == whole.flops
    gpu = find_cluster("h200-1x").group.gpu
    shape = RankShape.on(gpu, MODEL, plain, Strategy(dp=1))
    assert attention_kernels.in_blocks(shape)
    assert not attention_kernels.in_blocks(RankShape.on(gpu, MODEL, KNOWN, Strategy(dp=1)))


@pytest.mark.parametrize("layout", [Strategy(dp=2), Strategy(dp=1, cp=2), Strategy(dp=1, pp=2)])
def test_bounds_of_a_step_have_room_on_every_gpu(layout: Strategy) -> None:
    """Two places of four bytes for each token of a rank's whole sequences, where `cp` has parts."""
    training = Training(sequence_length=16, global_batch=4, isolate_documents=True)
    graph = build_graph(tiny_model(), training, layout)
    sequences = 4 // layout.dp
    assert graph.document_bytes == sequences * 16 * 8
    assert not build_graph(tiny_model(), CROSSING, layout).document_bytes


def test_a_plan_counts_their_bytes() -> None:
    training = Training(sequence_length=32, global_batch=4, precision="fp32", steps=3)
    model, plans = find_model("tiny-llama-test"), []
    for isolates in (False, True):
        wanted = training.model_copy(update={"isolate_documents": isolates})
        request = Request(model, wanted, small_cluster(), {"dp": 2, "micro_batch": 1})
        plans.append(make_plan(request))
    programs = [lower(graph_of(plan), plan.placement) for plan in plans]
    buffers = [program.buffers for (program,) in programs]
    assert DOCUMENTS not in buffers[0]
    assert buffers[1][DOCUMENTS].nbytes == 2 * 32 * 8
    told = [plan.predicted.memory[0].used_bytes for plan in plans]
    assert told[1] - told[0] >= 2 * 32 * 8


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ("megatron", "--reset-attention-mask"),
        ("torchtitan", "block_causal"),
        ("nemo", "in its own runtime alone, not for nemo"),
    ],
)
def test_other_tools_refuse_by_name(tool: str, told: str) -> None:
    why = other_tools_refusal(MODEL, KNOWN, tool)
    assert why is not None
    assert "isolate_documents" in why
    assert told in why
    assert other_tools_refusal(MODEL, CROSSING, tool) is None


def test_deepspeed_refuses() -> None:
    assert "isolate_documents" in str(refusal(MODEL, APART, Strategy(dp=1)))


def test_plans_tell_what_documents_leave() -> None:
    assert documents_text(CROSSING) == ""
    assert "not known here" in documents_text(APART)
    assert "one of 512 on average, so attention computes 6.2% of the scores" in documents_text(
        KNOWN
    )


def test_data_without_documents_is_told() -> None:
    (error,) = unreadable_data(MODEL, APART)
    assert "no document ends" in str(error)
    assert not list(unreadable_data(MODEL, CROSSING))
