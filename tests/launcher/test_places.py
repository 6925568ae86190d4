"""Where nodes keep a run's files, without Ray."""

import socket
from pathlib import Path

import pytest

from bigplan.errors import CheckpointError
from bigplan.launcher.nodes import Node, keys
from bigplan.launcher.places import (
    RUN_DIR,
    Places,
    keep_only,
    leave_mark,
    marks,
    own_run,
    part_of,
    receive,
    remove_mark,
    shared_out,
)
from bigplan.runtime.checkpoint.copies import merged
from bigplan.runtime.manifest import Extent, StoredFile


def stored(name: str, place: str, checksum: int = 1) -> StoredFile:
    extent = Extent(offset=0, nbytes=4096, checksums=(checksum,))
    return StoredFile(
        name=name, layer=0, nbytes=4096, extents=(extent,), tensors=(), places=(place,)
    )


def test_a_node_that_has_come_back_is_asked_and_not_the_lost_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as back, socket.socket() as lost:
        lost.bind(("127.0.0.1", 0))  # and takes no connections
        ports = {"1": back.getsockname()[1], "2": lost.getsockname()[1]}
        nodes = [Node(key, "b", "127.0.0.1", port, {}) for key, port in ports.items()]
        assert keys(nodes) == keys(reversed(nodes)) == {"b": "1"}


def test_a_node_may_have_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path("/runs/mine-1")
    assert own_run(run) == run
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    assert own_run(run).parent == tmp_path
    assert own_run(run) != own_run(Path("/other/mine-1"))


def test_nodes_that_see_one_folder_are_one_place(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for run, node in ((one, "k1"), (one, "k2"), (other, "k3")):
        leave_mark(run, node)
    leave_mark(one, "long gone")
    seen = {0: marks(one), 1: marks(one), 2: marks(other)}
    assert shared_out(seen, {"k1": "b", "k2": "a", "k3": "c"}) == {0: "a", 1: "a", 2: "c"}
    remove_mark(one, "k1")
    assert marks(one) == ("k2", "long gone")


def test_copies_of_a_file_are_one_with_both_places() -> None:
    files = merged([stored("y", "b"), stored("x", "b"), stored("x", "a")])
    assert [(file.name, file.places) for file in files] == [("x", ("a", "b")), ("y", ("b",))]
    with pytest.raises(CheckpointError, match="x differently"):
        merged([stored("x", "a"), stored("x", "b", checksum=2)])


def test_a_manifest_that_comes_replaces_another_ones_files(tmp_path: Path) -> None:
    receive(tmp_path, "step-000004", "one")
    folder = tmp_path / "checkpoints" / "step-000004"
    (folder / "file").touch()
    receive(tmp_path, "step-000004", "one")
    assert (folder / "file").exists()
    receive(tmp_path, "step-000004", "another")
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    receive(tmp_path, "step-000006", "next")
    keep_only(tmp_path, ("step-000006",))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000006"]


def test_parts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigplan.launcher.places.PART", 3)
    receive(tmp_path, "step-000004", "one")
    (tmp_path / "checkpoints" / "step-000004" / "file").write_bytes(b"abcde")
    assert part_of(tmp_path, "step-000004", "file", 3) == b"de"


def test_a_file_whose_place_is_not_there_is_told(tmp_path: Path) -> None:
    places = Places({"a": (0, 1)}, {"a": "key"}, tmp_path)
    assert places.of(1) == "a"
    with pytest.raises(CheckpointError, match=r"x of step-000004 is on b alone.*bring that node"):
        places.bring(tmp_path / "step-000004" / "x", stored("x", "b"))
