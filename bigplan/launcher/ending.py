"""How a launch ends: its record is closed, and the user told how to go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigplan.errors import BigplanError, DivergedError, WorkerError
from bigplan.interrupted import ToldInterrupt
from bigplan.launcher.journal import Journal
from bigplan.launcher.launched import Launched
from bigplan.launcher.record import Status
from bigplan.launcher.references import FILE as REFERENCE
from bigplan.launcher.resume import resume_hint

ERROR = "error.txt"


@contextmanager
def ending(launched: Launched, *, resumes: bool) -> Iterator[None]:
    """Close the record however the launch ends, and say how to go on."""
    journal = launched.journal
    status: Status = "failed"
    try:
        yield
        status = "finished"
        if journal.done < journal.target:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        status = "interrupted"
        if not _keeps(journal, resumes=resumes):
            launched.say("Stopped before the first step; nothing of it is kept")
        elif journal.begun:
            hint = resume_hint(journal.folder)
            launched.say(f"Stopped after step {journal.done} of {journal.target}. {hint}")
        else:
            launched.say(f"Stopped before it went on. {resume_hint(journal.folder)}")
        raise ToldInterrupt from None
    except OSError as error:
        told = WorkerError(f"the run's record cannot be written: {error}")
        raise _hinted(launched, told, resumes=resumes) from error
    except DivergedError:
        raise  # it tells itself what to do
    except BigplanError as error:
        _keep_details(journal.folder, error)
        _hinted(launched, error, resumes=resumes)
        raise
    finally:
        _close(journal, status, resumes=resumes)


def _keeps(journal: Journal, *, resumes: bool) -> bool:
    """Whether the folder has something: steps, an error's details, or a reference, of hours."""
    there = any((journal.folder / name).exists() for name in (ERROR, REFERENCE))
    return journal.active or resumes or there


def _close(journal: Journal, status: Status, *, resumes: bool) -> None:
    """Write what is known; leave no folder if nothing ran and nothing is there to read."""
    if not _keeps(journal, resumes=resumes):
        shutil.rmtree(journal.folder, ignore_errors=True)
    elif journal.begun:
        try:
            journal.close(status)
        except OSError:
            return  # a full disk was told; the steps are on record


def _hinted(launched: Launched, error: BigplanError, *, resumes: bool) -> BigplanError:
    """The error, with the way to go on where there is something to go on with."""
    begun = launched.journal.begun or resumes
    if begun and _keeps(launched.journal, resumes=resumes):
        as_before = "" if launched.journal.begun else "The run is as it was before. "
        hint = f"{as_before}{resume_hint(launched.journal.folder)}"
        error.args = (f"{str(error).rstrip('.')}. {hint}",)
    return error


def _keep_details(folder: Path, error: BigplanError) -> None:
    """The worker's own traceback, for whoever looks for the bug."""
    details = "\n".join(getattr(error, "__notes__", []))
    if details:
        path = folder / ERROR
        path.write_text(details)
        error.args = (f"{error} (details in {path})",)
