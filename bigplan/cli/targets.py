"""Files that commands write where the user says, looked at before the slow work.

What is replaced is of the kind that is written and no input of the command; nothing else of the
user's is ever lost to a slip of the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bigplan.errors import InputError

_HEAD = 4096  # bytes in which a file says what it is


@dataclass(frozen=True, slots=True)
class TargetKind:
    """What a command writes."""

    noun: str
    refusal: Callable[[Path], str]  # why a file is none of this kind; empty: it is one


def _begins(pattern: bytes, told: str) -> Callable[[Path], str]:
    """Files of any format version count, and large ones are not read whole."""

    def refusal(path: Path) -> str:
        with path.open("rb") as file:
            return "" if re.match(pattern, file.read(_HEAD)) else f"it does not begin with {told}"

    return refusal


def _no_cluster(path: Path) -> str:
    from bigplan.spec.cluster import Cluster
    from bigplan.spec.files.document import load_document

    try:
        load_document(path, Cluster)
    except InputError as error:
        return str(error).splitlines()[0]  # of other texts every line is a problem
    return ""


PLAN = TargetKind("plan", _begins(rb"format: \d+\s+inputs:", "`format: N` and `inputs:`"))
TRACE = TargetKind("trace", _begins(rb'\s*\{\s*"traceEvents"\s*:', '{"traceEvents":'))
CLUSTER = TargetKind("cluster", _no_cluster)
PAGE = TargetKind(
    "page",
    _begins(rb'(?s).*<meta name="generator" content="bigplan">', "the head of a page of bigplan's"),
)
PNG = TargetKind("picture", _begins(rb"\x89PNG", "a PNG's signature"))
SVG = TargetKind("picture", _begins(rb"<svg ", "`<svg`"))


def require_target(option: str, path: Path, kind: TargetKind, inputs: Iterable[Path] = ()) -> None:
    """Raise InputError where a file cannot be written, or would take the place of another kind's.

    `inputs` are what the command reads: none of them is replaced, whatever its kind.
    """
    try:
        _require_place(option, path, kind)
        if not path.is_file():  # new, or a device or pipe, which holds nothing to lose
            return
        for read in inputs:
            if read.exists() and path.samefile(read):
                raise InputError(
                    f"{option} {path} is an input of this command, which is never replaced; "
                    "name another file"
                )
        refusal = kind.refusal(path) if path.stat().st_size else ""  # empty, as mktemp makes them
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror}; name another file") from None
    if refusal:
        raise InputError(
            f"{option} {path} exists and is no {kind.noun} that could be replaced ({refusal}); "
            "name another file, or remove this one first"
        )


def _require_place(option: str, path: Path, kind: TargetKind) -> None:
    folder = path.parent
    if not folder.exists():
        raise InputError(f"{option} {path}: the folder {folder} does not exist; create it first")
    if not folder.is_dir():
        raise InputError(f"{option} {path}: {folder} is a file, not a folder; name another folder")
    if path.is_dir():
        raise InputError(
            f"{option} {path} is a folder, and the {kind.noun} is one file; name a file in it"
        )
