"""The version of bigplan and, where it is known, its git commit."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from bigplan.version import __version__

_SECONDS = 5.0  # that git may take to answer


def full_version() -> str:
    """Version and commit: "0.1.0 (commit 1a2b3c4d5e)".

    In a checkout, "changed" follows where files differ from the commit.
    """
    commit = _of_checkout(Path(__file__).parent.parent) or _of_installation()
    return f"{__version__} (commit {commit})" if commit else __version__


def _of_checkout(root: Path) -> str:
    """The commit of the git checkout at `root`; empty: `root` is no checkout."""
    if not (root / ".git").exists():
        return ""
    # --no-optional-locks: git only reads the checkout. --exclude=*: the commit, not a tag.
    command = ["git", "-C", str(root), "--no-optional-locks", "describe", "--always", "--abbrev=10"]
    command += ["--exclude=*", "--dirty=, changed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _of_installation() -> str:
    """The commit that pip installed from a repository; empty: pip installed from elsewhere."""
    try:
        text = distribution("bigplan").read_text("direct_url.json")
        told = json.loads(text or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    return str(told.get("vcs_info", {}).get("commit_id", ""))[:10]
