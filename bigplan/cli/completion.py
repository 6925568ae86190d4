"""Words that a shell offers for the value of an option or an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

_SUFFIXES = (".yaml", ".yml", ".json")


def one_of(words: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Offers those of the words that begin as was typed; None where there are none to offer."""

    def known(begun: str) -> list[str]:
        return [word for word in words if word.startswith(begun)]

    return known if words else None


def known_models(begun: str) -> list[str]:
    """Shipped models, and files, that begin with the word."""
    from bigplan.spec.catalog import list_models

    return _matching(begun, list_models())


def known_clusters(begun: str) -> list[str]:
    """Shipped clusters, and files, that begin with the word."""
    from bigplan.spec.catalog import list_clusters

    return _matching(begun, list_clusters())


def _matching(begun: str, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith(begun)] + _files(begun)


def _files(begun: str) -> list[str]:
    """Folders and description files whose path begins with the word."""
    folder, _, name = begun.rpartition("/")
    try:
        inside = sorted(Path(folder or ("/" if begun.startswith("/") else ".")).iterdir())
    except OSError:
        return []
    before = begun[: len(begun) - len(name)]
    there = [path for path in inside if path.name.startswith(name) and path.name[0] != "."]
    return [
        before + path.name + "/" * path.is_dir()
        for path in there
        if path.is_dir() or path.suffix in _SUFFIXES
    ]
