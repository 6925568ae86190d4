"""The command line from outside: exit codes, messages and JSON. Nobody ever sees a traceback."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigplan.plan import save_plan
from tests.cli.conftest import Run
from tests.tiny import tiny_plan, write_cluster
from tests.wording import tells

SMALL = ("--seq-len", "32", "--global-batch", "4", "--precision", "fp32")

KEYS = {
    "decision",
    "parameters",
    "trained_parameters",
    "groups_tried",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "step_seconds_overlapped",
    "step_seconds_serial",
    "tokens_per_second",
    "mfu",
    "lower_bound_seconds",
    "model_gap",
    "simulated_gap",
    "search_seconds",
    "search",
    "strategy",
    "stages",
    "memory",
    "bottleneck",
    "critical_path",
    "busy_seconds",
    "step_parts",
    "moved_bytes",
    "bill",
    "drives",
    "nodes_tried",
    "executable",
    "engine",
    "config",
    "runs_today",
    "alternatives",
    "what_if",
    "largest",
}


@pytest.fixture
def small(tmp_path: Path) -> tuple[object, ...]:
    """Arguments that plan a tiny model on a small machine."""
    return ("--model", "tiny-llama-test", "--cluster", write_cluster(tmp_path), *SMALL)


def planned(bigplan: Run, *arguments: object) -> Any:
    code, out, _ = bigplan("plan", *arguments, "--json")
    assert code == 0
    return json.loads(out)  # fails if anything else is printed


def test_json_holds_every_key_and_shares_add_up(bigplan: Run, small: tuple[object, ...]) -> None:
    data = planned(bigplan, *small)
    assert set(data) == KEYS | {"format"}
    assert set(data["strategy"]) >= {
        *("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "micro_batch", "accumulation_group")
    }
    assert data["step_seconds_low"] <= data["step_seconds"] <= data["step_seconds_high"]
    assert sum(stage["layers"] for stage in data["stages"]) == 2
    for stage in data["stages"]:
        assert set(stage) == {
            *("layers", "recompute", "placement", "homes", "streamed_fraction"),
        }
        assert sum(stage["recompute"].values()) == stage["layers"]
        assert set(stage["placement"]) == {"parameters", "gradients", "optimizer", "activations"}
        for tiers in stage["placement"].values():
            assert sum(tiers.values()) == pytest.approx(1.0)
    for use in data["memory"]:
        keys = ("stage", "tier", "scope", "used_bytes", "capacity_bytes", "by_purpose")
        assert set(use) == set(keys)
        assert use["used_bytes"] <= use["capacity_bytes"]
    assert set(data["executable"]) == {"native", "deepspeed"}


def test_options_win_over_the_file(bigplan: Run, tmp_path: Path) -> None:
    write_cluster(tmp_path)
    experiment = {
        "model": "tiny-llama-test",
        "cluster": "small.yaml",
        "training": {"sequence_length": 32, "global_batch": 4, "precision": "fp32"},
        "set": {"dp": 2, "zero": 1},
    }
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(experiment))
    assert planned(bigplan, "e.yaml")["strategy"]["zero"] == 1
    fixed = planned(bigplan, "e.yaml", "--set", "zero=0", "--set", "block.parameters=host")
    assert fixed["strategy"]["dp"] == 2
    assert fixed["strategy"]["zero"] == 0
    assert fixed["stages"][0]["placement"]["parameters"]["host"] > 0.5
    code, out, _ = bigplan("plan", "e.yaml", "--clip-norm", "none", "--out", "p.yaml")
    assert code == 0
    assert "Train tiny-llama-test" in out
    assert yaml.safe_load(Path("p.yaml").read_text())["training"]["clip_norm"] is None


def test_equal_inputs_give_equal_bytes(bigplan: Run, small: tuple[object, ...]) -> None:
    for name in ("a.yaml", "b.yaml"):
        assert bigplan("plan", *small, "--out", name)[0] == 0
    assert Path("a.yaml").read_bytes() == Path("b.yaml").read_bytes()


def test_simulate_replays_the_promise_and_writes_a_trace(
    bigplan: Run, small: tuple[object, ...]
) -> None:
    promised = planned(bigplan, *small, "--out", "plan.yaml")["step_seconds"]
    code, out, _ = bigplan("simulate", "plan.yaml", "--trace", "trace.json", "--json")
    assert code == 0
    assert json.loads(out)["step_seconds"] == pytest.approx(promised)
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {"X", "M"} == {event["ph"] for event in events}
    code, out, _ = bigplan("simulate", "plan.yaml")
    assert code == 0
    assert "gpu compute" in out


def test_what_does_not_fit_exits_3(bigplan: Run, small: tuple[object, ...]) -> None:
    caps = ("gpu=1MiB", "host=1MiB", "nvme=0")
    tight = ("--set", "zero=0", "--set", "dp=2", *(text for cap in caps for text in ("--cap", cap)))
    code, out, err = bigplan("plan", *small, *tight, "--json")
    assert (code, out) == (3, "")
    assert "short" in err
    assert "Smallest change" in err


def test_a_cap_that_limits_nothing_is_told(bigplan: Run, small: tuple[object, ...]) -> None:
    code, out, err = bigplan("plan", *small, "--cap", "gpu=999GiB", "--json")
    assert code == 0
    json.loads(out)
    (line,) = err.splitlines()
    assert tells(line, "warning", "gpu=999 GiB", "64 MiB per GPU")
    assert bigplan("plan", *small, "--cap", "gpu=64MiB", "--json")[2] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lama-3-8b", "--cluster", "dgx-h100"), "did you mean 'llama-3-8b'"),
        (("--model", "llama-3-8b"), "--cluster missing"),
        (("--model", "llama-3-8b", "--cluster", "nowhere.yaml"), "no such file"),
        (("--set", "tpp=8"), "did you mean 'tp'"),
        (("--set", "tp"), "write KEY=VALUE"),
        (("--set", "dp=7"), "satisfies dp=7"),
        (("--cap", "gpu=16"), "write the unit"),
        (("--cap", "gpu=16 parsecs"), "parsecs"),
        (("--cap", "gpu=1e400GiB"), "`caps.gpu`: '1e400GiB' is larger than anything there is"),
        (("--cap", "gpu=8GiB", "--cap", "gpu=4GiB"), "--cap says gpu=8GiB and gpu=4GiB"),
        (("--set", "tp=1", "--set", " tp = 2"), "--set says tp=1 and tp=2"),
        (("--cap", "ram=16GiB"), "ram"),
        (("--precision", "fp8"), "precision"),
        (("--nodes", "0"), "nodes"),
        (("--engine", "warp"), "engine"),
        (("--out", "no/such/folder/plan.yaml"), "does not exist"),
        (("--out", "."), "name a file in it"),
        (("missing.yaml",), "no such file"),
    ],
)
def test_bad_input_exits_2_and_says_what_to_do(
    bigplan: Run, small: tuple[object, ...], arguments: tuple[str, ...], message: str
) -> None:
    whole = arguments if "--model" in arguments else (*small, *arguments)
    code, out, err = bigplan("plan", *whole, "--json")
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: gpt2-xl\nclustre: h200-1x\n", r"e.yaml:2: "),
        ("model: gpt2-xl\ncluster: h200-1x\ncaps: {gpu: 16 GBits}\n", r"e.yaml:3: "),
        ("model: gpt2-xl\n cluster: h200-1x\n", "not YAML"),
        ("", "expected keys"),
    ],
)
def test_a_wrong_experiment_names_file_and_line(bigplan: Run, text: str, message: str) -> None:
    Path("e.yaml").write_text(text)
    for command in ("plan", "launch"):
        code, _, err = bigplan(command, "e.yaml")
        assert code == 2
        assert message in err


@pytest.mark.parametrize("command", ["simulate", "launch"])
def test_a_broken_plan_is_bad_input(bigplan: Run, command: str) -> None:
    save_plan(tiny_plan(), Path("plan.yaml"))
    text = Path("plan.yaml").read_text()
    for broken in (
        text.replace("seed: 0", "seed: 1"),
        text.replace("layers: 2\n", "layers: two\n"),
    ):
        Path("plan.yaml").write_text(broken)
        code, _, err = bigplan(command, "plan.yaml")
        assert code == 2
        assert "plan.yaml" in err


@pytest.mark.parametrize(
    "command", [("plan", "plan.yaml", "--seq-len", "64"), ("experiment", "run", "plan.yaml")]
)
def test_a_plan_is_no_experiment(bigplan: Run, command: tuple[str, ...]) -> None:
    save_plan(tiny_plan(), Path("plan.yaml"))
    code, out, err = bigplan(*command)
    assert (code, out) == (2, "")
    assert "plan.yaml is a plan already" in err
    assert "bigplan launch" in err
    assert "unknown key" not in err


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("report",), "the folder of a run or of an experiment"),
        (("launch", "--resume"), "the folder of a run, such as runs/my-model-1"),
        (("export", "--to", "out"), "or of one checkpoint"),
        (("data", "check"), "a folder that `bigplan data prepare` wrote"),
    ],
)
def test_a_folder_that_is_not_there(bigplan: Run, command: tuple[str, ...], named: str) -> None:
    if command[0] in ("export", "launch"):
        pytest.importorskip("torch")
        pytest.importorskip("safetensors")
        pytest.importorskip("ray")
    code, out, err = bigplan(*command, "nofile")
    assert (code, out) == (2, "")
    assert tells(err, "nofile", "no such file", str(Path.cwd()))
    assert named in err
    code, _, err = bigplan(*command, "x" * 300)
    assert code == 2
    assert "name too long; name " in err


def test_a_plan_is_not_replanned(bigplan: Run) -> None:
    save_plan(tiny_plan(), Path("plan.yaml"))
    code, _, err = bigplan("launch", "plan.yaml", "--seq-len", "64")
    assert code == 2
    assert "sequence_length cannot change" in err


def test_what_cannot_be_executed_is_refused(bigplan: Run) -> None:
    arguments = ("--model", "tiny-llama-test", "--cluster", "dgx-h100", "--global-batch", "8")
    assert bigplan("plan", *arguments, "--dropout", "0.1", "--out", "plan.yaml")[0] == 0
    code, _, err = bigplan("launch", "plan.yaml")
    assert code == 2
    assert "dropout 0.1" in err


def test_usage_errors_and_information(bigplan: Run) -> None:
    assert bigplan("plan", "--no-such-option")[0] == 2
    assert bigplan("nonsense")[0] == 2
    assert bigplan("report", "nowhere")[0] == 2
    code, out, _ = bigplan("--version")
    assert (code, out.startswith("bigplan 0.")) == (0, True)
    assert "llama-3-70b" in bigplan("models")[1]
    assert "rtx-4090-workstation" in bigplan("clusters")[1]
    assert json.loads(bigplan("schema")[1])["properties"]["training"]


def test_help_states_the_defaults(bigplan: Run) -> None:
    code, out, _ = bigplan("plan", "--help")
    assert code == 0
    assert "at most 8192" in out
    assert "4 Mi tokens" in out
    assert " ".join(out.replace("│", " ").split()).count("`launch` refuses") == 3


def test_help_fills_its_lines_and_tells_exit_codes_on_their_own(bigplan: Run) -> None:
    lines = [line.strip() for line in bigplan("experiment", "run", "--help")[1].splitlines()]
    assert any(line.endswith("results.csv, byte by byte.") and "Ctrl-C" in line for line in lines)
    assert any(line.startswith("Exit codes: 0, also where") for line in lines)


def test_missing_packages_name_the_extra(bigplan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigplan.installed.find_spec", lambda name: None)
    code, _, err = bigplan("launch", "whatever.yaml")
    assert code == 2
    assert "pip install 'bigplan[launch]'" in err


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("--help", {"torch", "ray", "pulp", "highspy"}),
        ("--version", {"pydantic", "yaml", "bigplan.cli.plan"}),
        ("clusters --json", {"bigplan.cli.plan", "bigplan.launcher"}),
    ],
)
def test_what_a_command_does_not_import(command: str, unneeded: set[str]) -> None:
    check = (
        "import sys\nfrom bigplan.cli import main\n"
        f"try: main()\nfinally: print('in vain:', {unneeded} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, *command.split()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.endswith("in vain: set()\n")
