"""Advice appears where it is deserved, with its number, and not where it is not."""

from __future__ import annotations

from functools import cache

import pytest

from bigplan.errors import InputError
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan
from bigplan.program import Lane
from bigplan.recheck import promised_again
from bigplan.report.advice import (
    MUCH,
    Advice,
    advice_of,
    hiding_tokens,
    in_one_unit,
)
from bigplan.report.muon import directions_seconds, muon_advice, with_muon
from bigplan.report.operators import LAUNCHES, OperatorRow, operator_rows
from bigplan.report.text import seconds_text
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.wording import tells

LARGE = Training(sequence_length=1024, global_batch=32)


@cache
def planned(model: str, training: Training = LARGE, **dimensions: int) -> Plan:
    spec = find_model(model).model_copy(update=dimensions)
    settings: dict[str, str | int | float] = {"micro_batch": 8, "recompute": "none"}
    return make_plan(Request(spec, training, find_cluster("h200-1x"), settings))


def advised(plan: Plan) -> dict[str, Advice]:
    return {advice.about: advice for advice in advice_of(plan, operator_rows(plan))}


def test_gpt2s_vocabulary_is_padded_and_a_padded_one_is_not() -> None:
    plan = planned("gpt2-xl")
    advice = advised(plan)["vocab"]
    assert "from 50257 to 50304, a multiple of 64" in advice.text
    assert advice.gain > 0.05
    padded = planned("gpt2-xl", vocab=50304)
    assert "vocab" not in advised(padded)
    # What it says it saves is what planning the padded model saves.
    saved = 1 - padded.predicted.step_seconds / plan.predicted.step_seconds
    assert advice.gain == pytest.approx(saved, abs=0.01)


def test_a_model_that_is_there_keeps_its_shape() -> None:
    plan = planned("gpt2-xl")
    for given in ({"lora": {"rank": 8}}, {"weights": "somewhere"}):
        training = Training.model_validate(LARGE.model_dump() | given)
        tuned = plan.model_copy(update={"training": training})
        assert "vocab" not in {advice.about for advice in advice_of(tuned, operator_rows(plan))}


def test_a_pipeline_waits_for_the_head_of_its_last_stage() -> None:
    def piped(**dimensions: int) -> Plan:
        model = find_model("gpt2-xl").model_copy(update=dimensions)
        settings: dict[str, str | int | float] = {"pp": 8, "vpp": 2, "micro_batch": 1}
        return make_plan(Request(model, LARGE, find_cluster("dgx-a100-80g"), settings))

    plan, padded = piped(), piped(vocab=50304)
    saved = 1 - padded.predicted.step_seconds / plan.predicted.step_seconds
    assert saved > 0.2
    assert advised(plan)["vocab"].gain == pytest.approx(saved, abs=0.05)


def test_a_pipeline_with_ends_of_their_own_gains_what_its_busiest_stage_does() -> None:
    shape = {"layers": 13, "hidden": 1024, "ffn": 2777, "heads": 8, "kv_heads": 8, "head_dim": 128}

    def piped(**dimensions: int) -> Plan:
        spec = find_model("llama-like-3.3b").model_copy(update={**shape, **dimensions})
        training = LARGE.model_copy(update={"global_batch": 31})
        settings: dict[str, str | int | float] = {"pp": 4, "vpp": 1, "micro_batch": 1}
        return make_plan(Request(spec, training, find_cluster("rtx-a6000x4-workstation"), settings))

    plan = piped(vocab=50257)
    assert plan.strategy.last_blocks == 1  # beside a head that takes as long as eight blocks
    advice = advised(plan)
    for dimension, rounded in (("vocab", {"vocab": 50304}), ("ffn", {"ffn": 2784})):
        changed = piped(**{"vocab": 50257, **rounded})
        saved = 1 - changed.predicted.step_seconds / plan.predicted.step_seconds
        assert advice[dimension].gain == pytest.approx(saved, abs=0.01)


def test_narrow_heads_are_told_what_they_are_padded_to_and_whole_ones_are_not() -> None:
    long = Training(sequence_length=8192, global_batch=8)
    shape = {"max_sequence_length": 8192, "heads": 32, "kv_heads": 32}
    narrow = advised(planned("llama-like-3.3b", long, head_dim=80, **shape))["head_dim"]
    assert "head_dim 80 is computed as 96" in narrow.text
    assert "17% of attention's" in narrow.text
    assert "head_dim" not in advised(planned("llama-like-3.3b", long, head_dim=96, **shape))


def test_fp32_is_told_of_tensor_cores_and_bf16_is_not() -> None:
    small = Training(sequence_length=1024, global_batch=8, precision="fp32")
    assert "tensor cores idle" in advised(planned("llama-like-3.3b", small))["precision"].text
    assert "precision" not in advised(planned("llama-like-3.3b"))


def test_a_good_model_with_large_batches_needs_no_advice_but_fp8() -> None:
    plain, low = (
        planned("llama-like-3.3b", LARGE.model_copy(update={"fp8_gemms": on}))
        for on in (False, True)
    )
    advice = advised(plain)
    assert [*advice] == ["fp8_gemms"]
    assert "`--fp8-gemms`" in advice["fp8_gemms"].text
    saved = 1 - low.predicted.step_seconds / plain.predicted.step_seconds
    assert advice["fp8_gemms"].gain == pytest.approx(saved, abs=0.01)
    assert advised(low) == {}


def test_fp8_is_not_advised_where_it_would_not_run() -> None:
    assert "fp8_gemms" not in advised(planned("llama-like-3.3b", ffn=14344))


def test_short_kernels_are_told_and_long_ones_are_not() -> None:
    plan = planned("llama-like-3.3b")
    rows = [row for row in operator_rows(plan) if row.name != LAUNCHES]
    layers = sum(row.seconds for row in rows if row.of_layers)
    waits = OperatorRow("block", "forward", LAUNCHES, 1, 0.25 * layers, 0.0, 0.0, "latency")
    advice = {a.about: a for a in advice_of(plan, [*rows, waits])}
    assert "20% of forward and backward" in advice["micro_batch"].text
    assert "micro_batch" not in {a.about for a in advice_of(plan, rows)}


def row(where: str, phase: str, seconds: float) -> OperatorRow:
    return OperatorRow(where, phase, "x", 1, seconds, 0.0, 0.0, "transfer")


def waiting(plan: Plan, seconds: float) -> Plan:
    parts = plan.predicted.parts.model_copy(update={"waiting": seconds})
    predicted = plan.predicted.model_copy(update={"parts": parts, "step_seconds": 10.0})
    return plan.model_copy(update={"predicted": predicted})


def test_hiding_tokens_solve_the_lanes_for_the_batch() -> None:
    plan = planned("llama-like-3.3b")
    now = plan.training.tokens_per_step
    compute, fixed = row("block", "forward", 4.0), row(Lane.NVME_READ, "step", 6.0)
    growing = row(Lane.NVME_READ, "micro-batch", 1.0)
    other = row(Lane.H2D, "step", 5.0)
    found = hiding_tokens(plan, [compute, fixed, growing, other])
    assert found is not None
    lane, tokens = found
    assert lane == "nvme read"
    # 4 s of compute and 1 s of activations for `now` tokens: 4 t = 6 + 1 t.
    assert tokens == pytest.approx(2.0 * now)
    never = row(Lane.NVME_READ, "micro-batch", 5.0)
    assert hiding_tokens(plan, [compute, fixed, never]) is None
    assert hiding_tokens(plan, [compute]) is None


def test_too_few_tokens_are_told_and_enough_are_not() -> None:
    plan = waiting(planned("llama-like-3.3b"), 6.0)
    rows = [row("block", "forward", 4.0), row(Lane.NVME_READ, "step", 10.0)]
    advice = {a.about: a for a in advice_of(plan, rows, hiding_tokens(plan, rows))}
    text = advice["tokens_per_step"].text
    assert "now it is 32.77 k" in text
    assert "From 82 k tokens a step on" in text
    enough = [row("block", "forward", 11.0), row(Lane.NVME_READ, "step", 10.0)]
    hidden = hiding_tokens(plan, enough)
    assert "tokens_per_step" not in {a.about for a in advice_of(plan, enough, hidden)}


def test_in_one_unit_a_layer_is_moved_once_and_a_pipeline_stays_one() -> None:
    settings: dict[str, str | int | float] = {"parameters": "nvme", "accumulation_group": 1}
    request = Request(
        find_model("tiny-llama-demo"),
        LARGE,
        find_cluster("h200-1x"),
        {**settings, "micro_batch": 1},
    )
    plan = make_plan(request)
    together = in_one_unit(plan)
    assert together.strategy.units(plan.training) == 1

    def reads(rows: list[OperatorRow]) -> float:
        return sum(row.nbytes for row in rows if row.name == "read")

    units = plan.strategy.units(plan.training)
    assert reads(operator_rows(plan)) > 0.5 * units * reads(operator_rows(together)) > 0
    piped = plan.model_copy(update={"strategy": Strategy(dp=1, pp=2)})
    assert in_one_unit(piped) == piped


def test_drives_that_bind_are_told_with_the_rate_that_would_hide_them() -> None:
    plan = planned("llama-like-3.3b")
    busy = {Lane.NVME_READ: 8.0, Lane.COMPUTE: 4.0}
    path = {Lane.NVME_READ: 6.0, Lane.COMPUTE: 4.0}
    update = {
        "busy_seconds": busy,
        "critical_path": path,
        "bottleneck": Lane.NVME_READ,
        "step_seconds": 10.0,
    }
    bound = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})
    nvme = plan.cluster.group.nvme
    assert nvme is not None
    text = {a.about: a.text for a in advice_of(bound, [])}["drives"]
    assert tells(text, "6 s of its 10 s", "read", "8 s")
    assert f"{2 * nvme.node_read / 1e9:.2g} GB/s would hide" in text
    assert "drives" not in advised(plan)


def test_waiting_beside_an_idle_resource_is_told() -> None:
    plan = planned("llama-like-3.3b")
    path = {"gpu compute": 8.0, "cpu": 2.0}
    update = {"critical_path": path, "step_seconds": 10.0, "busy_seconds": {"cpu": 4.0}}
    slow = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})
    text = {a.about: a.text for a in advice_of(slow, [])}["waiting"]
    assert tells(text, "cpu", "20% of the step", "although", "40%")
    alone = slow.predicted.model_copy(update={"busy_seconds": {"cpu": 2.1}})
    held = slow.model_copy(update={"predicted": alone})
    text = {a.about: a.text for a in advice_of(held, [])}["waiting"]
    assert tells(text, "20% of the step", "nearly all the time that cpu works")
    assert "waiting" not in advised(plan)


def test_a_bubble_is_told_with_what_a_larger_batch_leaves() -> None:
    plan = planned("llama-like-3.3b", ffn=14344)  # which fp8 does not run
    piped = plan.model_copy(update={"strategy": Strategy(dp=1, pp=4)})
    parts = plan.predicted.parts.model_copy(update={"bubble": 2.0})
    predicted = plan.predicted.model_copy(update={"parts": parts, "step_seconds": 10.0})
    text = {
        a.about: a.text for a in advice_of(piped.model_copy(update={"predicted": predicted}), [])
    }["global_batch"]
    assert tells(text, "20% of the step", "32 units", "4 stages", "11%")
    assert "global_batch" not in advised(plan)


def test_the_largest_stake_comes_first() -> None:
    plan = planned("gpt2-xl")
    gains = [advice.gain for advice in advice_of(plan, operator_rows(plan))]
    assert len(gains) > 1
    assert gains == sorted(gains, reverse=True)


def test_idle_gpus_are_told_with_a_batch_that_splits_over_them() -> None:
    plan = planned("llama-like-3.3b")
    search = plan.search.model_copy(update={"idle_gpus": 2})
    idle = plan.model_copy(update={"search": search})
    advice = {a.about: a for a in advice_of(idle, [])}["idle_gpus"]
    assert advice.gain == pytest.approx(2 / 3)
    assert "2 of 3 GPUs are idle" in advice.text
    assert "--global-batch 33" in advice.text
    assert "idle_gpus" not in {a.about for a in advice_of(plan, [])}


@cache
def away() -> Plan:
    """A plan with state in host memory: one H200 held to 12 GiB."""
    cluster = find_cluster("h200-1x").with_caps(gpu=12 << 30)
    model = find_model("llama-like-3.3b").model_copy(update={"layers": 6})
    training = Training(sequence_length=1024, global_batch=8)
    return make_plan(Request(model, training, cluster, {"micro_batch": 8}))


def held_up_for(seconds: float, plan: Plan) -> Plan:
    path = {Lane.COMPUTE: 1.0, Lane.NVME_WRITE: seconds}
    predicted = plan.predicted.model_copy(update={"critical_path": path})
    return plan.model_copy(update={"predicted": predicted})


def test_muon_is_advised_where_it_can_pay() -> None:
    """Where its products take longer than all that state holds up it makes a step slower."""
    products = directions_seconds(away(), with_muon(away().training))
    (text,) = muon_advice(held_up_for(2 * products, away()))
    assert f"hold up for {seconds_text(2 * products)}" in text
    assert not [*muon_advice(held_up_for(0.9 * products, away()))]


def test_muon_is_not_advised_where_its_state_would_need_a_drive() -> None:
    """Muon's state is never on a drive: 8 B on an RTX 4090 runs with AdamW's there, not with it."""
    plan = held_up_for(9.0, away())
    assert [*muon_advice(plan)]
    host = next(use for use in plan.predicted.memory if use.tier is Tier.HOST)
    moved = host.by_purpose["optimizer"]
    drive = host.model_copy(update={"tier": Tier.NVME, "by_purpose": {"optimizer": moved}})
    full = host.model_copy(update={"used_bytes": host.capacity_bytes, "by_purpose": {}})
    others = [use for use in plan.predicted.memory if use is not host]
    memory = {"memory": (*others, full, drive)}
    predicted = plan.predicted.model_copy(update=memory)
    assert not [*muon_advice(plan.model_copy(update={"predicted": predicted}))]


@pytest.mark.parametrize("sequences", [8, 64])
def test_what_fp8_saves_is_what_the_plan_takes_with_it(sequences: int) -> None:
    """Of 8 sequences, whose compute the host's update outlasts, 6%; of 64 the 19% of compute."""
    model = find_model("llama-like-3.3b").model_copy(update={"layers": 6})
    training = Training(sequence_length=1024, global_batch=sequences)
    settings: dict[str, str | int | float] = {"micro_batch": 8, "optimizer": "host"}
    plan = make_plan(Request(model, training, find_cluster("h200-1x"), settings))
    eight = training.model_copy(update={"fp8_gemms": True})
    low = promised_again(plan.model_copy(update={"training": eight}))
    saved = 1 - low.predicted.step_seconds / plan.predicted.step_seconds
    advice = advised(plan).get("fp8_gemms")
    assert (advice.gain if advice else 0.0) == (saved if saved > MUCH else 0.0)


def test_without_room_fp8_saves_of_compute_what_holds_the_step_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(plan: Plan) -> Plan:
        raise InputError("needs more")

    plan = planned("llama-like-3.3b")
    whole = advised(plan)["fp8_gemms"].gain
    monkeypatch.setattr("bigplan.report.advice.promised_again", no_room)
    assert advised(plan)["fp8_gemms"].gain == pytest.approx(whole, abs=0.02)
    busy = plan.predicted.parts.compute + plan.predicted.parts.recompute
    path = {Lane.COMPUTE: busy / 2}
    half = plan.predicted.model_copy(update={"critical_path": path})
    gain = advised(plan.model_copy(update={"predicted": half}))["fp8_gemms"].gain
    assert gain == pytest.approx(whole / 2, abs=0.02)
