"""`bigplan.launch`, and the run that it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Self, Unpack

from rich.console import Console

from bigplan.api.keys import LaunchKeys
from bigplan.api.planning import Plan
from bigplan.errors import InputError
from bigplan.launcher.inputs import require_inputs
from bigplan.launcher.record import Record, read_record
from bigplan.launcher.resume import read_resumable
from bigplan.page.files import write_page
from bigplan.page.html import grids_html
from bigplan.page.parts import grid
from bigplan.page.run_page import run_page
from bigplan.plan import Plan as Decided
from bigplan.report.run_report import comparisons, headline_lines, memory_comparison
from bigplan.spec.experiment import LaunchSpec
from bigplan.spec.files.document import validate
from bigplan.system import require_linux


class Run(Record):
    """A run's folder, read: `metrics`, `summary`, `plan`, and the steps predicted and measured."""

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a run that `bigplan launch` wrote. Raises InputError."""
        return cls(**vars(read_record(Path(folder).expanduser())))

    def report(
        self,
        html: str | Path | None = None,
        svg: str | Path | None = None,
        png: str | Path | None = None,
    ) -> None:
        """Write the run's page, or its picture.

        Raises RefusedError without bigplan[report], InputError where a file cannot be written.
        """
        write_page(run_page(self), html, svg, png)

    def __repr__(self) -> str:
        return f"<Run: {'; '.join(line.rstrip('.') for line in headline_lines(self))}>"

    def _repr_html_(self) -> str:
        tables = (*comparisons(self), memory_comparison(self))
        first, *others = headline_lines(self)
        return grids_html(first, *(grid(table) for table in tables), lines=others)


def launch(
    plan: Decided | str | Path | None = None,
    *,
    resume: str | Path | None = None,
    quiet: bool = False,
    **keys: Unpack[LaunchKeys],
) -> Run:
    """Run a plan through Ray, here or on the cluster at `address`, and read back what happened.

        bigplan.launch(bigplan.plan(model="tiny-llama-demo", cluster="cluster.yaml"), steps=20)
        bigplan.launch(resume="runs/my-model-1", steps=100)

    `plan` is a plan or its file. `resume` is the folder of a run that goes on from its newest
    checkpoint, with its own plan or another one; `keys` are those of `launch:` in an experiment.
    `quiet` prints nothing while it runs. Needs bigplan[launch].
    Raises BigplanError: its subclasses are the exit codes of the command.
    """
    require_linux("launch")
    from bigplan.launcher.driver import LaunchOptions
    from bigplan.launcher.driver import launch as launch_plan
    from bigplan.launcher.session import require_packages

    require_packages()
    run = None if resume is None else read_resumable(Path(resume).expanduser())
    if run is not None and "run_dir" in keys:
        raise InputError(
            f"bigplan.launch: run_dir: a resumed run stays in its folder, {run.folder}"
        )
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    if plan is None:
        if run is None:
            raise InputError("bigplan.launch: name a plan, its file, or a run to resume")
        plan = run.plan
    console = Console(quiet=quiet)
    before = {} if run is None else run.how.model_dump()
    how = validate({**before, **keys}, LaunchSpec, "bigplan.launch")
    if how.address in (None, "local"):
        note = require_inputs(plan.model, plan.training, weights=run is None)
        if note:
            console.print(note, markup=False)
    asked = None if run is None else run.asked
    folder = launch_plan(plan, LaunchOptions(how, run, asked), console)
    return Run.load(folder)
