"""Files that several places have, where the machines of a run share no folder."""

from __future__ import annotations

from collections.abc import Iterable

from bigplan.errors import CheckpointError
from bigplan.runtime.manifest import StoredFile


def merged(files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    """Each file once, with all places that have it. Raises CheckpointError where copies differ.

    They are of ranks that hold the same state.
    """
    found: dict[str, StoredFile] = {}
    for file in files:
        other = found.setdefault(file.name, file)
        if other is file:
            continue
        places = tuple(sorted({*other.places, *file.places}))
        if other.model_copy(update={"places": places}) != file.model_copy(
            update={"places": places}
        ):
            raise CheckpointError(
                f"ranks that hold the same state wrote {file.name} differently: their weights have "
                "come apart, and this checkpoint is not kept"
            )
        found[file.name] = other.model_copy(update={"places": places})
    return tuple(sorted(found.values(), key=lambda file: (file.layer, file.name)))
