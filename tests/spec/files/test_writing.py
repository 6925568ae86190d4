import errno
import os
from pathlib import Path

import pytest

from bigplan.spec.files.writing import write_whole


def test_what_was_there_stays_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    write_whole(path, "before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "plan.yaml"
    link.symlink_to(path)
    for text in ("new", "replaced"):
        write_whole(link, text)
        assert (link.is_symlink(), path.read_text()) == (True, text)


def test_devices_and_files_of_closed_folders_are_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(Path(os.devnull), "nothing")
    path = tmp_path / "plan.yaml"
    path.write_text("before")
    file = path.stat().st_ino
    monkeypatch.setattr(os, "access", lambda *_: False)
    write_whole(path, "after")
    assert (path.read_text(), path.stat().st_ino) == ("after", file)
