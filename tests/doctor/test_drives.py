from pathlib import Path

import pytest

from bigplan.doctor import drives

MOUNTS = """\
/dev/root / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/nvme0n1 /home/my\\040scratch xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/tmp", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/home/me", "nfs4"),
        ("/home/my scratch/runs", "xfs"),
        ("/homes", "ext4"),
    ],
)
def test_file_systems(tmp_path: Path, folder: str, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert drives.file_system(Path(folder), mounts) == kind
    assert drives.file_system(Path(folder), tmp_path / "none") == "unknown"


@pytest.mark.parametrize(
    ("kind", "direct", "state", "told"),
    [
        ("ext4", True, "good", "past the page cache"),
        ("overlay", False, "note", "refuses O_DIRECT"),
        ("tmpfs", True, "note", "is memory"),
        ("nfs4", True, "note", "on another machine"),
    ],
)
def test_what_kinds_mean(kind: str, direct: bool, state: str, told: str) -> None:
    finding = drives.kind_finding("f", kind, direct)
    assert finding.state == state
    assert told in finding.found


def test_folders(tmp_path: Path) -> None:
    assert [one.state for one in drives.examine(tmp_path / "none")] == ["bad"]
    _, room = drives.examine(tmp_path)
    assert room.state == "good"
    assert list(tmp_path.iterdir()) == []
