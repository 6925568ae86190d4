"""`bigplan experiment`: from a file to results, and looking at them again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bigplan.launcher.lock import only_experiment
from tests.experiment.studies import BASE, SWEEP, study
from tests.wording import tells

Run = Callable[..., tuple[int, str, str]]


def test_run_and_compare(bigplan: Run, tmp_path: Path) -> None:
    path = study(tmp_path).path
    code, out, err = bigplan("experiment", "run", path, "--jobs", "1")
    assert (code, err) == (0, "")
    assert "3 points, 2 planned. Fastest: point 1 (global_batch=4)" in " ".join(out.split())
    assert "Point 2: " in out
    assert "Pareto" in out
    folder = Path("runs/study")
    assert (folder / "results.csv").is_file()
    code, shown, _ = bigplan("experiment", "compare", folder)
    assert code == 0
    assert "Nothing was measured yet" in shown
    code, text, _ = bigplan("experiment", "compare", folder, "--json")
    data = json.loads(text)
    assert code == 0
    assert (data["best"], len(data["points"])) == (1, 3)
    assert data["points"][0]["sweep"] == {"training.global_batch": 2}
    assert set(data["pareto"]) <= {0, 1}


def test_one_process_at_a_time_has_an_experiment(bigplan: Run, tmp_path: Path) -> None:
    path = study(tmp_path).path
    out = tmp_path / "out"
    (out / "points").mkdir(parents=True)
    with only_experiment(out):
        code, _, err = bigplan("experiment", "run", path, "--out", out)
    assert code == 2
    assert tells(err, str(out), "in use by an experiment", "wait until it ends")
    assert not (out / "experiment.json").exists()


def test_bad_input(bigplan: Run, tmp_path: Path) -> None:
    path = study(tmp_path).path
    path.write_text(path.read_text().replace("global_batch: [", "global_bach: ["))
    code, out, err = bigplan("experiment", "run", path)
    assert (code, out) == (2, "")
    assert tells(err, f"{path}:6:", "'global_bach'", "`training`", "'global_batch'")
    code, _, err = bigplan("experiment", "compare", tmp_path)
    assert code == 2
    assert "holds no experiment.json" in err
    code, _, err = bigplan("plan", study(tmp_path).path)
    assert code == 2
    assert "bigplan experiment run" in err


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """From outside, with processes that plan: none of them is left, none shows a traceback."""
    grid = "sweep: {grid: {training.seed: [" + ", ".join(map(str, range(200))) + "]}}\n"
    path = study(tmp_path, grid).path
    script = [sys.executable, "-c", "from bigplan.cli import main; main()"]
    command = [*script, "experiment", "run", str(path), "--jobs", "2", "--out", str(tmp_path / "o")]
    points = tmp_path / "o" / "points"
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            while not list(points.glob("*.json")) and process.poll() is None:
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
            _, err = process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    assert "Run the same again to go on." in err
    assert "Traceback" not in err
    kept = len(list(points.glob("*.json")))
    assert 0 < kept < 200


def test_dollars_and_days_of_a_plan(bigplan: Run, tmp_path: Path) -> None:
    study(tmp_path)
    small = ("--seq-len", "32", "--global-batch", "64", "--engine", "native", "--tokens", "1 B")
    arguments = ("plan", "--model", "tiny-llama-test", "--cluster", "dgx-h100", *small)
    code, out, err = bigplan(*arguments, "--nodes", "2", "--prefer", "cheapest")
    assert code == 0, err
    words = " ".join(out.split())
    assert "(1 node at 55.04 USD an hour and 10.2 kW)" in words
    assert "for 1 B tokens" in words
    assert "By number of nodes (the others idle)" in words
    code, text, _ = bigplan(*arguments, "--nodes", "2", "--prefer", "cheapest", "--json")
    data = json.loads(text)
    assert data["bill"]["nodes"] == 1
    assert [tried["nodes"] for tried in data["nodes_tried"]] == [1, 2]
    hours = data["bill"]["days"] * 24
    assert data["bill"]["dollars"] == pytest.approx(hours * 55.04)
    assert data["bill"]["kwh"] == pytest.approx(hours * 10.2)
    for more in (("--prefer", "cheapest"), ("--what-if",)):  # the fastest, too
        code, out, err = bigplan(*arguments, *more, "--within", "1 s")
        assert (code, out) == (3, "")
        assert "allow more" in err
        assert "note:" not in err  # adapters, or more memory, are no remedy for time
    assert bigplan(*arguments[:-2], "--within", "1 d")[0] == 2


def test_hardware_of_a_plan(bigplan: Run, tmp_path: Path) -> None:
    study(tmp_path, SWEEP, BASE)
    small = ("--model", "tiny-llama-test", "--seq-len", "32", "--global-batch", "4", "--json")
    options = ("--cluster", "rtx-4090-workstation", "--engine", "native", *small)
    plan = tmp_path / "plan.yaml"
    code, _, err = bigplan("plan", *options, "--hardware", "gpu=h200-sxm", "--out", plan)
    assert code == 0, err
    assert "name: NVIDIA H200" in plan.read_text()
    code, _, err = bigplan("plan", *options, "--hardware", "nvme.drive=4")
    assert code == 2
    assert "did you mean 'nvme.drives'" in err
