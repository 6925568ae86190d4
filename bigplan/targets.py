"""Output files of commands and of the Python API, checked before the slow work.

A file is replaced only if it is of the written kind and no input of the command. So no other file
of the user is lost to a mistyped name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bigplan.errors import InputError
from bigplan.paths import exists, is_dir, is_file

_HEAD = 4096  # bytes at a file's beginning that show its kind


@dataclass(frozen=True, slots=True)
class TargetKind:
    """A kind of output file."""

    noun: str
    refusal: Callable[[Path], str]  # why a file is not of this kind; empty: it is


def _begins(pattern: bytes, told: str) -> Callable[[Path], str]:
    """A test of a file's beginning: any format version counts, large files are not read whole."""

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
        return str(error).splitlines()[0]  # for texts of other kinds, every line would be a problem
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
    """Raise InputError where a file cannot be written, or would replace one of another kind.

    `inputs` are the command's input files, which are never replaced.
    """
    try:
        _require_place(option, path, kind)
        if not is_file(path):  # a new file, or a device or pipe, which holds nothing to lose
            return
        for read in inputs:
            if exists(read) and path.samefile(read):
                raise InputError(
                    f"{option} {path} is an input of this command, which is never replaced; "
                    "name another file"
                )
        refusal = kind.refusal(path) if path.stat().st_size else ""  # mktemp makes empty files
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror}; name another file") from None
    if refusal:
        raise InputError(
            f"{option} {path} exists and is no {kind.noun} that could be replaced ({refusal}); "
            "name another file, or remove this one first"
        )


def _require_place(option: str, path: Path, kind: TargetKind) -> None:
    folder = path.parent
    if not exists(folder):
        raise InputError(f"{option} {path}: the folder {folder} does not exist; create it first")
    if not is_dir(folder):
        raise InputError(f"{option} {path}: {folder} is a file, not a folder; name another folder")
    if is_dir(path):
        raise InputError(
            f"{option} {path} is a folder, and the {kind.noun} is one file; name a file in it"
        )
    changed = path if exists(path) else folder
    if not os.access(changed, os.W_OK):
        raise InputError(f"{option} {path}: {changed} may not be written; name another file")
