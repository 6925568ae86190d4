"""What nodes are held against each other for."""

from dataclasses import replace
from pathlib import Path

import pytest

from bigplan.errors import PreflightError
from bigplan.launcher.preflight import (
    Facts,
    interface_of,
    interfaces,
    look,
    require_alike,
    require_clock,
    require_same_gpu,
    versions,
)

ONE = Facts(
    "1",
    {"bigplan": "1", "torch": "2.13"},
    "H100",
    True,
    "",
    {"lo": "127.0.0.1", "eth0": "10.0.0.1"},
)
TWO = replace(ONE, node="2", interfaces={"lo": "127.0.0.1", "ens5": "10.0.0.2"})


def test_nodes_that_are_alike_pass(tmp_path: Path) -> None:
    require_alike({"a": ONE, "b": TWO}, tmp_path)
    require_same_gpu({"a": ONE, "b": TWO})


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            replace(TWO, versions={"bigplan": "1", "torch": "2.12"}),
            r"node a has torch 2\.13, node b 2",
        ),
        (replace(TWO, drive="Read-only file system"), "node b cannot write to .*: Read-only"),
    ],
)
def test_what_differs_is_told(other: Facts, told: str, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=told):
        require_alike({"a": ONE, "b": other}, tmp_path)


def test_gpus_that_a_plan_takes_for_equal_are_alike(tmp_path: Path) -> None:
    other = replace(TWO, gpu="A100")
    require_alike({"a": ONE, "b": other}, tmp_path)  # a plan may have groups of unlike nodes
    with pytest.raises(PreflightError, match="node a has H100, node b A100; the plan takes both"):
        require_same_gpu({"a": ONE, "b": other})


def test_a_clock_that_is_a_second_away() -> None:
    require_clock("b", before=100.0, there=105.9, after=105.0)  # the question took five seconds
    require_clock("b", before=100.0, there=99.1, after=105.0)
    for there in (106.1, 98.9):
        with pytest.raises(PreflightError, match=r"clock of node b is 1\.1 s away"):
            require_clock("b", before=100.0, there=there, after=105.0)


def test_ranks_of_several_machines_listen_where_the_user_says() -> None:
    both = {"a": ONE, "b": replace(TWO, interfaces=ONE.interfaces)}
    assert interface_of(both, "eth0", outside=True) == "eth0"
    assert interface_of(both, None, outside=False) == "lo"  # nodes of one machine
    assert interface_of({"a": ONE}, "eth0", outside=True) == "lo"  # of one node all stays there
    with pytest.raises(PreflightError, match=r"--interface NAME \(a has lo .*eth0 \(10\.0\.0\.1\)"):
        interface_of(both, None, outside=True)
    with pytest.raises(PreflightError, match=r"node b has lo .*, none of that name"):
        interface_of({"a": ONE, "b": TWO}, "eth0", outside=True)


def test_a_look_at_this_machine(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("token")
    found = look("1", tmp_path / "scratch", mark, "token", cuda=False)
    assert (found.shared, found.gpu, found.drive, found.versions) == (True, "", "", versions())
    assert interfaces()["lo"] == "127.0.0.1"
    other = look("1", mark / "scratch", mark, "another", cuda=False)
    assert not other.shared
    assert other.drive == "Not a directory"
