"""A launch under way: what its parts share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from bigplan.launcher.actor import Folders, WorkerType
from bigplan.launcher.journal import Journal
from bigplan.launcher.leftovers import Listed
from bigplan.launcher.record import Asked
from bigplan.launcher.session import Session
from bigplan.launcher.stop import Stop
from bigplan.plan import Plan
from bigplan.spec.experiment import LaunchSpec


@dataclass
class Launched:
    """What all of a launch share."""

    plan: Plan
    how: LaunchSpec
    journal: Journal
    console: Console
    worker: WorkerType | None
    asked: Asked
    stop: Stop = field(default_factory=Stop)
    told: bool = False
    session: Session | None = None
    listed: Listed | None = None
    written: Plan | None = None
    """the plan on record, as far as this launch has put it there"""
    said: set[str] = field(default_factory=set)

    @property
    def address(self) -> str | None:
        """The address of a running Ray; None: a local one is started."""
        return None if self.how.address in (None, "local") else self.how.address

    @property
    def folders(self) -> Folders:
        """The record, and scratch on the drives that the cluster names, else beside the record."""
        run, nvme = self.journal.folder, self.plan.cluster.group.nvme
        if nvme is None or nvme.path is None:
            return Folders(run, run / "scratch")
        # Runs of one name in two folders must not share their tensors.
        mark = hashlib.sha256(str(run).encode()).hexdigest()[:8]
        name = f"bigplan-{run.name}-{mark}"
        return Folders(run, Path(nvme.path).expanduser().absolute() / name)

    def say(self, text: str) -> None:
        """Tell the user."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def head_answers(self) -> bool:
        """Whether Ray can be asked. Raises WorkerError where its head is gone for good."""
        if self.session is None:
            return True
        self.session.head.look()
        return self.session.head.alive()

    def meanwhile(self) -> None:
        """Answer the first Ctrl-C while a step runs on; notice where Ray itself is lost."""
        self.stop.look()
        if self.session is not None:
            self.session.head.look()
        if self.stop.asked and not self.told:
            self.told = True
            kept = ", with a checkpoint" if self.how.checkpoint_keep else ""
            self.say(f"Stopping after this step{kept}; Ctrl-C again stops at once")
