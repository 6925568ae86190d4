"""Plans are made on any system, and what needs Linux says so.

A process plays the other system: what Python lacks there is taken away before bigplan is imported.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# What the standard library has on neither system, and what it lacks on Windows besides.
LACKING = {
    "macOS": {"os": ["sched_getaffinity", "sched_setaffinity", "O_DIRECT", "posix_fallocate"]},
    "Windows": {
        "os": [
            *("sched_getaffinity", "sched_setaffinity", "O_DIRECT", "posix_fallocate", "getuid"),
            *("O_NONBLOCK", "O_CLOEXEC", "statvfs", "getloadavg", "fork", "killpg", "mkfifo"),
        ],
        "signal": ["SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM"],
        "": ["fcntl", "resource", "pwd", "grp"],
    },
}
PLAYED = """
import importlib, json, os, signal, sys
system, lacking, commands = json.loads(sys.argv[1])
for module in lacking.pop("", []):
    sys.modules[module] = None  # importing it fails
for module, names in lacking.items():
    for name in names:
        delattr(importlib.import_module(module), name)
import bigplan.system
bigplan.system.SYSTEM = system
if system == "Windows":
    bigplan.system.ENDING = (signal.SIGTERM,)
from bigplan.cli import main
for command in commands:
    sys.argv = ["bigplan", *command]
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    print("CODE", code, file=sys.stderr)
"""


def played(system: str, folder: Path, *commands: str) -> tuple[list[int], str]:
    """Exit codes of the commands there, and all that they print."""
    given = json.dumps((system, LACKING[system], [command.split() for command in commands]))
    ran = subprocess.run(
        [sys.executable, "-c", PLAYED, given],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = ran.stdout.splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("CODE")], ran.stdout


@pytest.mark.parametrize("system", LACKING)
def test_plans_are_made_and_explained(system: str, tmp_path: Path) -> None:
    plan = "plan --model tiny-llama-demo --cluster rtx-4090-workstation --out plan.yaml"
    codes, told = played(system, tmp_path, plan, "explain plan.yaml", "doctor")
    assert "Traceback" not in told
    assert codes == [0, 0, 0], told
    assert f"{system}: plans, reports and experiments work" in told


@pytest.mark.parametrize("system", LACKING)
def test_what_trains_and_measures_says_that_it_wants_linux(system: str, tmp_path: Path) -> None:
    arguments = {"launch": "plan.yaml", "evaluate": "run", "profile": "", "detect": ""}
    if system == "Windows":
        (tmp_path / "text.txt").write_text("A word.\n")
        arguments |= {"data prepare": "text.txt --out prepared", "clean": ""}
    commands = [f"{name} {more}" for name, more in arguments.items()]
    codes, told = played(system, tmp_path, *commands)
    assert codes == [2] * len(commands), told
    for name in arguments:
        assert f"`bigplan {name}` needs Linux, and this is {system}" in " ".join(told.split())
