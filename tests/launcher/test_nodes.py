"""Launches over two nodes of a Ray cluster, of which one is lost and comes back."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bigplan.cli.app import app
from bigplan.engines import make_plan
from bigplan.engines.unequal import planned
from bigplan.graph.told import strategy_text
from bigplan.launcher.driver import LaunchOptions, launch
from bigplan.launcher.leftovers import ListedLaunch
from bigplan.launcher.places import RUN_DIR
from bigplan.launcher.record import Asked, Record, read_record
from bigplan.launcher.resume import read_resumable
from bigplan.plan import Plan, save_plan
from bigplan.planner import Request
from bigplan.report.run_report import run_report
from bigplan.runtime.worker import NativeWorker
from bigplan.solve.search import unwatched
from bigplan.spec.catalog import find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.experiment import LaunchSpec
from bigplan.spec.mixed import choices
from bigplan.spec.training import Training
from tests.launcher import machines as module
from tests.launcher.fakes import quiet
from tests.launcher.machines import (
    Machines,
    Scripted,
    happening,
    machines,
    plan_of,
    two_nodes,
    uninterrupted,
)
from tests.runtime.harness import Run, started
from tests.tiny import small_cluster
from tests.wording import tells

ray = pytest.importorskip("ray")

STEPS, FIRST = 12, 8  # of the longest runs, and of one that another plan goes on with
Pins = dict[str, str | int | float]
# A device on each node, and two where nodes have groups of ranks: a rank takes a second to start.
PINS: Pins = {"dp": 2, "zero": 1, "micro_batch": 1}
IN_GROUPS: Pins = {"dp": 4, "zero": 3, "micro_batch": 1, "zero_group": 2}
# Sums of gradients in another order are an ulp or two of fp32 apart, 1e-7, and AdamW carries it on.
OTHER_LAYOUT = 1e-6


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By node, a folder of its own for its files of all runs."""
    folder = tmp_path_factory.mktemp("own")
    return {name: folder / name for name in "ab"}


def listed(own: Mapping[str, Path], name: str) -> Path:
    """A node's own list of the launches on it."""
    return own[name].with_name(f"{name}-state")


@pytest.fixture(scope="module")
def nodes(warm: None, own: dict[str, Path]) -> Iterator[Machines]:
    """They share no folder."""
    ray.cloudpickle.register_pickle_by_value(module)
    variables = {
        name: {RUN_DIR: str(folder), "XDG_STATE_HOME": str(listed(own, name))}
        for name, folder in own.items()
    }
    with machines(variables) as made:
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Uninterrupted runs by numbers of steps."""
    lengths = (FIRST, STEPS)
    plan = plan_of(STEPS, devices=1, **PINS)
    runs = uninterrupted(tmp_path_factory.mktemp("whole"), plan, lengths)
    return dict(zip(lengths, runs, strict=True))


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "script"
    folder.mkdir()
    monkeypatch.setattr(Scripted, "folder", folder)
    return folder


def run(
    nodes: Machines, folder: Path, out: Console | None = None, pins: Pins = PINS, **how: object
) -> Path:
    """A launch on both nodes, of a rank on each or two."""
    told = {"run_dir": str(folder), "address": nodes.address, "checkpoint_every": 2, **how}
    options = LaunchOptions(LaunchSpec.model_validate(told), asked=Asked(set=pins, nodes=2))
    devices = 1 if pins is PINS else 2
    return launch(plan_of(STEPS, devices=devices, **pins), options, out or quiet(), Scripted)


def losses(record: Record) -> list[float | None]:
    return [metric.loss for metric in record.metrics]


def stored(own: Mapping[str, Path], step: str) -> tuple[Path, Path]:
    """Where each node has the newest run's checkpoint of a step."""
    newest = (max(place.iterdir(), key=lambda path: path.stat().st_mtime) for place in own.values())
    first, second = (run / "checkpoints" / step for run in newest)
    return first, second


def gathered(own: Mapping[str, Path], step: str, folder: Path) -> Path:
    """The newest run's checkpoint of a step with the files of both nodes."""
    for each in stored(own, step):
        shutil.copytree(each, folder / step, dirs_exist_ok=True)
    return folder / step


def by_one_process(training: Training) -> Plan:
    model = find_model("tiny-llama-test")
    return make_plan(Request(model, training, small_cluster(1), engine="native"))


def gone_on(plan: Plan, checkpoint: Path, steps: int, folder: Path) -> list[float]:
    """Losses of so many steps after a checkpoint, by one process."""
    worker = NativeWorker(plan, 0, folder)
    try:
        worker.start(folder / "meeting", checkpoint)
        return [worker.step().loss for _ in range(steps)]
    finally:
        worker.close()


def shared_out() -> Plan:
    """Over both nodes as two groups, of which b is twice as fast."""
    one = two_nodes(devices=1).group.model_copy(update={"name": "a", "nodes": 1})
    peaks = {name: 2 * rate for name, rate in one.gpu.peak_flops.items()}
    bandwidth = 2 * one.gpu.memory_bandwidth
    gpu = one.gpu.model_copy(update={"peak_flops": peaks, "memory_bandwidth": bandwidth})
    cluster = Cluster(
        name="unlike", node_groups=(one, one.model_copy(update={"name": "b", "gpu": gpu}))
    )
    found = choices(cluster)[-1]
    training = plan_of(STEPS).training.model_copy(update={"global_batch": 12})
    pins: Pins = {"dp": 2, "zero": 1}
    request = Request(find_model("tiny-llama-test"), training, found, pins, "native")
    by_name = {group.name: group for group in cluster.node_groups}
    groups = [by_name[member.name] for member in found.members or ()]
    return planned(request, groups, (2, 1), unwatched)


def test_groups_of_nodes_share_a_batch_out_unequally(
    nodes: Machines, own: dict[str, Path], tmp_path: Path
) -> None:
    """As one process trains, which goes on from there with equal work."""
    plan = shared_out()
    assert [member.name for member in plan.cluster.members or ()] == ["b", "a"]
    assert [group.number for group in plan.strategy.replicas] == [1, 1]
    how = {"run_dir": str(tmp_path / "runs"), "address": nodes.address, "checkpoint_every": 2}
    options = LaunchOptions(LaunchSpec.model_validate({**how, "steps": 3}))
    record = read_record(launch(plan, options, quiet()))
    one = by_one_process(plan.training)
    with started(one, poison=False) as worker:
        alone = [worker.step().loss for _ in range(5)]
    assert losses(record) == pytest.approx(alone[:3], rel=OTHER_LAYOUT)
    saved = gathered(own, "step-000003", tmp_path)
    assert gone_on(one, saved, 2, tmp_path) == pytest.approx(alone[3:], rel=OTHER_LAYOUT)


def left_on(own: Mapping[str, Path], name: str) -> ListedLaunch:
    """Of a launch that was killed, on a node: what its rank there has put on the list."""
    run = own[name].with_name("killed")
    (run / "scratch").mkdir(parents=True)
    entry = ListedLaunch(host=socket.gethostname(), run=str(run), scratch=str(run / "scratch"))
    launches = listed(own, name) / "bigplan" / "launches"
    launches.mkdir(parents=True, exist_ok=True)
    (launches / "one.json").write_text(entry.model_dump_json())
    return entry


def test_nodes_that_share_no_folder_keep_their_own_files_and_fetch_others(
    nodes: Machines,
    whole: dict[int, Run],
    own: dict[str, Path],
    tmp_path: Path,
    scripted: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node is lost with the checkpoint under way and the other's rank killed; it comes back.

    Both nodes' ranks write their parts of the state; then one node goes on alone.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(Scripted, "script", ((6, 2, "both"),))
    monkeypatch.setattr(Scripted, "held_up", (5,))

    def both(processes: Mapping[int, int]) -> None:
        os.kill(processes[0], signal.SIGKILL)
        nodes.lose("b")
        nodes.add("b")

    told, killed = StringIO(), left_on(own, "b")
    out = Console(file=told, width=300)
    with happening(scripted, {"both": both}):
        folder = run(nodes, tmp_path / "runs", out, steps=FIRST)
    record = read_record(folder)
    assert losses(record) == whole[FIRST].losses
    assert [(lost.done, lost.back_to) for lost in record.summary.restarts] == [(5, 2)]
    assert record.summary.digest == whole[FIRST].finished.digest
    assert len(record.summary.plans) == 1
    assert tells(told.getvalue(), "node b (127.0.0.4)", "killed", str(killed.run))
    looked = CliRunner().invoke(app, ["clean", "--address", nodes.address, "--json"])
    assert looked.exit_code == 0, (looked.output, looked.exception)
    (removed,) = json.loads(looked.output)["leftovers"]
    assert (removed["node"], removed["run"]) == ("b (127.0.0.4)", killed.run)
    assert not Path(killed.scratch).exists()
    assert tells(told.getvalue(), "a, b each keep the checkpoint files")
    here, there = stored(own, "step-000008")
    for each in (here, there):
        assert {p.name for p in each.parent.iterdir()} == {"step-000006", "step-000008"}
    first, second = ({path.name for path in each.iterdir()} for each in (here, there))
    assert first & second == {"manifest.json"}
    assert [path.name for path in (folder / "checkpoints" / "step-000008").iterdir()] == [
        "manifest.json"
    ]
    alone = plan_of(STEPS, nodes=1, devices=1, micro_batch=1)
    before = read_resumable(folder)
    options = LaunchOptions(
        before.how.model_copy(update={"steps": STEPS, "checkpoint_keep": 9}), before
    )
    record = read_record(launch(alone, options, quiet()))
    assert record.summary.resumed == (2, FIRST)
    assert losses(record) == pytest.approx(whole[STEPS].losses, rel=OTHER_LAYOUT)
    assert second <= {path.name for path in here.iterdir()}


def piped() -> Plan:
    """For DeepSpeed: two stages on two nodes of a device each, with ZeRO 1."""
    cluster = two_nodes(devices=1)
    pins: Pins = {"pp": 2, "zero": 1, "micro_batch": 1}
    model, training = find_model("tiny-llama-test"), plan_of(STEPS).training
    return make_plan(Request(model, training, cluster, pins, "deepspeed"))


def test_deepspeeds_pipeline_over_nodes_that_share_no_folder_computes_what_the_native_engine_does(
    nodes: Machines, whole: dict[int, Run], own: dict[str, Path], tmp_path: Path
) -> None:
    """As from a shell; the native engine goes on with its checkpoint."""
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    save_plan(piped(), tmp_path / "plan.yaml")
    where = ["--address", nodes.address, "--run-dir", str(tmp_path / "runs"), "--steps", "3"]
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.yaml"), *where])
    assert done.exit_code == 0, done.output
    assert tells(done.output, "a, b each keep the checkpoint files")
    name = "step-000003"
    first, second = ({path.name for path in each.iterdir()} for each in stored(own, name))
    assert first & second == {"manifest.json"}  # each stage has layers of its own
    saved = gathered(own, name, tmp_path)
    record = read_record(tmp_path / "runs" / "tiny-llama-test-1")
    one = by_one_process(plan_of(STEPS).training)
    found = [*losses(record), *gone_on(one, saved, 1, tmp_path)]
    assert found == pytest.approx(whole[STEPS].losses[:4], rel=OTHER_LAYOUT)


def test_a_lost_node_is_planned_around_and_taken_in_again(
    nodes: Machines,
    whole: dict[int, Run],
    tmp_path: Path,
    scripted: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each node is a zero group and has all files, so the one that is left goes on alone.

    Of its first crew a rank dies as it starts. A group of its two ranks is ZeRO over all of them.
    """
    script = ((6, 4, "lose"), (-4, 2, "start"), (9, 2, "add"))
    monkeypatch.setattr(Scripted, "script", script)
    acts = {
        "lose": lambda _: nodes.lose("b"),
        "start": lambda processes: os.kill(processes[1], signal.SIGKILL),
        "add": lambda _: nodes.add("b"),
    }
    with happening(scripted, acts):
        record = read_record(run(nodes, tmp_path / "runs", pins=IN_GROUPS, elastic=True))
    assert record.summary.status == "finished"
    assert losses(record) == pytest.approx(whole[STEPS].losses, rel=OTHER_LAYOUT)
    (lost,) = record.summary.restarts  # what dies later is of a crew that has not started
    assert tells(lost.reason, "node b", "127.0.0.4", "2, 3", "step 6")
    assert (lost.done, lost.back_to) == (5, 4)
    plans = [(p.nodes, p.strategy.dp, p.strategy.zero_group) for p in record.summary.plans]
    assert plans == [(2, 4, 2), (1, 2, 0), (2, 4, 2)]
    # The last one once a checkpoint is complete, which step 9 begins.
    assert [p.after for p in record.summary.plans] == [0, 4, 9]
    screen = Console(record=True, width=300, file=StringIO())
    screen.print(run_report(record))
    alone = strategy_text(record.summary.plans[1].strategy)
    assert f"planned for 1 node: {alone}; " in screen.export_text()
