"""What `launch/` starts bigplan with on Slurm, Kubernetes and machines reached by SSH."""

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from bigplan.cli.given import RUN_KEYS

LAUNCH = Path(__file__).parent.parent.parent / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
SLURM = LAUNCH / "slurm.sh"


def pinned(package: str) -> str:
    lines = (LAUNCH.parent / "constraints.txt").read_text().splitlines()
    (version,) = (line.split("==")[1] for line in lines if line.startswith(f"{package}=="))
    return version


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    found = subprocess.run(
        ["shellcheck", "--severity=warning", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout


def test_the_kubernetes_job() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay-rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned("ray")
    assert cluster["authOptions"] == {"mode": "token"}  # the operator sets both variables
    options_are_known(spec["entrypoint"])
    assert option(spec["entrypoint"], "--interface")  # a launch over two nodes is refused without
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    images = set()
    for pod in pods:
        (container,) = pod["containers"]
        images.add(container["image"])
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert mounts["runs"] == option(spec["entrypoint"], "--run-dir")
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert len(images) == 1


def test_the_cluster_of_machines_reached_by_ssh() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load((LAUNCH / "ray-cluster.yaml").read_text())
    whole = util.prepare_config(json.loads(json.dumps(config)))  # with Ray's own defaults
    util.validate_config(whole)
    (kind,) = whole["available_node_types"].values()
    assert kind["min_workers"] == 1
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
    assert any(f"ray[default]=={pinned('ray')}" in line for line in config["setup_commands"])
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert all(
            line.startswith("RAY_AUTH_MODE=token ")
            for line in config[commands]
            if "ray start" in line
        )


def options_are_known(command: str) -> None:
    """It is a launch, and all its options are."""
    words = command.split()
    assert words[:2] == ["bigplan", "launch"]
    given = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    assert given
    assert given <= {*RUN_KEYS, "resume"}


def option(command: str, flag: str) -> str:
    words = command.split()
    return words[words.index(flag) + 1]


# Slurm's commands for one machine: srun runs what it is told, on every node that it is told.
STUBS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "hostname": '[ "$1" = --ip-address ] && echo 127.0.1.1 || echo fe80::1 10.0.0.1',
    "srun": """
        while case "$1" in --*) ;; *) false ;; esac; do
            case "$1" in --nodelist=*|--exclude=*) where="$1" ;; esac; shift
        done
        said="$(echo "$where $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $SLURM_CPU_BIND $*" | tr '\\n' ' ')"
        echo "$said" >> "$LOG"  # a line at once: nodes are started side by side
        exec "$@" """,
    "ray": """
        trap 'echo "ended $2" >> "$LOG"; exit 0' TERM
        [ "$2" != --head ] || : > "$LOG.head"
        [ "$2" = --head ] || : > "$LOG.workers"
        for _ in {1..1200}; do sleep 0.05; done""",
    "python3": """
        case "$2" in *secrets*) echo 0123456789abcdef; exit ;; esac
        if [ "$4" = 1 ]; then [ -e "$LOG.head" ]; else [ -e "$LOG.workers" ]; fi""",
    "bigplan": """
        trap 'echo stopped >> "$LOG"; exit 130' TERM
        [ "$RUNS" = long ] || exit 5
        : > "$LOG.runs"
        for _ in {1..1200}; do sleep 0.05; done""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment with Slurm's commands, Ray and bigplan, none of them real."""
    for name, text in STUBS.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{text.strip()}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    paths = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    return {**os.environ, **job, "PATH": paths, "LOG": str(tmp_path / "log")}


@contextmanager
def started(slurm: dict[str, str], **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script; after the block none of its processes is left."""
    words = ["bash", str(SLURM), "plan.yaml", "--run-dir", "/shared/my runs"]
    with subprocess.Popen(words, env=slurm | more, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_slurm_starts_ray_on_all_nodes_with_one_token_and_tells_the_runs_end(
    slurm: dict[str, str],
) -> None:
    with started(slurm, RUNS="fails") as process:
        assert process.wait(60) == 5
    lines = Path(slurm["LOG"]).read_text().splitlines()
    calls = [line for line in lines if " ray start " in line or " bigplan " in line]
    assert all(line.split()[1:4] == ["token", "16", "none"] for line in calls)
    assert [line.split()[0] for line in calls] == [
        "--nodelist=node1",
        "--exclude=node1",
        "--nodelist=node1",
    ]
    head, worker, run = (line.split(maxsplit=4)[4] for line in calls)
    assert head.startswith("ray start --head --block --node-ip-address=10.0.0.1 --port=6379 ")
    assert worker.strip() == "ray start --address=10.0.0.1:6379 --block"
    assert run.startswith("bigplan launch plan.yaml --address 10.0.0.1:6379 --run-dir ")
    options_are_known(run)


def test_slurms_warning_stops_the_run_and_then_ray(slurm: dict[str, str]) -> None:
    log = Path(slurm["LOG"])
    with started(slurm, RUNS="long") as process:
        until(Path(f"{log}.runs").exists)
        until(lambda: catches(process.pid, signal.SIGTERM))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        until(lambda: "ended --head" in log.read_text().splitlines())
    assert "stopped" in log.read_text().splitlines()


def catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.02)
