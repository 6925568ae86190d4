"""Nodes of a Ray cluster side by side: two on this machine, measured for a moment."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from bigplan.errors import PreflightError
from bigplan.launcher import survey as surveying
from bigplan.launcher.nodes import Node, answering, known
from bigplan.launcher.session import ray_session
from bigplan.launcher.survey import Survey, Surveyed, survey
from bigplan.profile.machine import Profile, Wish
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.mixed import choices
from tests.profile import small

ray = pytest.importorskip("ray")

WISH = Wish("two", None, 1, 0.5)


def shrunk(wish: Wish) -> Profile:
    """On a node, with probes of toy size."""
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch)
        return small.profiled(wish)[0]


@pytest.fixture(scope="module")
def cluster(warm: None) -> Iterator[Any]:
    """A head without cores, and two nodes with one each."""
    from ray.cluster_utils import Cluster as Nodes

    kept = {"object_store_memory": 80 << 20, "include_dashboard": False}
    head = {"node_ip_address": "127.0.0.2", "num_cpus": 0, "no_monitor": True, **kept}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Nodes(head_node_args=head, initialize_head=True)
        try:
            for number in (3, 4):
                made.add_node(node_ip_address=f"127.0.0.{number}", num_cpus=1, **kept)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def measured(cluster: Any) -> Iterator[list[Surveyed]]:
    """The two nodes, measured once for all tests, which are connected to them."""
    for module in (sys.modules[__name__], small):
        ray.cloudpickle.register_pickle_by_value(module)
    with ray_session(cluster.address, 0, cuda=False):
        nodes = [each for each in answering(known()) if each.resources.get("CPU", 0) >= 1]
        yield surveying._measured(nodes, WISH, shrunk)


def surveyed_again(measured: list[Surveyed], tell: Callable[[str], None]) -> Survey:
    """A survey that takes what was measured."""

    def _measured(nodes: Sequence[Node], wish: Wish, _: object) -> list[Surveyed]:
        assert [each.node for each in measured] == nodes
        assert wish == WISH
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surveying, "_measured", _measured)
        return survey(WISH, None, tell)


def test_two_nodes_become_a_cluster_with_a_network(measured: list[Surveyed]) -> None:
    told: list[str] = []
    found = surveyed_again(measured, told.append)
    assert told[:2] == [
        "Measuring 2 nodes side by side: 127.0.0.3, 127.0.0.4",
        "Measuring collectives across 2 nodes",
    ]
    group = found.cluster.group
    assert (group.nodes, group.gpus_per_node, group.gpu.device) == (2, 1, "cpu")
    assert "by bigplan profile" in group.gpu.sources["peak_flops"]
    link = group.inter_node
    assert link is not None
    assert link.name == "gloo between nodes"
    assert "by bigplan profile: gloo, groups of 2" in link.sources["bandwidth"]
    assert 1e6 < link.bandwidth < 1e11
    assert parse_document(to_yaml(found.cluster), Cluster) == found.cluster
    (profile,) = found.profiles
    assert profile.after.group == group


def test_unlike_nodes_have_the_network_between_all(
    measured: list[Surveyed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveying, "_alike", lambda found: [[one] for one in found])
    told: list[str] = []
    found = surveyed_again(measured, told.append)
    assert "Measuring collectives across all 2 nodes" in told
    assert [group.name for group in found.cluster.node_groups] == ["two-1", "two-2"]
    one, two = (group.inter_node for group in found.cluster.node_groups)
    assert one == two
    assert one is not None
    assert one.bandwidth > 1e6
    together = choices(found.cluster)[-1]
    assert (together.group.nodes, together.group.inter_node) == (2, one)


def node(number: int, address: str = "10.0.0.{}") -> Node:
    at = address.format(number)
    return Node(f"key-{number}", at, at, 1, {"CPU": 8.0})


def surveyed(number: int, memory: float = 1.0, peak: float = 1.0) -> Surveyed:
    cluster = find_cluster("h200-1x")
    gpu = cluster.group.gpu
    peaks = {name: peak * rate for name, rate in gpu.peak_flops.items()}
    host = cluster.group.host.model_copy(update={"memory": int(memory * cluster.group.host.memory)})
    changed = {"gpu": gpu.model_copy(update={"peak_flops": peaks}), "host": host}
    group = cluster.group.model_copy(update=changed)
    after = cluster.model_copy(update={"node_groups": (group,)})
    return Surveyed(node(number), Profile(cluster, after))


def test_alike_are_nodes_with_the_same_parts() -> None:
    one, other, larger = surveyed(1), surveyed(2, 0.97, 0.5), surveyed(3, 2.0)
    assert surveying._alike([one, larger, other]) == [[one, other], [larger]]
    apart = [text.partition(" is ")[0] for text in surveying._differences([one, other])]
    assert "gpu.peak_flops.bf16" in apart
    assert not list(surveying._differences([one, surveyed(2, 0.97)]))


def test_beyond_loopback_the_user_names_an_interface() -> None:
    with pytest.raises(PreflightError, match=r"without authentication.* --interface NAME"):
        surveying._interface([node(1), node(2)], None)
    assert surveying._interface([node(1), node(2)], "eth0") == "eth0"
    assert surveying._interface([node(1)], None) == "lo"  # it talks to nobody
    assert surveying._interface([node(3, "127.0.0.{}"), node(4, "127.0.0.{}")], None) == "lo"


def test_an_interface_that_a_node_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # and so put back
    with pytest.raises(PreflightError, match=r"--interface nowhere0: a node has .*lo"):
        surveying._DeviceActor("nowhere0").meet(None, 0, 2, cuda=False, threads=1)
