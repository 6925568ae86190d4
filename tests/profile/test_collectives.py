"""Collectives of gloo processes on this machine: plausible figures, which plans are priced by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bigplan.errors import WorkerError
from bigplan.profile import collectives, exchange, machine
from bigplan.profile.collectives import KeptSpeed, group_sizes, measure_collectives, start_peers
from bigplan.profile.exchange import begin, copying, end, form_groups, multiplying, timed
from bigplan.profile.fit import Exchange
from bigplan.profile.machine import Wish
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.detect.cluster import detect
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from tests.profile.small import bench

FIGURES = {
    "bandwidth",
    "latency",
    "half_size",
    "reduce_scatter_bandwidth",
    "all_gather_bandwidth",
    "send_bandwidth",
    "beside_compute",
    "compute_beside",
}


@pytest.fixture
def group(tmp_path: Path) -> NodeGroup:
    return detect(cpu_devices=2, folder=tmp_path, drive=False).group


def test_groups_are_powers_of_two_and_all() -> None:
    assert [group_sizes(world) for world in (2, 3, 8)] == [(2,), (2, 3), (2, 4, 8)]


def test_two_gloo_processes(group: NodeGroup) -> None:
    found = measure_collectives(group, bench(), 1.0)
    link = found.intra_node
    assert found == group.model_copy(update={"intra_node": link})
    for name in FIGURES:
        assert "by bigplan profile: gloo" in link.sources[name], name
    assert 1e6 < link.bandwidth < 1e11
    assert 1e-6 < link.latency < 1
    assert link.beside_copies is None
    cluster = Cluster(name="found", node_groups=(found,))
    assert parse_document(to_yaml(cluster), Cluster) == cluster


def test_one_device_exchanges_nothing(group: NodeGroup) -> None:
    alone = group.model_copy(update={"gpus_per_node": 1})
    assert measure_collectives(alone, bench(), 1.0) is alone


def test_exchanges_of_all_kinds_and_of_some_ranks(group: NodeGroup) -> None:
    three = group.model_copy(update={"gpus_per_node": 3})
    with start_peers(three, bench()) as peers:
        peers.call(form_groups, group_sizes(len(peers)))
        for kind in (*collectives.TRAFFIC, "send"):
            seconds = peers.call(timed, Exchange(kind, 2, 4096), 2)
            assert (seconds[0] > 0, seconds[1] > 0, seconds[2]) == (True, True, 0.0), kind
        assert min(peers.call(timed, Exchange("all_reduce", 3, 4096), 2)) > 0
        # What goes on beside them on GPUs runs here too.
        for work in (multiplying, copying):
            peers.call(begin, work)
            # As on a machine so busy that no run ends within the window.
            assert min(peers.call(exchange.rate_of_company, 0.0)) > 0
            peers.call(end)


def test_there_are_not_more_processes_than_eight_on_a_cpu(
    group: NodeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(collectives, "Peers", lambda devices, threads: asked.append(len(devices)))
    start_peers(group.model_copy(update={"gpus_per_node": 64}), bench())
    start_peers(group, bench(devices=(torch.device("cuda", 0), torch.device("cuda", 1))))
    assert asked == [8, 2]


def test_nothing_is_said_to_be_faster_or_stand_still_beside_something_else() -> None:
    assert [collectives._share(value) for value in (1.2, 0.5, 0.0)] == [1.0, 0.5, 0.01]
    assert "2 ms alone" in str(KeptSpeed(1.0, 0.5, 2e-3))


def test_a_profile_goes_on_where_collectives_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> NodeGroup:
        raise WorkerError("process 1 of 2: no NCCL here")

    failing = replace(machine.COLLECTIVES, measure=fail)
    monkeypatch.setattr(machine, "COLLECTIVES", failing)
    monkeypatch.setattr(machine, "PROBES", ())
    warned: list[str] = []
    wish = Wish(cpu_devices=2, seconds=0.1)
    found = machine.profile_machine(wish, lambda _: None, warned.append)
    assert found.after.group.intra_node == found.before.group.intra_node
    assert any("no NCCL here" in text for text in warned)
