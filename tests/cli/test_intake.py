"""`bigplan import` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigplan.cli.app import app
from bigplan.cli.given import options_for
from bigplan.cli.options import ExperimentOptions
from bigplan.errors import InputError
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.intake.files import DEEPSPEED, FSDP

ARGUMENTS = ["--model", "llama-3-8b", "--cluster", "hgx-h200", "--seq-len", "4096"]
# For which better plans are found in a tenth of the time.
SMALLER = ["--model", "gpt2-xl", "--cluster", "rtx-4090x2-workstation", "--seq-len", "1024"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(DEEPSPEED.replace('"overlap_comm"', '"zero_quantized_weights"'))
    return str(path)


def test_it_says_what_runs_what_is_not_priced_and_where_time_goes(config: str) -> None:
    told = CliRunner().invoke(
        app, ["import", config, "--from", "deepspeed", *ARGUMENTS, "--no-better"]
    )
    assert told.exit_code == 0, told.output
    for text in (
        "by deepspeed",
        "It fits",
        "zero_quantized_weights",
        "Time by resource",
        "Memory of",
    ):
        assert text in told.stdout
    assert "The best plan" not in told.stdout


def test_what_is_faster_is_told_on_the_same_engine_and_on_any(config: str) -> None:
    asked = ["import", config, "--from", "deepspeed", *SMALLER, "--json"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert found["fits"]
    same = found["better"]["same_engine"]
    assert same["engine"] == "deepspeed"
    assert same["step_seconds"] <= found["step_seconds"]
    fastest = found["better"]["fastest"]
    assert fastest["engine"] == "native"
    assert fastest["step_seconds"] <= same["step_seconds"]
    assert sum(found["step_parts"][name] for name in ("compute", "update")) <= found["step_seconds"]


def test_what_does_not_fit_is_told_in_bytes(config: str) -> None:
    asked = ["import", config, "--from", "deepspeed", "--cluster", "h200-1x", *ARGUMENTS[:2]]
    told = CliRunner().invoke(app, [*asked, "--seq-len", "4096", "--no-better"])
    assert told.exit_code == 0
    assert "It does not fit" in told.stdout
    assert "GiB of host memory a node short" in told.stdout


def test_a_plan_that_fits_is_not_said_not_to(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, '
        '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    )
    asked = ["import", str(path), "--from", "deepspeed", "--model", "llama-3.2-3b"]
    told = CliRunner().invoke(
        app, [*asked, "--cluster", "rtx-4090x2-workstation", "--seq-len", "4096"]
    )
    assert told.exit_code == 0, told.output
    text = " ".join(told.stdout.split())
    assert "It does not fit" in text
    best = text.partition("The best plan of deepspeed: ")[2].partition("For the first")[0]
    assert "a step; it fits, what the file says does not." in best
    assert "this training" not in best
    command = text.partition("For the first: ")[2].partition(" --out plan.yaml")[0]
    assert command.startswith("bigplan plan --engine deepspeed --model llama-3.2-3b --cluster ")
    assert command.endswith("--seq-len 4096 --global-batch 16 --gradient-precision bf16")


def test_the_files_training_as_options() -> None:
    """Without those the plan would be of another training than the one that was promised."""
    training = Training(
        sequence_length=512, global_batch=8, clip_norm=None, fp8_gemms=True, dropout=0.1
    )
    cluster = find_cluster("dgx-h100").with_nodes(2)
    options = ExperimentOptions(model="gpt2-xl", cluster="my cluster.yaml", caps=["gpu=20GiB"])
    assert options_for(Request(find_model("gpt2-xl"), training, cluster), options) == (
        "--model gpt2-xl --cluster 'my cluster.yaml' --nodes 2 --cap gpu=20GiB --seq-len 512 "
        "--global-batch 8 --fp8-gemms --dropout 0.1 --clip-norm none"
    )


def test_what_is_missing_is_an_error_that_says_which_option(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(FSDP)
    asked = ["import", str(path), "--from", "accelerate", *ARGUMENTS]
    told = CliRunner().invoke(app, asked)
    assert isinstance(told.exception, InputError)
    assert "--set micro_batch=N and --global-batch N" in str(told.exception)
    told = CliRunner().invoke(app, [*asked, "--engine", "native"])
    assert "--engine" in str(told.exception)
    told = CliRunner().invoke(app, ["import", str(path), "--from", "accelerate", "--model", "x"])
    assert "--cluster" in str(told.exception)
