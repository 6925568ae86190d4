"""Plans for fewer nodes, and runs that change them, without Ray."""

import re
import socket
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bigplan.errors import InputError, LostError, NodeLostError, WorkerError
from bigplan.graph.told import strategy_text
from bigplan.launcher import elastic, head
from bigplan.launcher.driver import LaunchOptions, launch
from bigplan.launcher.elastic import planned_for
from bigplan.launcher.failures import node_lost
from bigplan.launcher.head import RayHead
from bigplan.launcher.journal import Journal
from bigplan.launcher.launched import Launched
from bigplan.launcher.nodes import Node, answering
from bigplan.launcher.record import Asked, read_asked, read_record
from bigplan.launcher.session import Session
from bigplan.plan import Plan
from bigplan.runtime.result import StepResult
from bigplan.spec.experiment import LaunchSpec
from tests.launcher.fakes import Fake, quiet, without_ray
from tests.launcher.machines import plan_of

__all__ = ["without_ray"]
PINS: dict[str, str | int | float] = {"dp": 4, "micro_batch": 1}


def test_fewer_nodes_have_fewer_copies() -> None:
    plan, asked = plan_of(3, **PINS), Asked(set=PINS, nodes=2)
    found = planned_for(plan, asked, 1)
    assert found is not None
    assert (found.plan.cluster.nodes, found.plan.strategy.dp) == (1, 2)
    assert found.plan.training == plan.training
    back = planned_for(found.plan, asked, 5)  # more than were asked for
    assert back is not None
    assert back.plan == plan


def test_decisions_that_no_node_alone_can_keep() -> None:
    plan = plan_of(3, **PINS)
    pinned = Asked(set={"tp": 4}, nodes=2)
    assert planned_for(plan, pinned, 1) is None
    odd = planned_for(plan, Asked(set={"dp": 3}, nodes=2), 1)  # no half of three
    assert odd is not None


@pytest.mark.parametrize(("groups", "nodes"), [(2, 1), (3, 2)])
def test_zero_groups_that_fewer_ranks_cannot_have_are_left_out(groups: int, nodes: int) -> None:
    """One node's two ranks are one such group; four ranks are no groups of three."""
    training = plan_of(3).training.model_copy(update={"global_batch": 12})
    plan = plan_of(3).model_copy(update={"training": training})
    pins = {"dp": 6, "micro_batch": 1, "zero": 3, "zero_group": groups}
    found = planned_for(plan, Asked(set=pins, nodes=3), nodes)
    assert found is not None
    strategy = found.plan.strategy
    assert (strategy.dp, strategy.zero) == (2 * nodes, 3)
    assert strategy.zero_group != groups


def node(name: str, port: int) -> Node:
    return Node(f"key-{name}", name, "127.0.0.1", port, {"CPU": 2.0})


def test_a_node_whose_port_is_closed_is_lost_with_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        a, b = node("a", there.getsockname()[1]), node("b", unused.getsockname()[1])
        assert answering((a, b)) == (a,)
        monkeypatch.setattr("bigplan.launcher.nodes.known", lambda: (a, b))
        assert node_lost({0: a}, "training") is None
        error = node_lost({0: a, 1: b, 2: b}, "running step 3")
    assert isinstance(error, NodeLostError)
    assert str(error).startswith("node b (127.0.0.1) was lost with ranks 1, 2 while running step 3")
    assert error.ranks == (1, 2)


class Shrinks(Fake):
    """Rank 3, of a second node, is lost in step 4 with it, so many times."""

    times = 1

    def step(self, checkpoint: Path | None = None) -> StepResult:
        if self.rank == 3 and self.steps == 3 and Shrinks.times:
            Shrinks.times -= 1
            raise NodeLostError("node b was lost with ranks 2, 3 while running step 4", (2, 3))
        return super().step(checkpoint)


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shrinks, "times", 1)


def started(folder: Path, console: Console | None = None, **how: object) -> Path:
    told = {"run_dir": str(folder), "address": "there:1", "checkpoint_every": 2, "steps": 9, **how}
    options = LaunchOptions(LaunchSpec.model_validate(told), asked=Asked(set=PINS, nodes=2))
    return launch(plan_of(9, **PINS), options, console or quiet(), Shrinks)


@pytest.mark.usefixtures("without_ray")
def test_a_run_shrinks_and_grows_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node is away when it is looked for after its loss, and once more."""
    there = iter([2, 1, 1])

    def usable(plan: Plan) -> tuple[Node, ...]:
        return tuple(node(name, 1) for name in "ab"[: next(there, 2)])

    monkeypatch.setattr(elastic, "usable", usable)
    screen = Console(file=StringIO(), record=True, width=300)
    record = read_record(started(tmp_path, screen, elastic=True))
    told = " ".join(screen.export_text().split())
    for plan in record.summary.plans[1:]:
        again = rf"Planned again for {plan.nodes} nodes? of 2 in [\d.]+ s: "
        assert re.search(again + re.escape(strategy_text(plan.strategy)), told)
    assert [metric.step for metric in record.metrics] == list(range(1, 10))
    assert [metric.loss for metric in record.metrics] == [5.0 - step for step in range(1, 10)]
    plans = [(plan.after, plan.nodes, plan.reason) for plan in record.summary.plans]
    assert plans == [(0, 2, ""), (2, 1, "a node was lost"), (7, 2, "a node is back")]
    assert [lost.back_to for lost in record.summary.restarts] == [2]
    assert record.plan == plan_of(9, **PINS)
    kept = sorted(path.name for path in record.folder.glob("plan-until-*"))
    assert kept == ["plan-until-step-000002.yaml", "plan-until-step-000007.yaml"]
    assert read_asked(record.folder) == Asked(set=PINS, nodes=2)


@pytest.mark.usefixtures("without_ray")
def test_a_run_waits_for_a_node_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "enough", lambda plan: False)
    monkeypatch.setattr(elastic, "NODE_SECONDS", 0.0)
    with pytest.raises(LostError, match=r"node b was lost.*No node has come.*--elastic") as error:
        started(tmp_path)
    assert "The newest checkpoint is of step 2" in str(error.value)


@pytest.mark.usefixtures("without_ray")
def test_a_run_goes_on_once_a_node_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(elastic, "enough", lambda plan: next(answers))
    record = read_record(started(tmp_path))
    assert [metric.loss for metric in record.metrics] == [5.0 - step for step in range(1, 10)]
    assert len(record.summary.plans) == 1


def test_a_head_that_is_lost_while_a_node_is_waited_for_is_asked_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end this process without a word."""
    plan, now = plan_of(3, **PINS), [0.0]

    def silent(address: str, seconds: float) -> None:
        raise InputError("nothing listens")

    def pause(seconds: float) -> None:
        now[0] += seconds

    def asked(plan: Plan) -> bool:
        raise AssertionError("nobody would answer")

    monkeypatch.setattr(head, "require_ray", silent)
    monkeypatch.setattr(elastic, "enough", asked)
    monkeypatch.setattr("time.sleep", pause)
    session = Session("there:1", 1, cuda=False, head=RayHead("there:1", lambda: now[0]))
    journal = Journal(plan, tmp_path, 3, tensorboard=False)
    how = LaunchSpec(address="there:1")
    run = Launched(plan, how, journal, quiet(), None, Asked(nodes=2), session=session)
    with pytest.raises(WorkerError, match="head of the Ray cluster at there:1 has not answered"):
        elastic.find_nodes(run)
