"""Log-probabilities of pairs of responses under the weights that a run started from.

Direct preference optimisation compares the model with these. They are taken once, by forward passes
before the first step, and kept in the run's folder: a second model is never in memory, and a run
that goes on, under any plan, reads them again.

reference.npz has an array for each set of data, named by its fingerprint: float64 [pairs, 2], of
the chosen and of the rejected response; NaN for pairs that only a longer validation would use.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bigplan.errors import InputError
from bigplan.launcher.progress import Show
from bigplan.units import counted

if TYPE_CHECKING:
    from bigplan.runtime.execution.forwards import Part
    from bigplan.runtime.result import PairData

FILE = "reference.npz"
TOLD = 10  # parts of a pass after each of which a line says how far it is

Values = NDArray[np.float64]


class Ranks(Protocol):
    """Ranks that can be asked (bigplan.launcher.crew.Crew)."""

    def ask(self, method: str, *arguments: object, doing: str) -> list[Any]:
        """Call a method of every rank; results by rank."""


@dataclass(frozen=True)
class References:
    """Those of a run in `folder`, of which `done` steps lie behind."""

    ranks: Ranks
    folder: Path
    done: int

    def give(self, show: Show, stopping: Callable[[], bool]) -> None:
        """Let the ranks have what their plan needs; what is not known yet is computed and kept.

        It ends early where somebody asks to stop. Raises InputError where a run that goes on has
        new data: the weights that it started from are gone.
        """
        wanted: Mapping[Part, PairData] = self.ranks.ask("pair_data", doing="looking at data")[0]
        known = read(self.folder)
        for part, data in wanted.items():
            values = known.get(data.fingerprint)
            if values is not None and not np.isnan(values[: data.wanted]).any():
                continue
            if self.done:
                raise InputError(
                    f"{self.folder / FILE} has no log-probabilities of all pairs of {part} under "
                    "the weights that this run started from, which are gone: go on with the data "
                    "(and of validation the batches) that it started with, or start a new run from "
                    "its exported weights"
                )
            values = self._scored(part, data, show, stopping)
            if values is None:
                return
            known[data.fingerprint] = values
            write(self.folder, known)
        given = {part: known[data.fingerprint] for part, data in wanted.items()}
        self.ranks.ask("refer", given, doing="reading the reference")

    def _scored(
        self, part: Part, data: PairData, show: Show, stopping: Callable[[], bool]
    ) -> Values | None:
        """By forward passes over a global batch each; None: somebody asked to stop."""
        found = np.full((data.pairs, 2), np.nan)
        passes = counted(data.steps, "forward pass", "forward passes")
        show.say(f"Reference: {counted(data.wanted, 'pair')} of {part} in {passes}")
        for step in range(data.steps):
            if stopping():
                return None
            doing = f"scoring batch {step + 1} of {data.steps}"
            for scored in self.ranks.ask("score", part, step, doing=doing):
                found[scored.pairs] = scored.values
            if (step + 1) * TOLD // data.steps > step * TOLD // data.steps:
                show.say(f"Reference: {step + 1}/{data.steps}")
        if (missing := int(np.isnan(found[: data.wanted]).any(1).sum())) > 0:
            raise InputError(
                f"{counted(missing, 'pair')} of {part} have no finite log-probability under the "
                "starting weights: look at the weights and the precision (fp16 overflows first)"
            )
        return found


def read(folder: Path) -> dict[str, Values]:
    """What is known, by the data's fingerprint. Raises InputError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{path} cannot be read ({error}): restore it, or delete it where the run has made "
            "no step yet"
        ) from None
    if any(one.ndim != 2 or one.shape[1] != 2 or one.dtype != np.float64 for one in found.values()):
        raise InputError(f"{path} holds no log-probabilities of pairs: restore it")
    return found


def write(folder: Path, known: Mapping[str, Values]) -> None:
    """Replace the file as a whole. Raises OSError."""
    partial = folder / f"{FILE}.partial"
    with partial.open("wb") as file:
        arrays: dict[str, Any] = dict(known)
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / FILE)
