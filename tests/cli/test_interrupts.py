"""Signals that ask a launch to end before its first step, or another command: a sentence and exit
code 130, always.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigplan.plan import save_plan
from tests.tiny import tiny_plan
from tests.wording import tells

# A hook that Python calls at every import and at every start of a process.
AT = """
import os, signal, sys
from bigplan.cli import main

def hit(event, arguments):
    if event == {event!r} and os.path.basename(arguments[0]) == {name!r}:
        os.kill(os.getpid(), signal.{signal})

sys.addaudithook(hit)
main()
"""
# From here on Ray's C++ is loaded, which has handlers of its own and a timer that aborts.
CONNECTED = """
import os, signal
import pytest
from ray._private import worker
from bigplan.cli import main
from tests.launcher.warm import without_dashboard

connect = worker.connect

def connected(*arguments, **options):
    connect(*arguments, **options)
    os.kill(os.getpid(), signal.SIGTERM)

worker.connect = connected
without_dashboard(pytest.MonkeyPatch())
try:
    main()
finally:
    print("aborts in", signal.getitimer(signal.ITIMER_REAL)[0])
"""


def stopped(folder: Path, script: str, *command: str) -> str:
    """What a command prints that a signal stops; a launch, if none is named."""
    save_plan(tiny_plan(), folder / "plan.yaml")
    process = subprocess.run(
        [sys.executable, "-c", script, *(command or ("launch", "plan.yaml"))],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 130, process.stdout
    assert not (folder / "runs" / "tiny-llama-test-1").exists()
    return process.stdout


@pytest.mark.parametrize(
    "module", ["bigplan.cli.app", "bigplan.cli.options", "bigplan.launcher.driver"]
)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_while_modules_are_imported(tmp_path: Path, module: str, name: str) -> None:
    told = stopped(tmp_path, AT.format(event="import", name=module, signal=name))
    assert told == f"bigplan: interrupted by {name}\n"


@pytest.mark.parametrize("command", [("validate",), ("clusters",), ("explain", "plan.yaml")])
def test_while_a_command_without_an_answer_to_keep_works(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """It reads a file, or prints: told once, whatever it was at."""
    name = {"validate": "measured.csv", "clusters": "dgx-h100.yaml"}.get(command[0], "plan.yaml")
    told = stopped(tmp_path, AT.format(event="open", name=name, signal="SIGINT"), *command)
    assert told == "bigplan: interrupted by SIGINT\n"


def test_while_rays_processes_start(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    told = stopped(tmp_path, AT.format(event="subprocess.Popen", name="raylet", signal="SIGHUP"))
    (line,) = told.splitlines()[1:]
    assert tells(line, "before the first step", "nothing")


def test_when_ray_has_just_started(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    _, *told = stopped(tmp_path, CONNECTED).splitlines()
    line, within = told
    assert tells(line, "before the first step", "nothing")
    assert within == "aborts in 0.0"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_what_is_half_written_does_not_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("some text")
    before = {"a.txt", "plan.yaml"}
    script = AT.format(event="open", name="tokens.bin", signal=name)
    told = stopped(tmp_path, script, "data", "prepare", "a.txt", "--out", "out")
    assert told == f"bigplan: interrupted by {name}\n"
    assert {path.name for path in tmp_path.iterdir()} == before
