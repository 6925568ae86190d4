"""A folder of checkpoints: `step-000123`, each whole or not there.

A checkpoint is written as `step-000123.partial`, fsynced and then renamed, so a folder without
that ending is whole. A folder with that ending was left behind by a run that died.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from bigplan.errors import CheckpointError, InputError
from bigplan.paths import exists, is_dir, is_file
from bigplan.runtime.manifest import NAME, STEP_FOLDER, Manifest, read_manifest

PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that can be tried, and why newer ones cannot."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...] = ()


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of the state after `step` steps is."""
    return folder / f"step-{step:06d}"


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, newest first."""
    if not is_dir(folder):
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := STEP_FOLDER.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def latest(resume: Path, *, place: str | None = None) -> FoundCheckpoint:
    """The newest checkpoint at `resume`, a folder of checkpoints or one of them.

    Damaged ones are passed over, and told in `skipped`. `place`: as of read_manifest. Raises
    InputError where there is none, CheckpointError where none is good.
    """
    alone = is_file(resume / NAME) or STEP_FOLDER.fullmatch(resume.name) is not None
    paths = [resume] if alone else checkpoints(resume)
    skipped = list[str]()
    for path in paths:
        try:
            return FoundCheckpoint(path, read_manifest(path, place), tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    if skipped:
        raise CheckpointError(f"no checkpoint at {resume} can be used: " + "; ".join(skipped))
    raise InputError(
        f"{resume} has no checkpoint (no folder step-NNNNNN in it): name the folder of one, or the "
        "folder that they are in, such as that of a run that saved some"
    )


def remove_partial(folder: Path) -> None:
    """Remove what runs that died have left behind."""
    if is_dir(folder):
        for path in folder.glob("step-*" + PARTIAL):
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints; those that were removed.

    A checkpoint first stops being one (by its name), then goes file by file.
    """
    assert keep > 0, keep
    removed = checkpoints(folder)[keep:]
    for path in removed:
        gone = path.with_name(path.name + PARTIAL)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return removed


def publish(partial: Path, path: Path) -> None:
    """Give a written checkpoint its name, on disk too. Replaces one of the same name."""
    sync_folder(partial)
    old = path.with_name(path.name + ".old" + PARTIAL)
    if exists(path):
        path.rename(old)
    partial.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make the folder's entries last. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
