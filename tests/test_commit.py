import subprocess
from pathlib import Path

import pytest

from bigplan import commit as commits
from bigplan.version import __version__


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_has_its_commit(tmp_path: Path) -> None:
    assert commits._of_checkout(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert commits._of_checkout(tmp_path) == ""  # nothing is committed
    (tmp_path / "a").write_text("a")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    git(tmp_path, "tag", "v1", "-m", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commits._of_checkout(tmp_path) == commit[:10]
    (tmp_path / "a").write_text("b")
    assert commits._of_checkout(tmp_path) == f"{commit[:10]}, changed"


@pytest.mark.parametrize(
    ("text", "commit"),
    [
        (
            '{"url": "git+https://x", "vcs_info": {"vcs": "git", "commit_id": "%s"}}' % ("c" * 40),
            10,
        ),
        ('{"url": "file:///x", "dir_info": {"editable": true}}', 0),
        (None, 0),
    ],
)
def test_an_installation_may_have_it(
    text: str | None, commit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return text

    monkeypatch.setattr(commits, "distribution", lambda name: Installed())
    monkeypatch.setattr(commits, "_of_checkout", lambda root: "")
    told = f" (commit {'c' * commit})" if commit else ""
    assert commits.full_version() == __version__ + told
