"""The steps of a launch: train, validate, write checkpoints, stop when asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigplan.errors import CheckpointError, DivergedError
from bigplan.launcher.checkpoints import (
    FOLDER,
    Pace,
    checkpoints,
    newest_step,
    prune,
    remove,
    step_of,
)
from bigplan.launcher.journal import Journal
from bigplan.launcher.progress import Show
from bigplan.launcher.record import Metric
from bigplan.launcher.references import Ranks
from bigplan.launcher.skipped import told
from bigplan.plan import Plan, graph_of
from bigplan.runtime.result import Evaluated

if TYPE_CHECKING:
    from bigplan.runtime.result import StepResult


PATIENCE = 600.0  # seconds for a drive to get room for the last checkpoint
PAUSE = 5.0  # seconds between two tries


@dataclass(frozen=True)
class Steps:
    """Drives `ranks` from where the journal stands to its target."""

    ranks: Ranks
    journal: Journal
    keep: int  # checkpoints; 0: none is written
    pace: Pace
    stopping: Callable[[], bool]  # asked after every step
    most_skipped: int = 0  # in a row, with no loss scale left to lower; 0: any number
    leaving: Callable[[], bool] = lambda: False  # and whenever a checkpoint was written
    anew: Callable[[], None] = lambda: None  # makes the run's folder again where it is gone

    def run(self, show: Show) -> None:
        """Train until the target, or until somebody asks to stop or to leave, and write a last
        checkpoint.

        Raises DivergedError, CheckpointError, what else a rank raises, and OSError where steps
        are not on record at the end.
        """
        journal, told = self.journal, ""
        while journal.done < journal.target and not self.stopping():
            results = self._ask_step()
            saved = [saved for result in results for saved in result.saved]
            written = [each.step for each in saved if not each.error]
            step = journal.done + 1
            found = self._validation(step)
            metric = journal.record(results, found, max(written, default=None))
            show.step(metric)
            if journal.metrics.trouble and not told:
                show.say(_of_record(journal.metrics.trouble))
            told = journal.metrics.trouble
            for failed in (each for each in saved if each.error):
                show.say(f"At step {step} {failed.message}")
            self._check(metric)
            self._tidy(metric)
            if written:
                journal.note()
                if self.leaving():
                    break
        self._save(show)
        if journal.metrics.trouble:
            journal.metrics.settle()

    def _ask_step(self) -> list[StepResult]:
        """One step on all ranks, with a checkpoint beside it where one is due.

        The checkpoint has the state before the step if updates wait for the next step, else after
        it.
        """
        step = self.journal.done + 1
        deferred = self.journal.plan.training.deferred_updates
        state = step - 1 if deferred else step
        due = self.keep > 0 and state > self.journal.first and self.pace.due(state)
        last = state == self.journal.target  # the last state is written when the steps are over
        folder = self._folder() if due and not last else None
        return self.ranks.ask("step", folder, doing=f"running step {step}")

    def _folder(self) -> Path:
        with suppress(OSError):  # a checkpoint has no room there either, and tells it
            if not self.journal.folder.is_dir():
                self.anew()
            self.journal.metrics.settle()
        self.pace.taken()
        return self.journal.folder / FOLDER

    def _validation(self, step: int) -> Evaluated | None:
        validation = self.journal.plan.training.validation
        if validation is None or (step % validation.every and step < self.journal.target):
            return None
        return validated(self.ranks, self.journal.plan, f"validating after step {step}")

    def _check(self, metric: Metric) -> None:
        """Stop if nothing is learnt, and before a broken model's checkpoints replace a good one's.

        A run that has changed no weight by its last step fails, too.
        """
        journal = self.journal
        nothing = journal.idle == journal.done == journal.target
        if nothing or 0 < self.most_skipped <= journal.idle:
            raise DivergedError(told(metric, journal.idle, graph_of(journal.plan).layers))
        if metric.loss is not None or metric.skipped or metric.uncounted:
            return
        for path in checkpoints(self.journal.folder):
            if step_of(path) >= metric.step - 1:  # this loss is of those weights
                remove(path)
        kept = ""
        if (newest := newest_step(self.journal.folder)) is not None:
            kept = (
                f"The last good checkpoint is of step {newest}, and the same steps from there "
                "would end in the same way. "
            )
        raise DivergedError(
            f"the loss of step {metric.step} is not a finite number, and nothing kept its "
            f"gradients from the weights. {kept}Start a new run with clip_norm, which skips such "
            "steps, a lower learning rate or a warm-up"
        )

    def _tidy(self, metric: Metric) -> None:
        """Remove old checkpoints once this step's loss shows that the newest is a good one."""
        newest = newest_step(self.journal.folder)
        if self.keep and newest is not None and newest < metric.step:
            prune(self.journal.folder, self.keep)

    def _save(self, show: Show) -> None:
        """The state as it is now, unless that is on the disk already."""
        journal = self.journal
        if self.keep == 0 or journal.done in (0, newest_step(journal.folder)):
            return
        path = self._last(show)
        if newest_step(journal.folder) != journal.done:
            raise CheckpointError(
                f"the workers wrote the checkpoint {path}, and it is not there as seen from here: "
                "the run folder has to be on a file system that all nodes share (--run-dir)"
            )
        prune(journal.folder, self.keep)
        show.say(f"Checkpoint of step {journal.done} written")

    def _last(self, show: Show) -> Path:
        """The last checkpoint, tried again for a while where it cannot be written.

        With the ranks would go all that they learnt since the checkpoint before. Only a second
        Ctrl-C gives up earlier, or a run folder that is gone and cannot be made again, as no
        waiting brings it back. Raises CheckpointError.
        """
        end, told = time.monotonic() + PATIENCE, False
        while True:
            try:
                paths = self.ranks.ask("save", self._folder(), doing="writing the last checkpoint")
            except CheckpointError as error:
                if not self.journal.folder.is_dir():
                    raise CheckpointError(
                        f"the run folder {self.journal.folder} is gone, so the state of step "
                        f"{self.journal.done} is lost: {error}"
                    ) from error
                if time.monotonic() >= end:
                    raise
                if not told:
                    show.say(f"{error}. Trying again for {PATIENCE / 60:.0f} minutes")
                told = True
                time.sleep(PAUSE)
            else:
                return Path(paths[0])


def validated(ranks: Ranks, plan: Plan, doing: str) -> Evaluated:
    """The mean loss of the ranks' weights on the plan's validation data, of pairs with rewards."""
    if plan.training.preference is not None:
        found: Evaluated = ranks.ask("evaluate_pairs", doing=doing)[0]
        return found
    return Evaluated(float(ranks.ask("evaluate", doing=doing)[0]))


def _of_record(trouble: str) -> str:
    return (
        f"The run's record cannot be written ({trouble}). Training goes on, and the steps are "
        "written down once there is room: free space there, or put the folder back"
    )
