"""The checkpoint that a rank is writing beside its steps, if any.

All ranks call these functions at the same points, between steps, when no other collective is under
way. So agreement between ranks needs no separate group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from bigplan.runtime.checkpoint.saver import Saver
from bigplan.runtime.context import Context
from bigplan.runtime.execution.executor import Executor
from bigplan.runtime.manifest import Manifest, StoredFile
from bigplan.runtime.result import Saved

Share = tuple[str, list[StoredFile]]  # of a rank: what failed, what it has written
_SHARE = TypeAdapter(Share)


@dataclass(slots=True)
class Background:
    """At most one checkpoint under way; `ended` collects those that have not been reported yet."""

    context: Context
    executor: Executor
    newest: Path | None = None  # the checkpoint that this run wrote or read last
    _ended: list[Saved] = field(default_factory=list)

    def holds(self, path: Path) -> bool:
        """Whether this run wrote or read that checkpoint last, and nobody removed it since."""
        return self.newest == path and self.context.groups.all_true(path.is_dir())

    def begin(self, folder: Path, manifest: Manifest) -> None:
        """Let the CKPT actions of the next program write here; one under way is waited for."""
        self.settle()
        saver = Saver(self.context, folder, manifest)
        if self.context.groups.first_here:
            saver.prepare()
        self.context.groups.all_true(flag=True)  # there is a folder now
        self.executor.saver = saver

    def ended(self, *, wait: bool = False) -> tuple[Saved, ...]:
        """What has ended since the last call; `wait`: the one under way too."""
        if wait:
            self.settle()
        else:
            self._commit()
        ended, self._ended = tuple(self._ended), []
        return ended

    def taken(self, path: Path) -> Saved | None:
        """The checkpoint of that path, if it has ended since; `ended` will not tell of it."""
        mine = [saved for saved in self._ended if saved.path == path]
        self._ended = [saved for saved in self._ended if saved.path != path]
        return mine[-1] if mine else None

    def settle(self) -> None:
        """Wait for the checkpoint under way."""
        self.executor.settle()
        self._commit()

    def _commit(self) -> None:
        """Commit the checkpoint under way once all ranks have written their shares of it."""
        saver = self.executor.saver
        if saver is None or not self.context.groups.all_true(saver.ended):
            return
        self.executor.settle()  # what is left has nothing to write, but would ask for the saver
        self.executor.saver = None
        shares, speaks = self._gathered((saver.error, saver.stored)), self.context.groups.first_here
        error = _together(shares)
        if not error:
            sealed = saver.seal(file for _, files in shares for file in files) if speaks else ""
            error = _together(self._gathered((sealed, [])))
        saved = saver.commit(error) if speaks else None
        if saved is None:
            saver.close()
        # A first rank may have failed at the end, alone.
        error = _together(self._gathered((saved.error if saved else error, [])))
        if saved is not None and self.context.groups.first:
            self._ended.append(replace(saved, error=error))
        if not error:
            self.newest = saver.path

    def _gathered(self, share: Share) -> list[Share]:
        # As JSON: what all_gather_object brings is unpickled, which can run anything.
        texts = self.context.groups.texts_of_all(_SHARE.dump_json(share))
        return [_SHARE.validate_json(text) for text in texts]

    def close(self) -> None:
        """Drop what is under way. The lanes are closed before."""
        if self.executor.saver is not None:
            self.executor.saver.close()
            self.executor.saver = None


def _together(shares: list[Share]) -> str:
    """All errors, each once."""
    return "; ".join(dict.fromkeys(failed for failed, _ in shares if failed))
