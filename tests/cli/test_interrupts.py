"""Signals that ask a launch to end before its first step: a sentence and exit code 130, always."""

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


def stopped(folder: Path, script: str) -> str:
    """What a launch prints that a signal stops."""
    save_plan(tiny_plan(), folder / "plan.yaml")
    process = subprocess.run(
        [sys.executable, "-c", script, "launch", "plan.yaml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 130, process.stdout
    assert not (folder / "runs" / "tiny-llama-test-1").exists()
    return process.stdout


@pytest.mark.parametrize("module", ["bigplan.cli.app", "bigplan.launcher.driver"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_while_modules_are_imported(tmp_path: Path, module: str, name: str) -> None:
    told = stopped(tmp_path, AT.format(event="import", name=module, signal=name))
    assert told == f"bigplan: interrupted by {name}\n"


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
