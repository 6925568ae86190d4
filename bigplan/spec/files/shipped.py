"""Descriptions that come with the package: folders of YAML files, each found by its name."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from bigplan.errors import InputError, quoted
from bigplan.spec.files.document import S, load_document
from bigplan.spec.files.words import CLOSE

PACKAGE = Path(__file__).resolve().parents[2]


# Descriptions are frozen, and the package's files stay as they are: a cluster takes 50 ms to parse,
# a folder of models 1 ms to list.
_loaded = cache(load_document)


@cache
def names(folder: Path) -> tuple[str, ...]:
    """Names of the descriptions in `folder`, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load(folder: Path, name: str, schema: type[S]) -> S:
    """The description of that name. Raises InputError where it breaks a rule."""
    loaded: S = _loaded(folder / f"{name}.yaml", schema)
    return loaded


def find(folder: Path, name: str, schema: type[S], noun: str) -> S:
    """The description of that name. Raises InputError where there is none."""
    known = names(folder)
    if name not in known:
        raise unknown(noun, name, known, "or write it out as `bigplan clusters NAME` writes one")
    return load(folder, name, schema)


def unknown(noun: str, name: str, known: tuple[str, ...], otherwise: str) -> InputError:
    """The error for an unknown name: the closest one, all known ones, and another way."""
    # A beginning counts most, then a part: "h200" means h200-sxm, though "b200" is more alike, and
    # "rtx4090" the workstation with it.
    plain = _plain(name)
    begun = [one for one in known if one.startswith(f"{name.lower()}-")]
    parts = [one for one in known if plain and plain in _plain(one)]
    pool, cutoff = (begun or parts, 0.0) if begun or parts else (known, CLOSE)
    close = difflib.get_close_matches(name.lower(), pool, n=1, cutoff=cutoff)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return InputError(
        f"no {noun} is called {quoted(name)}{hint} (shipped: {', '.join(known)}; {otherwise})"
    )


def _plain(name: str) -> str:
    """A name's letters and digits."""
    return "".join(filter(str.isalnum, name.lower()))
