"""Rows that trained adapters, and rows in NVFP4."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigplan.cost.collective import all_gather, tensor_group
from bigplan.cost.memory import framework_memory
from bigplan.cost.price import price
from bigplan.cost.run import PricedRun, graph_of, parts_of
from bigplan.errors import InputError
from bigplan.graph.operators import Attention, Collective, Gemm, Stream
from bigplan.spec.lora import Lora
from bigplan.validate.adapters import ALL
from bigplan.validate.configure import SkippedError, run_of
from tests.validate.rows import row

ONE: dict[str, object] = {"gated_mlp": 1, "n_gpus": 1, "micro_batch": 1, "global_batch": 1}
CORE = "NeMo 24.12 (Megatron Core)"


def _run(**columns: object) -> PricedRun:
    return run_of(row(**(ONE | {"framework": "HF Trainer (peft)", "adapter": "lora"} | columns)))


def _seconds(run: PricedRun) -> float:
    return sum(parts_of(run, graph_of(run), run.nodes).values())


def _bytes(run: PricedRun) -> dict[str, float]:
    return framework_memory(graph_of(run), run.execution, run.framework, "allocated")


@pytest.mark.parametrize(
    ("columns", "lora"),
    [
        ({}, Lora(rank=8, targets=("q_proj", "v_proj"))),
        ({"source": "QwenLM/Qwen"}, Lora(rank=64, targets=ALL, dropout=0.05)),
        (
            {"source": "AnswerDotAI/fsdp_qlora", "adapter": "QLoRA"},
            Lora(
                rank=64,
                targets=tuple(t for t in ALL if t != "o_proj"),
                frozen="nf4",
                dropout=0.1,
            ),
        ),
        (
            {"notes": "rank 16; targets q_proj o_proj; lora dropout 0.1"},
            Lora(rank=16, targets=("q_proj", "o_proj"), dropout=0.1),
        ),
        ({"notes": "rank=4; targets all; lora dropout 0.0"}, Lora(rank=4, targets=ALL)),
    ],
)
def test_adapters_are_as_stated_or_as_the_script_has_them(
    columns: dict[str, object], lora: Lora
) -> None:
    assert _run(**columns).training.lora == lora


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"adapter": "dora"}, "not for dora"),
        ({"gated_mlp": 0}, "gated MLP"),
    ],
)
def test_other_adapters_are_refused(columns: dict[str, object], reason: str) -> None:
    with pytest.raises(SkippedError, match=reason):
        _run(**columns)


@pytest.mark.parametrize(
    ("columns", "way"),
    [
        ({}, "apart"),
        ({"framework": "Unsloth"}, ""),
        ({"framework": "torchtune", "compile": 1}, ""),
        ({"framework": "torchtune"}, "apart"),
        ({"framework": "NeMo Automodel"}, ""),  # use_triton
        ({"framework": CORE}, "joined"),
        ({"adapter": ""}, ""),
    ],
)
def test_how_adapters_run(columns: dict[str, object], way: str) -> None:
    assert _run(**columns).plain_adapters == way


def test_one_gpu_is_without_deepspeed_and_keeps_16_bits() -> None:
    alone, full = _run(), _run(adapter="", zero_stage=3)
    assert (alone.framework.name, full.framework.name) == ("PyTorch", "DeepSpeed")
    assert graph_of(alone).sizes.state == 4  # two moments in 16 bits
    assert graph_of(_run(n_gpus=4, global_batch=4, zero_stage=3)).sizes.master


def test_what_is_frozen_has_no_state() -> None:
    """Weights are a half of 16 bits of them in 4 bits; gradients and moments are of adapters."""
    lora, full = _bytes(_run()), _bytes(_run(adapter="", zero_stage=0, notes="bf16-true"))
    graph = graph_of(_run())
    adapters = sum(graph.kinds[name].trained for name in graph.layers)
    assert lora["optimizer"] == adapters * graph.sizes.state
    assert lora["gradients"] <= adapters * graph.sizes.gradient
    assert lora["optimizer"] < full["optimizer"] / 100
    assert lora["parameters"] == full["parameters"] + 2 * adapters
    assert _bytes(_run(adapter="qlora"))["parameters"] < lora["parameters"] / 2


def _exchanged(run: PricedRun) -> tuple[float, float]:
    """Seconds in which all blocks gather parameters and reduce gradients."""
    block = price(graph_of(run), run.training, run.nodes, run.framework).kinds["block"]
    return run.model.layers * block.gather, run.model.layers * block.reduce


def test_zero_1_gathers_adapters_and_zero_3_all() -> None:
    sharded = {"n_gpus": 8, "global_batch": 8, "framework": CORE}
    updated, all_of_it = (_exchanged(_run(**sharded, zero_stage=stage))[0] for stage in (1, 3))
    block = graph_of(_run(**sharded, zero_stage=1)).kinds["block"]
    assert all_of_it > updated * block.parameters / block.trained / 50  # latency is in both
    assert all_of_it > 10 * updated > 0


def test_adapters_are_one_bucket() -> None:
    """Ten times as many blocks reduce more bytes, but not ten times as often."""
    wide = {"n_gpus": 256, "global_batch": 256, "framework": CORE, "hidden": 256, "heads": 2}
    few, many = (_exchanged(_run(**wide, layers=layers))[1] for layers in (4, 40))
    assert few < many < 2 * few


def test_four_bits_are_unpacked_by_a_kernel() -> None:
    """2.5 bytes and a quarter's scales an element, where plain torch's take 14 times as much."""
    run = _run(adapter="qlora")
    block = graph_of(run).kinds["block"]
    streams = [one for one in block.forward if isinstance(one, Stream) and one.launches % 3 == 0]
    unpacked = [one for one in streams if one.name in {"query, key, value", "mlp up", "mlp down"}]
    assert unpacked
    assert all(one.eager == 1.0 for one in unpacked)


def test_peft_copies_what_a_product_of_four_bits_gives() -> None:
    """Two passes and a launch for each of two matrices with adapters, forward alone."""

    def moved(run: PricedRun, way: str) -> tuple[float, int]:
        each = (one for one in getattr(graph_of(run).kinds["block"], way))
        streams = [one for one in each if isinstance(one, Stream) and "adapters" in one.name]
        return sum(one.nbytes for one in streams), sum(one.launches for one in streams)

    plain, packed = _run(), _run(adapter="qlora")
    tokens, hidden = plain.strategy.rank_tokens(plain.training), plain.model.hidden
    more = [a - b for a, b in zip(moved(packed, "forward"), moved(plain, "forward"), strict=True)]
    assert more == [2 * 2 * tokens * 2 * hidden, 2]
    assert moved(packed, "backward") == moved(plain, "backward")


def test_nothing_hides_gathers_where_every_adapter_is_a_unit() -> None:
    """FSDP gathers forward and backward; without peft's units the next block's is beside."""
    sharded = {"n_gpus": 2, "global_batch": 16, "micro_batch": 8, "zero_stage": 3, "layers": 8}
    peft, own = (_run(**sharded, framework=f"PyTorch FSDP {how}") for how in ("and PEFT", "alone"))
    parts = [parts_of(run, graph_of(run), run.nodes) for run in (peft, own)]
    graph = graph_of(peft)
    costs = price(graph, peft.training, peft.nodes, peft.framework)
    gathers = sum(costs.kinds[name].gather for name in graph.layers)
    assert parts[0]["communication"] == pytest.approx(2 * gathers, rel=0.02)  # and sums
    assert parts[1]["communication"] < gathers / 2  # the table has no compute


def test_megatrons_adapters_gather_where_products_are_pipelined() -> None:
    """NeMo pipelines none beside adapters; a row that says so gathers what they read apart."""
    split = {"framework": CORE, "n_gpus": 4, "tp": 4, "notes": "rank 8; targets all"}
    usual, pipelined = _run(**split), _run(**split, async_tp=1)
    assert (usual.framework.tensor_exposed, pipelined.framework.tensor_exposed) == (1.0, 0.029)
    mine = [
        [o.count for o in every if isinstance(o, Collective) and o.exposed]
        for every in (graph_of(run).kinds["block"].forward for run in (usual, pipelined))
    ]
    assert mine == [[], [2]]  # queries, keys and values; gate and up
    joint = replace(pipelined, framework=replace(pipelined.framework, gathers_for_adapters=False))
    waits = [
        price(graph_of(run), run.training, run.nodes, run.framework).kinds["block"].forward_waits
        for run in (pipelined, joint)
    ]
    whole = pipelined.training.sequence_length * pipelined.model.hidden * 2
    gathers = 2 * all_gather(whole, tensor_group(pipelined.strategy, pipelined.nodes))
    assert waits[0].collectives - waits[1].collectives == pytest.approx(gathers)
    assert _run(**split | {"adapter": ""}).framework.tensor_exposed == 0.029


def test_dropout_and_parts_apart_are_kept() -> None:
    plain, dropped = (
        graph_of(_run(notes=f"rank 8; targets all; lora dropout {p}")).kinds["block"]
        for p in (0.0, 0.1)
    )
    tokens, h, f = 1024, 2048, 5632
    assert dropped.saved - plain.saved == tokens * 3 * (6 * h + f)  # what each A reads, and a mask


def test_joined_adapters_read_their_input_once() -> None:
    notes = "rank 8; targets all"
    counts = [
        sum(one.name.endswith("adapters A") for one in graph_of(run).kinds["block"].forward)
        for run in (_run(notes=notes), _run(notes=notes, framework=CORE))
    ]
    assert counts == [7, 4]


def test_documents_are_sequences_of_their_own() -> None:
    whole, cut = (
        [one for one in graph_of(run).kinds["block"].forward if isinstance(one, Attention)]
        for run in (_run(), _run(notes="documents of 256 tokens"))
    )
    assert [one.length for one in cut] == [256]
    assert cut[0].flops == whole[0].flops / 4
    assert _seconds(_run(notes="documents of 256 tokens")) < _seconds(_run())


def test_an_old_desktops_link() -> None:
    two = {"n_gpus": 2, "global_batch": 2, "gpu": "RTX3090", "framework": "PyTorch FSDP"}
    new, old = _run(**two), _run(**two, notes="2x3090, older motherboard")
    assert old.nodes.intra_node.name == "PCIe 3.0 x8 through the host"
    assert _seconds(old) > _seconds(new)


def test_frozen_products_in_8_bits() -> None:
    """Frozen ones alone, and their weights are not cast."""
    sixteen, eight = (
        graph_of(_run(framework=CORE, gpu="H100", precision=precision)).kinds["block"]
        for precision in ("bf16", "fp8")
    )
    low = {one.name for one in eight.forward if isinstance(one, Gemm) and one.fp8}
    every = {one.name for one in sixteen.forward if isinstance(one, Gemm)}
    assert low == {name for name in every if "adapters" not in name}
    casts = [one for one in eight.forward if isinstance(one, Stream) and "to fp8" in one.name]
    read = {one.name: one.m * one.k for one in eight.forward if isinstance(one, Gemm)}
    assert {one.name: one.nbytes for one in casts} == {f"{n} to fp8": 3 * read[n] for n in low}


def test_products_in_nvfp4_are_those_in_8_bits() -> None:
    columns = ONE | {"framework": CORE, "gpu": "GB200"}
    eight, four = (run_of(row(**columns, precision=precision)) for precision in ("fp8", "fp4"))
    kinds = [graph_of(run).kinds["block"] for run in (eight, four)]
    for way in ("forward", "backward"):
        low = [[one for one in getattr(kind, way) if isinstance(one, Gemm)] for kind in kinds]
        assert [one.name for one in low[0] if one.fp8] == [one.name for one in low[1] if one.fp4]
        assert not any(one.fp8 for one in low[1])
        moved = [
            sum(o.nbytes for o in getattr(kind, way) if isinstance(o, Stream) and "fp8" in o.name)
            for kind in kinds
        ]
        assert moved[1] == pytest.approx(moved[0] * 5.125 / 4)
    head = graph_of(four).kinds["head"]
    assert not any(one.fp4 for one in (*head.forward, *head.backward) if isinstance(one, Gemm))
    large = columns | {"hidden": 8192, "seq_len": 8192}
    eight, four = (run_of(row(**large, precision=precision)) for precision in ("fp8", "fp4"))
    assert _seconds(four) < _seconds(eight)
    with pytest.raises(InputError, match="states no peak for fp4"):
        _seconds(run_of(row(**(columns | {"gpu": "H100"}), precision="fp4")))
