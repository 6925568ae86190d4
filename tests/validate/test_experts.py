"""How published runs with experts are configured, and which are skipped."""

from __future__ import annotations

import pytest

from bigplan.validate.configure import SkippedError, completed, run_of
from bigplan.validate.quality import group_quality
from bigplan.validate.rows import PublishedRow, read_rows
from bigplan.validate.score import score
from tests.validate.rows import row

QWEN: dict[str, object] = {
    "model_name": "Qwen3_30B_a3B",
    "layers": 48,
    "hidden": 2048,
    "ffn": 768,
    "seq_len": 4096,
    "vocab": 151936,
    "gated_mlp": 1,
    "moe": "experts:128,topk:8",
    "framework": "Megatron-Bridge 26.04",
    "gpu": "H100-80GB",
    "ep": 8,
}


def routed(**columns: object) -> PublishedRow:
    return row(**(QWEN | columns))


def test_experts_are_those_of_the_shipped_model_of_that_name() -> None:
    run = run_of(routed(tp=2))
    assert (run.model.experts, run.model.experts_per_token, run.model.qk_norm) == (128, 8, True)
    assert run.model.vocab == 152064  # to 128 for each of two ranks
    assert (run.strategy.ep, run.strategy.dp, run.strategy.expert_shards(folded=True)) == (8, 8, 2)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"model_name": "GPT OSS 12B"}, "not those of a shipped model"),
        ({"model_name": "qwen3-8b"}, "not those of a shipped model"),
        ({"layers": 4}, "layers differ from those of the shipped qwen3-30b-a3b"),
        ({"framework": "torchtitan"}, "other than Megatron Core run experts"),
        ({"ep": 3}, "ep 3 divides 128 experts"),
        ({"ep": 64}, "ep 64 divides 128 experts or a stage's 16 GPUs"),
        ({"moe": None}, "expert parallelism needs a model with experts"),
    ],
)
def test_what_is_skipped_says_why(columns: dict[str, object], reason: str) -> None:
    with pytest.raises(SkippedError, match=reason):
        run_of(routed(**columns))


SIZES: dict[str, dict[str, object]] = {
    "Qwen3_235B_a22B": {"layers": 94, "hidden": 4096, "ffn": 1536},
    "GPT OSS 120B": {"layers": 36, "hidden": 2880, "ffn": 2880},
    "DeepSeekV3": {"layers": 61, "hidden": 7168, "ffn": 2048},
}


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "release", "once", "beside", "whole"),
    [
        ("Qwen3_30B_a3B", "H100-80GB", "fp8", "25.11", False, True, False),
        ("Qwen3_30B_a3B", "H100-80GB", "fp8", "26.02.01", True, True, False),
        ("Qwen3_30B_a3B", "H100-80GB", "fp8", "26.08", True, False, False),
        ("Qwen3_30B_a3B", "GB200", "fp8", "26.04.01", True, False, False),
        ("Qwen3_30B_a3B", "GB200", "fp8", "26.06", True, True, True),
        ("Qwen3_30B_a3B", "GB200", None, "26.06", True, False, False),
        ("Qwen3_30B_a3B", "B200", "fp8", "26.06", True, False, False),
        ("Qwen3_30B_a3B", "B200", "fp8", "26.06.01", True, True, True),
        ("Qwen3_235B_a22B", "H100-80GB", "fp8", "26.02", False, True, False),
        ("Qwen3_235B_a22B", "H100-80GB", "fp8", "26.02.01", True, True, False),
        ("Qwen3_235B_a22B", "B200", "fp8", "25.11", False, True, False),
        ("Qwen3_235B_a22B", "B200", "fp8", "26.04.01", False, False, False),
        ("Qwen3_235B_a22B", "B300", "fp8", "26.04.01", True, False, False),
        ("DeepSeekV3", "H100-80GB", "fp8", "25.09", True, True, False),
        ("DeepSeekV3", "GB200", "fp8", "26.04", True, False, False),
        ("DeepSeekV3", "GB200", "fp8", "26.08", True, True, True),
        ("DeepSeekV3", "B200", "fp8", "26.04.01", True, True, False),
        ("GPT OSS 120B", "GB200", None, "26.04.01", False, True, False),
        ("GPT OSS 120B", "GB300", None, "26.04.01", False, False, False),
        ("GPT OSS 120B", "B300", "fp8", "26.06", True, False, False),
        ("GPT OSS 120B", "H100-80GB", "fp8", "24.01", False, False, False),
    ],
)
def test_runs_are_configured_as_the_recipe_of_their_release(
    model: str, gpu: str, precision: str | None, release: str, once: bool, beside: bool, whole: bool
) -> None:
    columns = {"model_name": model, "gpu": gpu, "precision": precision}
    named = columns | SIZES.get(model, {}) | {"framework": f"Megatron-Bridge {release}"}
    framework = run_of(routed(**named)).framework
    assert (framework.dispatches_once, framework.dispatches_beside) == (once, beside)
    assert (framework.fused_experts, framework.host == 0.0) == (whole, whole)
    attends = whole and (model, gpu) != ("DeepSeekV3", "GB200")
    assert framework.mxfp8_attention == attends


@pytest.mark.parametrize(
    ("framework", "notes", "once", "beside"),
    [
        ("Megatron-Core moe_dev(f3e6c5)", "dispatcher DeepEP", True, True),
        ("Megatron-Core main(1e057005)", "", False, False),
    ],
)
def test_other_runs_send_tokens_as_their_notes_say(
    framework: str, notes: str, once: bool, beside: bool
) -> None:
    found = run_of(routed(framework=framework, notes=notes)).framework
    assert (found.dispatches_once, found.dispatches_beside) == (once, beside)


@pytest.mark.parametrize(
    ("model", "gpu", "release", "again"),
    [
        ("GPT OSS 120B", "H100-80GB", "26.04", "selective"),
        ("GPT OSS 120B", "GB300", "26.04", "none"),
        ("GPT OSS 120B", "GB200", "26.04", "selective"),
        ("GPT OSS 120B", "GB200", "26.06", "none"),
        ("DeepSeekV3", "GB300", "26.04", "selective"),
        ("DeepSeekV3", "GB300", "26.06", "none"),
        ("DeepSeekV3", "GB200", "26.06", "selective"),
        ("Qwen3_235B_a22B", "GB200", "26.04", "none"),
    ],
)
def test_recipes_say_what_runs_again(model: str, gpu: str, release: str, again: str) -> None:
    columns = {"model_name": model, "gpu": gpu, "precision": "fp8"} | SIZES[model]
    run = run_of(routed(**columns, framework=f"Megatron-Bridge {release}"))
    assert run.execution.recompute == again


def test_runs_with_experts_have_one_virtual_stage_where_none_is_named() -> None:
    assert run_of(routed(pp=2)).execution.virtual_stages == 1
    assert run_of(routed(pp=2, vpp=12)).execution.virtual_stages == 12


@pytest.mark.parametrize(
    ("name", "layers", "counted"),
    [
        ("DeepSeekV3", 61, 62),  # with the layer that predicts a second token
        ("DeepSeekV3 (w/ MTP)", 61, 62),
        ("DeepSeekV3 (w/o MTP)", 61, 61),
        ("DeepSeekV2 cut to 4 layers", 4, 4),
    ],
)
def test_deepseek_s_rows_are_of_its_shipped_models(name: str, layers: int, counted: int) -> None:
    shape = {"hidden": 7168, "ffn": 2048} if "V3" in name else {"hidden": 5120, "ffn": 1536}
    run = run_of(routed(model_name=name, layers=layers, moe="experts:256,shared:1,MLA", **shape))
    assert run.model.latent_attention is not None
    assert (run.model.layers, run.model.dense_blocks) == (counted, 3 if "V3" in name else 1)
    assert run.model.shared_ffn == (2048 if "V3" in name else 3072)


def test_modules_run_again_as_the_notes_say() -> None:
    assert run_of(routed(recompute="selective")).selective == "core"
    told = "dispatcher DeepEP; recompute modules: norm, act; ETP=1"
    assert run_of(routed(recompute="selective", notes=told)).selective == "cheap"


def test_shipped_rows_with_experts_are_in_tables_of_their_own() -> None:
    """34 runs of Qwen3 30B and 235B are priced, 22 of DeepSeek-V2 and V3, 16 of GPT-OSS."""
    rows = [one for one in completed(read_rows()) if one.moe]
    scored = score(rows)
    found = group_quality(scored)
    assert set(found) == {
        *("all with experts", "experts, trust A", "experts, trust B"),
        *("mbridge, with experts", "moezoo, with experts", "simumax, with experts"),
    }
    assert [found[name].n for name in ("all with experts", "experts, trust A")] == [72, 22]
    priced = {one.id for one in scored if one.status == "scored"}
    known = ("Qwen3", "DeepSeek", "GPT OSS")
    assert all(one.model_name.startswith(known) for one in rows if one.id in priced)
    # What is known of such runs is worse than of dense ones, and stays within this.
    assert found["all with experts"].mape < 15
