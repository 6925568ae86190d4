"""Hugging Face ids whose config.json is in the local cache, as huggingface_hub keeps it.

HUB/models--ORG--NAME/refs/main holds the name of a folder in HUB/models--ORG--NAME/snapshots.
Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# Hub names: letters, digits and these between them; none begins with a dot or a hyphen.
_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_LONGEST = 96  # characters of a repository's name with its owner's, by the hub's rules


def hub_folder() -> Path:
    """The folder where huggingface_hub keeps files, by the variables that it reads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if hub := os.environ.get(name):
            return Path(hub)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface" / "hub"


def is_id(text: str) -> bool:
    """Whether the text could be an id, such as Qwen/Qwen3-8B."""
    return len(text) <= 2 * _LONGEST and _ID.fullmatch(text) is not None and ".." not in text


def cached_config(text: str) -> Path | None:
    """The cached config.json of an id, that of `main` or the newest; None: there is none."""
    if not is_id(text):
        return None
    try:
        repository = hub_folder().expanduser() / f"models--{text.replace('/', '--')}"
        snapshots = repository / "snapshots"
        main = repository / "refs" / "main"
        named = [snapshots / main.read_text().strip()] if main.is_file() else []
        others = sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except (OSError, RuntimeError, ValueError):
        return None
    found = (folder / "config.json" for folder in (*named, *others))
    return next((path for path in found if path.is_file()), None)
