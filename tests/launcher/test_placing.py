"""Which nodes a plan may take, as Ray describes them."""

from collections.abc import Mapping

import pytest

from bigplan.engines import make_plan
from bigplan.errors import NoRoomError
from bigplan.graph.strategy import Replicas
from bigplan.launcher import placing
from bigplan.launcher.nodes import Node
from bigplan.launcher.placing import Layout, whole_nodes
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.spec.catalog import find_model
from bigplan.spec.cluster import Cluster
from tests.launcher.machines import plan_of, two_nodes

pytest.importorskip("ray")


def mixed_plan(*, slow: bool) -> Plan:
    """For two nodes beside one that is as fast, or so slow that it is left out."""
    fast = two_nodes().group.model_copy(update={"name": "fast"})
    rates = {name: rate / (1e3 if slow else 1) for name, rate in fast.gpu.peak_flops.items()}
    gpu = fast.gpu.model_copy(update={"peak_flops": rates})
    other = fast.model_copy(update={"name": "other", "nodes": 1, "gpu": gpu})
    cluster = Cluster(name="lab", node_groups=(fast, other))
    training = plan_of(2).training.model_copy(update={"global_batch": 12})
    request = Request(find_model("tiny-llama-test"), training, cluster, {"zero": 0}, "native")
    return make_plan(request)


def unequal_plan() -> Plan:
    """For two nodes and one that is half as fast, each group with work of its own."""
    plan = mixed_plan(slow=False)
    groups = Replicas(number=2, micro_batch=2), Replicas(number=1, micro_batch=1)
    shared = plan.strategy.model_copy(update={"micro_batch": 2, "dp": 3, "replicas": groups})
    return plan.model_copy(update={"strategy": shared})


def node(name: str, **groups: float) -> Node:
    return Node(name, name, name, 1, {"CPU": 2.0, **groups})


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    nodes: list[Node] = []

    def fitting(bundle: Mapping[str, float]) -> tuple[Node, ...]:
        return tuple(n for n in nodes if n.fits(bundle))

    monkeypatch.setattr(placing, "fitting", fitting)
    return nodes


def test_a_plan_that_leaves_a_group_idle_takes_nodes_of_the_others(there: list[Node]) -> None:
    plan = mixed_plan(slow=True)
    assert [m.name for m in plan.cluster.left_out or ()] == ["other"]
    layout = Layout.of(plan)
    assert (layout.nodes, layout.groups) == (2, ("fast",))
    there += [node("a", other=1), node("b", fast=1), node("c", fast=1)]
    assert [n.name for n in layout.fitting()] == ["b", "c"]
    assert [n.name for n in whole_nodes(plan).fitting()] == ["b", "c"]


def test_without_names_there_must_be_no_choice(there: list[Node]) -> None:
    layout = Layout.of(mixed_plan(slow=True))
    there += [node("a"), node("b")]
    assert len(layout.fitting()) == 2
    there.append(node("c"))
    assert not layout.fitting()
    assert "ray start --resources '{\"fast\": 1}'" in placing._whose(layout)


def test_a_plan_for_all_groups_takes_any_nodes(there: list[Node]) -> None:
    layout = Layout.of(mixed_plan(slow=False))
    assert (layout.nodes, layout.groups) == (3, ())
    there += [node("a"), node("b", fast=1), node("c")]
    assert len(layout.fitting()) == 3
    assert placing._whose(layout) == ""


def test_groups_with_work_of_their_own_get_their_nodes_in_turn(there: list[Node]) -> None:
    layout = Layout.of(unequal_plan())
    assert (layout.nodes_of, layout.groups) == ((2, 1), ("fast", "other"))
    there += [node("a", other=1), node("b", fast=1), node("c", other=1), node("d", fast=1)]
    assert [n.name for n in layout.fitting()] == ["b", "d", "a"]
    there.pop()
    assert len(layout.fitting()) < layout.nodes  # another node of the slow kind does not do
    assert "of 2 fast and 1 other (a node says so" in placing._whose(layout)


def test_nodes_that_others_use_are_told_from_nodes_that_are_too_small(there: list[Node]) -> None:
    layout = Layout.of(mixed_plan(slow=False))
    there += [node("a"), node("b")]
    assert placing._taken(layout, layout.fitting()) == ""
    there.append(node("c"))
    assert "others still used" in placing._taken(layout, layout.fitting())


def test_ranks_are_as_nice_as_a_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(placing.NICENESS, raising=False)
    assert placing.priority() == {"RAY_worker_niceness": "0"}
    monkeypatch.setenv("RAY_worker_niceness", "7")
    assert placing.priority() == {"RAY_worker_niceness": "7"}


@pytest.mark.parametrize(("slow", "waits"), [(True, [60.0]), (False, [5.0, 60.0])])
def test_nodes_are_waited_for_where_no_others_would_do(
    there: list[Node], monkeypatch: pytest.MonkeyPatch, slow: bool, waits: list[float]
) -> None:
    """Of a plan for all groups Ray may take any, and is asked for these for a moment only."""
    asked: list[float] = []

    class Busy:
        def wait(self, seconds: float) -> bool:
            asked.append(seconds)
            return False

    monkeypatch.setattr(placing, "_group", lambda *_: Busy())
    monkeypatch.setattr(placing, "remove", lambda _: None)
    monkeypatch.setattr(placing, "known", lambda: tuple(there))
    there += [node(name, fast=1) for name in "abcd"]
    with pytest.raises(NoRoomError, match="others still used after 60 s"):
        placing.place(Layout.of(mixed_plan(slow=slow)))
    assert asked == waits
