"""Rows add up to what the plan promises, and say what each operator is."""

from __future__ import annotations

from functools import cache

import pytest

from bigplan.graph.operators import Attention, Gemm, Stream
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan
from bigplan.report.operators import (
    OperatorRow,
    operator_rows,
    tile_lost,
    uses_tensor_cores,
    wave_lost,
)
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.training import Training

MIB = 2**20
LAYERS = ("forward", "backward", "recompute")
CASES: dict[str, dict[str, str | int | float]] = {
    "resident": {"tp": 1, "pp": 1, "recompute": "none"},
    "recomputed": {"tp": 1, "pp": 1, "recompute": "full"},
    "selective": {"tp": 1, "pp": 1, "recompute": "selective"},
    "of the MLP": {"tp": 1, "pp": 1, "recompute": "mlp"},
    "tensor parallel": {"tp": 2, "pp": 1},
    "pipeline": {"pp": 2, "tp": 1},
    "sharded": {"zero": 3, "tp": 1, "pp": 1},
    "offloaded": {"parameters": "nvme", "activations": "host", "optimizer": "host"},
    "streamed": {"parameters": "host", "gradients": "host", "optimizer": "host", "streamed": 1},
}


@cache
def planned(case: str) -> Plan:
    training = Training(sequence_length=256, global_batch=16)
    one = case in ("offloaded", "streamed")
    cluster = find_cluster("h200-1x" if one else "dgx-h100")
    return make_plan(Request(find_model("tiny-llama-demo"), training, cluster, CASES[case]))


def by(rows: list[OperatorRow], *phases: str) -> float:
    return sum(row.seconds for row in rows if row.phase in phases)


@pytest.mark.parametrize("case", CASES)
def test_rows_add_up_to_the_plan_by_kind_of_action(case: str) -> None:
    plan = planned(case)
    rows, promised = operator_rows(plan), plan.predicted.op_seconds
    assert by(rows, "forward") == pytest.approx(promised["forward"])
    assert by(rows, "backward", "recompute") == pytest.approx(promised["backward"])
    for op, seconds in promised.items():
        if op not in ("forward", "backward"):
            named = sum(row.seconds for row in rows if row.name == op and not row.of_layers)
            assert named == pytest.approx(seconds), op


@pytest.mark.parametrize("case", ["recomputed", "selective", "of the MLP", "resident"])
def test_what_runs_again_is_told_apart(case: str) -> None:
    again = by(operator_rows(planned(case)), "recompute")
    assert (again > 0) == (case != "resident")


def test_moves_say_how_often_they_run_and_how_fast() -> None:
    plan = planned("offloaded")
    rows = [row for row in operator_rows(plan) if not row.of_layers]
    saves = next(row for row in rows if row.name == "save")
    assert saves.phase == "micro-batch"
    assert saves.bound == "transfer"
    blocks = plan.placement.stages[0].kinds["block"]
    away = [tiers.get(Tier.HOST, 0) for tiers in blocks.activations.values()]
    moved = sum(layers - 1 for layers in away)  # the last layer of each ring stays in it
    assert moved > 0
    assert saves.times == moved * plan.strategy.micro_batches(plan.training)
    (write,) = [row for row in rows if row.name == "write"]
    assert write.phase == "step"
    nvme = plan.cluster.group.nvme
    assert nvme is not None
    assert write.bandwidth is not None
    assert nvme.both_ways is not None  # which it shares with reads
    half = nvme.both_ways / 2
    assert 0.5 * half < write.bandwidth <= half


def test_state_that_passes_through_the_gpu_is_told_by_the_link_it_takes() -> None:
    plan = planned("streamed")
    rows = {(row.where, row.name): row for row in operator_rows(plan)}
    into, off = rows["host to device", "state_in"], rows["device to host", "state_out"]
    assert into.bound == off.bound == "transfer"
    assert into.phase == off.phase == "step"
    assert 12 * plan.model.parameter_count <= off.nbytes  # moments and master copy, at least
    assert rows["gpu update", "update"].bound == "memory"
    assert ("cpu", "update") not in rows


def test_every_number_is_possible() -> None:
    for case in CASES:
        plan = planned(case)
        gpu = plan.cluster.group.gpu
        for row in operator_rows(plan):
            assert row.seconds >= 0
            assert row.flops <= row.seconds * gpu.peak("bf16") * (1 + 1e-9)
            for share in (row.tile_lost, row.wave_lost, row.lost, row.of_peak):
                assert share is None or 0 <= share < 1
            if row.flops and row.of_layers:
                assert row.intensity is not None
                assert row.intensity > 0


@pytest.mark.parametrize(
    ("operator", "precision", "expected"),
    [
        (Gemm("x", 128, 64, 8), "bf16", True),
        (Gemm("x", 128, 64, 9), "bf16", True),  # with narrow loads
        (Gemm("x", 64, 50257, 64), "fp16", True),
        (Gemm("x", 128, 64, 9, batch=4), "bf16", False),  # without a figure of an A100
        (Gemm("x", 128, 64, 8), "fp32", False),
        (Attention("x", 1.0, head_dim=80), "bf16", True),
        (Attention("x", 1.0, head_dim=100), "bf16", True),  # padded
        (Attention("x", 1.0, head_dim=80), "fp32", False),
        (Stream("x", 1.0), "bf16", None),
    ],
)
def test_tensor_cores_are_told_as_the_price_has_them(
    operator: Gemm | Attention | Stream, precision: str, expected: bool | None
) -> None:
    gpu = find_cluster("dgx-a100-80g").group.gpu
    assert uses_tensor_cores(operator, gpu, precision) is expected


def test_a_cpu_has_no_tensor_cores() -> None:
    group = find_cluster("dgx-h100").group
    cpu = group.gpu.model_copy(update={"device": "cpu"})
    assert uses_tensor_cores(Gemm("x", 128, 64, 8), cpu, "bf16") is None
    assert isinstance(find_cluster("dgx-h100"), Cluster)


@pytest.mark.parametrize(
    ("m", "n", "lost"),
    [
        (256, 256, 0.0),
        (128, 256, 0.0),
        (256, 128, 0.0),  # the tile turned
        (128, 128, 0.5),  # half a tile
        (129, 256, 1 - 129 / 256),
        (1, 1, 1 - 1 / (128 * 256)),
    ],
)
def test_tiles_reach_beyond_the_matrix(m: int, n: int, lost: float) -> None:
    assert tile_lost(Gemm("x", m, n, 64)) == pytest.approx(lost)


@pytest.mark.parametrize(
    ("tiles", "lost"), [(100, 0.0), (200, 0.0), (101, 1 - 1.01 / 2), (50, 0.5)]
)
def test_the_last_wave_leaves_multiprocessors_idle(tiles: int, lost: float) -> None:
    assert wave_lost(Gemm("x", 256 * tiles, 128, 64), 100) == pytest.approx(lost)
    assert wave_lost(Gemm("x", 256, 128, 64, batch=tiles), 100) == pytest.approx(lost)
