"""The price against DeepSpeed 0.19.8 on H200 machines, none of whose runs went into it.

Hugging Face modules in benchmarks/peers, whose head takes a whole micro-batch at once; each beside
the cluster that `bigplan profile` measured there just before (benchmarks/results/clusters).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigplan.cost.price import price
from bigplan.engines.deepspeed.price import BEHAVIOUR, PricedStep, StagePricing
from bigplan.engines.deepspeed.search import DeepSpeedSearch, TriedWay
from bigplan.placement import Tier
from bigplan.planner import Request
from bigplan.program import Lane, Op
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.document import parse_document
from bigplan.spec.training import Training

MACHINES = Path(__file__).parents[3] / "benchmarks" / "results" / "clusters"
GIB = 2**30
ZERO2: dict[str, str | int | float] = {"zero": 2, "optimizer": "host", "micro_batch": 4}
# Machine, model, decisions, GPU it was held to; seconds a step, GiB of the host's memory at most.
RUNS = [
    ("2026-11-22-h200-lanes-2", "llama-like-5.5b", ZERO2, 24, 9.62, 102.7),
    ("2026-11-22-h200-one-at-a-time", "llama-like-5.5b", ZERO2, 24, 9.47, 104.4),
    ("2026-11-22-h200-rows-apart", "llama-like-3.3b", ZERO2, 16, 5.81, 60.8),
    (
        "2026-11-22-h200-drive",
        "llama-2-13b",
        {"zero": 3, "optimizer.host": 0.48, "micro_batch": 1},
        None,
        31.35,
        116.0,
    ),
    (
        "2026-11-22-h200-one-at-a-time",
        "llama-like-3.3b",
        {"zero": 3, "optimizer": "nvme", "parameters": "gpu", "micro_batch": 4},
        None,
        49.4,
        41.0,
    ),
]
OWN = 1.15, 1.13  # of time, of memory; memory counts Ray and a launch, which those runs had not


def measured_cluster(name: str) -> Cluster:
    """As it was measured; one rate that is known no more is left out."""
    lines = (MACHINES / f"{name}.yaml").read_text().splitlines()
    text = "\n".join(line for line in lines if "node_both_ways_beside_update" not in line)
    return parse_document(text, Cluster, name)


def tried(cluster: Cluster, model: str, settings: dict[str, str | int | float]) -> TriedWay:
    training = Training(sequence_length=4096, global_batch=16, gradient_precision="bf16")
    settings = {**settings, "recompute": "full", "loss_chunk": 65536}
    search = DeepSpeedSearch(
        Request(find_model(model), training, cluster, settings, engine="deepspeed")
    )
    part = settings.get("optimizer.host", 1.0) != 1.0
    (way,) = (way for way in search._ways() if (way.on_cpu < 1.0) == part)
    return search._fitted(way)


@pytest.mark.parametrize(("machine", "model", "settings", "gib", "seconds", "host"), RUNS)
def test_measured_runs_are_predicted(
    machine: str,
    model: str,
    settings: dict[str, str | int | float],
    gib: int | None,
    seconds: float,
    host: float,
) -> None:
    cluster = measured_cluster(machine)
    found = tried(cluster.with_caps(gpu=gib * GIB) if gib else cluster, model, settings)
    assert 1 / OWN[0] < found.step.seconds / seconds < OWN[0]
    used = {use.tier: use.used_bytes for use in found.memory}[Tier.HOST]
    assert 1 / OWN[1] < used / (host * GIB) < OWN[1]


def test_blocks_of_powers_of_two_do_not_fit_where_blocks_of_their_size_do() -> None:
    """5.5 B with torch's page-locking ended in the kernel's out-of-memory killer on an H200."""
    found = tried(find_cluster("h200-1x"), "llama-like-5.5b", ZERO2)
    assert not found.short
    search = DeepSpeedSearch(
        Request(
            find_model("llama-like-5.5b"),
            found.held.training,
            find_cluster("h200-1x"),
            engine="deepspeed",
        )
    )
    rounded = search.tried(replace(found.decisions, own_pinning=False))
    assert rounded.short[Tier.HOST] > 10 * GIB


def test_lanes_add_up_and_moves_follow_from_the_bytes() -> None:
    found = tried(find_cluster("h200-1x"), "llama-like-5.5b", ZERO2)
    parameters = find_model("llama-like-5.5b").parameter_count
    assert sum(found.step.by_lane().values()) == pytest.approx(found.step.seconds)
    assert found.step.timeline().seconds == pytest.approx(found.step.seconds)
    moved = found.step.moved()
    # Four micro-batches: 2 bytes down each, 4 more for the last; up 2 for all but the first, and
    # the parameters.
    assert moved[Lane.D2H] == pytest.approx((4 * 2 + 4) * parameters, rel=1e-6)
    assert moved[Lane.H2D] == pytest.approx((3 * 2 + 2) * parameters, rel=1e-6)


def test_many_micro_batches_are_priced_as_one_of_them_and_shown_one_by_one() -> None:
    nodes = find_cluster("h200-1x").group
    found = tried(find_cluster("h200-1x"), "llama-like-5.5b", {**ZERO2, "micro_batch": 1})
    costs, count = price(found.held.graph, found.held.training, nodes, BEHAVIOUR), 16
    pricing = StagePricing(found.held, costs, nodes)
    each = [pricing.micro_batch(i, last=i == count - 1) for i in range(count)]
    written_out = PricedStep((*(phase for one in each for phase in one), *pricing.update()))
    step = found.step
    assert isinstance(step, PricedStep)
    assert len(step.phases) < len(written_out.phases) / 4
    assert step.by_lane() == pytest.approx(written_out.by_lane())
    assert step.by_op() == pytest.approx(written_out.by_op())
    assert step.moved() == written_out.moved()
    shown = [(event.op, event.micro_batch) for event in step.timeline().events]
    assert shown == [(event.op, event.micro_batch) for event in written_out.timeline().events]
    assert shown[2:4] == [(Op.FORWARD, 1), (Op.BACKWARD, 1)]
