"""Launches over two nodes of a Ray cluster, of which one is lost and comes back."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bigplan.cli.app import app
from bigplan.engines import make_plan
from bigplan.engines.unequal import planned
from bigplan.launcher.driver import LaunchOptions, launch
from bigplan.launcher.leftovers import ListedLaunch
from bigplan.launcher.places import RUN_DIR
from bigplan.launcher.record import Asked, Record, read_record
from bigplan.launcher.resume import read_resumable
from bigplan.plan import Plan, save_plan
from bigplan.planner import Request
from bigplan.report.decision import strategy_text
from bigplan.report.run_report import run_report
from bigplan.solve.search import unwatched
from bigplan.spec.catalog import find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.experiment import LaunchSpec
from bigplan.spec.mixed import choices
from bigplan.spec.training import ValidationSpec
from tests.launcher import machines as module
from tests.launcher.fakes import quiet
from tests.launcher.machines import Machines, Scripted, happening, machines, plan_of, two_nodes
from tests.runtime.harness import started
from tests.tiny import small_cluster
from tests.wording import tells

ray = pytest.importorskip("ray")

STEPS = 16
Pins = dict[str, str | int | float]
PINS: Pins = {"dp": 4, "micro_batch": 1}
# Sums of gradients in another order are an ulp or two of fp32 apart, 1e-7, and AdamW carries it on.
OTHER_LAYOUT = 1e-6


@pytest.fixture(scope="module")
def nodes(warm: None) -> Iterator[Machines]:
    ray.cloudpickle.register_pickle_by_value(module)
    with machines() as made:
        yield made


@pytest.fixture(scope="module")
def whole(nodes: Machines, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The uninterrupted run."""
    return read_record(run(nodes, tmp_path_factory.mktemp("whole")))


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "script"
    folder.mkdir()
    monkeypatch.setattr(Scripted, "folder", folder)
    return folder


def run(
    nodes: Machines,
    folder: Path,
    out: Console | None = None,
    pins: Pins = PINS,
    **how: object,
) -> Path:
    told = {"run_dir": str(folder), "address": nodes.address, "checkpoint_every": 2, **how}
    options = LaunchOptions(LaunchSpec.model_validate(told), asked=Asked(set=pins, nodes=2))
    return launch(plan_of(STEPS, **pins), options, out or quiet(), Scripted)


def losses(record: Record) -> list[float | None]:
    return [metric.loss for metric in record.metrics]


@pytest.mark.parametrize("under_way", [False, True], ids=["written", "under way"])
def test_a_lost_node_is_planned_around_and_taken_in_again(
    nodes: Machines,
    whole: Record,
    tmp_path: Path,
    scripted: Path,
    monkeypatch: pytest.MonkeyPatch,
    under_way: bool,
) -> None:
    """A checkpoint that is under way is lost with the node: the run goes on from the one before."""
    monkeypatch.setattr(Scripted, "script", ((6, 4, "lose"), (9, 2, "add")))
    back_to = 2 if under_way else 4
    if under_way:
        monkeypatch.setattr(Scripted, "held_up", (5,))
    acts = {"lose": lambda _: nodes.lose("b"), "add": lambda _: nodes.add("b")}
    out = Console(file=StringIO(), width=300)
    with happening(scripted, acts):
        record = read_record(run(nodes, tmp_path / "runs", out, elastic=True))
    assert record.summary.status == "finished"
    assert losses(record)[:back_to] == losses(whole)[:back_to]
    assert losses(record) == pytest.approx(losses(whole), rel=OTHER_LAYOUT)
    (lost,) = record.summary.restarts
    assert tells(lost.reason, "node b", "127.0.0.4", "2, 3", "step 6")
    assert (lost.done, lost.back_to) == (5, back_to)
    assert [(p.nodes, p.strategy.dp) for p in record.summary.plans] == [(2, 4), (1, 2), (2, 4)]
    # The last one once a checkpoint is complete, which step 9 begins.
    assert [p.after for p in record.summary.plans] == [0, back_to, 9]
    screen = Console(record=True, width=300, file=StringIO())
    screen.print(run_report(record))
    alone = strategy_text(record.summary.plans[1].strategy)
    assert f"planned for 1 node: {alone}; " in screen.export_text()


def shared_out() -> Plan:
    """Over both nodes as two groups, of which b is twice as fast."""
    one = two_nodes().group.model_copy(update={"name": "a", "nodes": 1})
    peaks = {name: 2 * rate for name, rate in one.gpu.peak_flops.items()}
    bandwidth = 2 * one.gpu.memory_bandwidth
    gpu = one.gpu.model_copy(update={"peak_flops": peaks, "memory_bandwidth": bandwidth})
    cluster = Cluster(
        name="unlike", node_groups=(one, one.model_copy(update={"name": "b", "gpu": gpu}))
    )
    found = choices(cluster)[-1]
    training = plan_of(STEPS).training.model_copy(update={"global_batch": 12})
    pins: Pins = {"dp": 4, "zero": 1}
    request = Request(find_model("tiny-llama-test"), training, found, pins, "native")
    by_name = {group.name: group for group in cluster.node_groups}
    groups = [by_name[member.name] for member in found.members or ()]
    return planned(request, groups, (2, 1), unwatched)


def test_groups_of_nodes_share_a_batch_out_unequally(nodes: Machines, tmp_path: Path) -> None:
    """As one process trains; a plan with equal work goes on from there."""
    plan = shared_out()
    assert [member.name for member in plan.cluster.members or ()] == ["b", "a"]
    assert [group.number for group in plan.strategy.replicas] == [2, 2]
    how = {"run_dir": str(tmp_path / "runs"), "address": nodes.address, "checkpoint_every": 2}
    options = LaunchOptions(LaunchSpec.model_validate({**how, "steps": 3}))
    record = read_record(launch(plan, options, quiet()))
    request = Request(plan.model, plan.training, small_cluster(1), engine="native")
    with started(make_plan(request), poison=False) as worker:
        alone = [worker.step().loss for _ in range(5)]
    assert losses(record) == pytest.approx(alone[:3], rel=OTHER_LAYOUT)
    before = read_resumable(record.folder)
    more = LaunchOptions(before.how.model_copy(update={"steps": 5}), before)
    equal = make_plan(replace(request, cluster=two_nodes()))
    resumed = read_record(launch(equal, more, quiet()))
    assert losses(resumed) == pytest.approx(alone, rel=OTHER_LAYOUT)


def test_two_faults_at_once_and_one_while_it_starts_again(
    nodes: Machines, whole: Record, tmp_path: Path, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost and a rank of the other killed; of the next crew a rank dies as it starts."""
    monkeypatch.setattr(Scripted, "script", ((6, 4, "both"), (-4, 4, "start")))

    def both(processes: Mapping[int, int]) -> None:
        os.kill(processes[0], signal.SIGKILL)
        nodes.lose("b")
        nodes.add("b")

    def start(processes: Mapping[int, int]) -> None:
        os.kill(processes[1], signal.SIGKILL)

    with happening(scripted, {"both": both, "start": start}):
        record = read_record(run(nodes, tmp_path / "runs"))
    assert losses(record) == losses(whole)
    faults = [(lost.done, lost.back_to) for lost in record.summary.restarts]
    assert faults == [(5, 4)]  # the second one is before the crew has started
    assert record.summary.digest == whole.summary.digest
    assert len(record.summary.plans) == 1


@pytest.fixture(scope="module")
def own(nodes: Machines, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both nodes started again, each with a folder of its own for its files of all runs.

    And with a list of its own of the launches on it.
    """
    folder = tmp_path_factory.mktemp("own")
    for name in "ab":
        nodes.lose(name)
        listed = {"XDG_STATE_HOME": str(folder / f"{name}-state")}
        nodes.variables[name] = {RUN_DIR: str(folder / name), **listed}
        nodes.add(name)
    return {name: folder / name for name in "ab"}


def left_on(own: Mapping[str, Path], name: str) -> ListedLaunch:
    """Of a launch that was killed, on a node: what its rank there has put on the list."""
    run = own[name].with_name("killed")
    (run / "scratch").mkdir(parents=True)
    entry = ListedLaunch(host=socket.gethostname(), run=str(run), scratch=str(run / "scratch"))
    listed = own[name].with_name(f"{name}-state") / "bigplan" / "launches" / "one.json"
    listed.parent.mkdir(parents=True)
    listed.write_text(entry.model_dump_json())
    return entry


def stored(own: Mapping[str, Path], step: str) -> tuple[Path, Path]:
    """Where each node has the newest run's checkpoint of a step."""
    newest = (max(place.iterdir(), key=lambda path: path.stat().st_mtime) for place in own.values())
    first, second = (run / "checkpoints" / step for run in newest)
    return first, second


def test_nodes_that_share_no_folder_keep_their_own_files_and_fetch_others(
    nodes: Machines,
    whole: Record,
    own: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both nodes' ranks write their parts of the state; then one node goes on alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    told, killed = StringIO(), left_on(own, "b")
    out = Console(file=told, width=300)
    folder = run(nodes, tmp_path / "runs", out, pins={**PINS, "zero": 1}, steps=8)
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
    alone = plan_of(STEPS, nodes=1, dp=2, micro_batch=1)
    before = read_resumable(folder)
    options = LaunchOptions(
        before.how.model_copy(update={"steps": STEPS, "checkpoint_keep": 9}), before
    )
    record = read_record(launch(alone, options, quiet()))
    assert record.summary.resumed == (8,)
    assert losses(record) == pytest.approx(losses(whole), rel=OTHER_LAYOUT)
    assert second <= {path.name for path in here.iterdir()}


def test_a_zero_group_on_each_node_outlives_the_loss_of_the_other(
    nodes: Machines,
    whole: Record,
    own: dict[str, Path],
    tmp_path: Path,
    scripted: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each node has all files of a checkpoint, so the one that is left goes on without any other.

    Its two ranks are one zero group, which is ZeRO over all of them.
    """
    monkeypatch.setattr(Scripted, "script", ((6, 4, "lose"),))
    pins: Pins = {**PINS, "zero": 3, "zero_group": 2}
    with happening(scripted, {"lose": lambda _: nodes.lose("b")}):
        record = read_record(run(nodes, tmp_path / "runs", pins=pins, elastic=True, steps=8))
    nodes.add("b")
    (lost,) = record.summary.restarts
    assert (lost.done, lost.back_to) == (5, 4)
    plans = [(p.strategy.dp, p.strategy.zero_group) for p in record.summary.plans]
    assert plans == [(4, 2), (2, 0)]
    assert losses(record) == pytest.approx(losses(whole)[:8], rel=OTHER_LAYOUT)


def piped() -> Plan:
    """For DeepSpeed: two stages on two nodes of a device each, with ZeRO 1."""
    wide = two_nodes().group.model_copy(update={"gpus_per_node": 1})
    cluster = Cluster(name="two-singles", node_groups=(wide,)).with_nodes(2)
    pins: Pins = {"pp": 2, "zero": 1, "micro_batch": 1}
    model, training = find_model("tiny-llama-test"), plan_of(STEPS).training
    return make_plan(Request(model, training, cluster, pins, "deepspeed"))


def evaluated(steps: int, weights: str | None = None) -> float:
    """What the native engine's validation says after so many steps, from these weights on."""
    checks = ValidationSpec(data="bundled", every=1, batches=1)
    training = plan_of(STEPS).training.model_copy(update={"validation": checks, "weights": weights})
    request = Request(find_model("tiny-llama-test"), training, small_cluster(1), engine="native")
    with started(make_plan(request), poison=False) as worker:
        for _ in range(steps):
            worker.step()
        return worker.evaluate()


def test_deepspeeds_pipeline_over_nodes_that_share_no_folder_computes_what_the_native_engine_does(
    nodes: Machines, whole: Record, own: dict[str, Path], tmp_path: Path
) -> None:
    """As from a shell: launched, exported, and gone on with by the native engine on one node."""
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    save_plan(piped(), tmp_path / "plan.yaml")
    where = ["--address", nodes.address, "--run-dir", str(tmp_path / "runs"), "--steps", "3"]
    done = CliRunner().invoke(app, ["launch", str(tmp_path / "plan.yaml"), *where])
    assert done.exit_code == 0, done.output
    assert tells(done.output, "a, b each keep the checkpoint files")
    folder, name = tmp_path / "runs" / "tiny-llama-test-1", "step-000003"
    here, there = stored(own, name)
    first, second = ({path.name for path in each.iterdir()} for each in (here, there))
    assert first & second == {"manifest.json"}  # each stage has layers of its own
    for each in (here, there):
        shutil.copytree(each, tmp_path / name, dirs_exist_ok=True)
    exported = str(tmp_path / "exported")
    done = CliRunner().invoke(app, ["export", str(tmp_path / name), "--to", exported])
    assert done.exit_code == 0, done.output
    assert evaluated(0, exported) == pytest.approx(evaluated(3), rel=OTHER_LAYOUT)
    before = read_resumable(folder)
    alone, how = plan_of(STEPS, nodes=1, dp=2, micro_batch=1), {"steps": 4}
    options = LaunchOptions(before.how.model_copy(update=how), before)
    record = read_record(launch(alone, options, quiet()))
    assert losses(record) == pytest.approx(losses(whole)[:4], rel=OTHER_LAYOUT)
    assert second <= {path.name for path in here.iterdir()}  # fetched from the other node
