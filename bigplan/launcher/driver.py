"""One launch: refuse what cannot run, start the ranks, drive the steps, write the record."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from bigplan.capabilities.native import gpu_refusal, native_refusal
from bigplan.engines import Engine, engine_of
from bigplan.errors import (
    CheckpointError,
    LostError,
    NoRoomError,
    RefusedError,
)
from bigplan.graph.strategy import Strategy
from bigplan.launcher import places, preflight
from bigplan.launcher.actor import Folders, WorkerType
from bigplan.launcher.checkpoints import (
    FOLDER,
    Pace,
    checkpoints,
    more_at_once,
    newest_step,
    remove,
    require_space,
    set_aside,
    step_of,
    sweep,
)
from bigplan.launcher.crew import Crew
from bigplan.launcher.elastic import find_nodes, may_grow
from bigplan.launcher.ending import ending
from bigplan.launcher.journal import Journal
from bigplan.launcher.launched import Launched
from bigplan.launcher.leftovers import listed
from bigplan.launcher.lock import forget, only_launch, wait_for_workers
from bigplan.launcher.patience import Patience
from bigplan.launcher.placing import Layout, require_gpus
from bigplan.launcher.progress import Promise, progress
from bigplan.launcher.record import (
    MEASURED,
    PLAN,
    SUMMARY,
    Asked,
    keep_plan,
    new_folder,
    read_metrics,
    read_summary,
    write_start,
)
from bigplan.launcher.references import References
from bigplan.launcher.resume import (
    Resumable,
    decaying_until,
    refuse_done,
    refuse_other_training,
    refuse_without_rate,
    shown,
)
from bigplan.launcher.session import Session, ray_session
from bigplan.launcher.steps import Steps
from bigplan.launcher.weights_and_biases import require_wandb
from bigplan.plan import Plan, load_plan
from bigplan.spec.experiment import LaunchSpec
from bigplan.units import counted


@dataclass(frozen=True)
class LaunchOptions:
    """How to run a plan; `resume` is the run that goes on with it.

    `asked`: what the plan was asked for with; by default what it is.
    """

    how: LaunchSpec = field(default_factory=LaunchSpec)
    resume: Resumable | None = None
    asked: Asked | None = None


def launch(
    plan: Plan,
    options: LaunchOptions,
    console: Console | None = None,
    worker: WorkerType | None = None,
) -> Path:
    """Run the plan; the folder of the record. `worker` replaces the engine's.

    Raises BigplanError, and KeyboardInterrupt where it was stopped; what was measured until then
    is on record, and the last checkpoint is named.
    """
    engine = engine_of(plan)
    refuse_unlaunchable(plan, engine)
    require_wandb(options.how.wandb)
    target, resumes = options.how.steps or plan.training.steps, options.resume is not None
    if options.resume is not None:
        folder = options.resume.folder.absolute()
        refuse_other_training(options.resume.plan, plan.model, plan.training)
        refuse_done(folder, target)
        refuse_without_rate(plan.training, target)
    else:
        plan = decaying_until(plan, target)
        folder = new_folder(Path(options.how.run_dir).expanduser().absolute(), plan.model.name)
    how = options.how.model_copy(update={"steps": target})
    journal = Journal(plan, folder, target, how.tensorboard, how.wandb)
    asked = options.asked or Asked(engine=plan.engine, nodes=plan.cluster.nodes)
    launched = Launched(plan, how, journal, console or Console(), worker, asked)
    with (
        only_launch(folder),
        listed(*astuple(launched.folders)) as launched.listed,  # for others, should it be killed
        launched.stop,
        ending(launched, resumes=resumes),
    ):
        if options.resume is not None:
            _prepare(launched, options.resume.plan)
        else:
            _write_down(launched)
        _require_machine(launched)
        _announce(launched)
        prepare_engine(launched, engine)
        with_ray(launched, _until_done)
    return folder


def refuse_unlaunchable(plan: Plan, engine: Engine) -> None:
    """Raise RefusedError for what no launch, or none here, can run."""
    if untried := gpu_refusal(plan.cluster.group.gpu, plan.model, plan.training):
        raise RefusedError(f"this plan cannot be launched: {untried}")
    if refusal := engine.refusal(plan.model, plan.training, plan.strategy):
        plain = Strategy(dp=plan.strategy.ranks)
        always = native_refusal(plan.model, plan.training, plain)  # however the work is split
        advice = "" if always else ". Plan with --engine native for one that can"
        raise RefusedError(f"this plan cannot be launched: {refusal}{advice}")
    if missing := engine.missing():
        raise RefusedError(f"this plan cannot be launched here: {missing}")


def _require_machine(launched: Launched) -> None:
    """Raise PreflightError where GPUs are missing, or space for checkpoints; what matters first."""
    plan, run = launched.plan, launched.folders.run
    if launched.address is None:
        require_gpus(Layout.of(plan))
    require_space(run, plan, launched.folders.scratch, more_at_once(run, plan, launched.how))


def _prepare(launched: Launched, before: Plan) -> None:
    """Clear away what a killed launch left; keep its plan."""
    folders = launched.folders
    clear_away(folders)
    if (folders.run / SUMMARY).exists():
        launched.journal.follow(read_summary(folders.run))
    if before != launched.plan:
        launched.journal.replan(launched.plan, "the run was resumed with it")


def _write_down(launched: Launched) -> None:
    """Have the plan, and how it is launched, on record for a resumption; keep the plan before.

    A run that goes on does so once its ranks have their state, and the reference of pairs. A plan
    that cannot go on, as it does not fit, or the checkpoint or the reference is not its own, must
    not take the place of one that can.
    """
    folder, plan = launched.journal.folder, launched.plan
    if launched.written == plan:
        return
    if (folder / PLAN).exists() and load_plan(folder / PLAN) != plan:
        keep_plan(folder, launched.journal.done)
        (folder / MEASURED).unlink(missing_ok=True)  # of the plan before
    write_start(folder, plan, launched.how, launched.asked, engine_of(plan).timeline(plan))
    launched.written = plan


def _write_anew(launched: Launched) -> None:
    """Make the folder of a run again where somebody removed it: its next checkpoint can go on."""
    launched.journal.folder.mkdir(parents=True)
    launched.written = None
    _write_down(launched)


def clear_away(folders: Folders, lost: Sequence[int] = ()) -> None:
    """Remove what killed workers left, once they have ended.

    Ranks that were `lost` with their node are not waited for.
    """
    forget(folders.run, lost)
    wait_for_workers(folders.run)
    sweep(folders.run)
    for name in (preflight.MARK, places.MARK):
        for mark in folders.run.glob(f"{name}*"):
            mark.unlink(missing_ok=True)
    _drop_unrecorded(folders.run)
    shutil.rmtree(folders.scratch, ignore_errors=True)


def prepare_engine(launched: Launched, engine: Engine) -> None:
    """What an engine does once for a machine; on a cluster each rank does it if it is still undone.

    Without a terminal no line can be updated, so the user is told once.
    """
    if launched.address is not None:
        return
    said = list[str]()
    with launched.console.status(f"Preparing {engine.name}") as status:

        def tell(text: str) -> None:
            status.update(text)
            if not launched.console.is_terminal and not said:
                said.append(text)
                launched.say(text)

        engine.prepare(launched.plan, tell)


def with_ray(launched: Launched, work: Callable[[Launched], None]) -> None:
    """Work in the Ray of the launch, a local one or the cluster's."""
    layout = Layout.of(launched.plan)
    try:
        with ray_session(launched.address, layout.cores * layout.ranks, layout.cuda) as session:
            _take(launched, session)
            try:
                work(launched)
            finally:
                shutil.rmtree(launched.folders.scratch, ignore_errors=True)
    finally:
        sweep(launched.folders.run)  # a checkpoint on its way when the ranks were ended


def _until_done(launched: Launched) -> None:
    """Train; if a rank is lost, go on from the newest good checkpoint with fresh ranks."""
    journal, stop, patience = launched.journal, launched.stop, Patience(launched.how.max_restarts)
    if launched.how.elastic:
        find_nodes(launched)
    while True:
        try:
            _from_newest(launched)
        except (LostError, NoRoomError) as error:
            # A node may be lost between two looks; at the beginning there never were enough.
            again = journal.begun or isinstance(error, LostError)
            if stop.asked or not again or not patience.again(journal.furthest):
                raise
            stop.patient = False  # all that was to be saved is
            step = newest_step(journal.folder)
            where = "the beginning" if step is None else f"the checkpoint of step {step}"
            launched.say(f"{error}. Starting again from {where}")
            journal.lose(str(error))
            if launched.session is not None:
                launched.session.renew()
                _take(launched, launched.session)
            clear_away(launched.folders, getattr(error, "ranks", ()))
            find_nodes(launched, error)
        else:
            if stop.asked or journal.done == journal.target:
                return
            clear_away(launched.folders)
            find_nodes(launched)


def _take(launched: Launched, session: Session) -> None:
    """Work in that Ray, which has just been started."""
    launched.session = session
    launched.stop.look()
    if launched.listed is not None and session is not None:
        launched.listed.ray(session.folder)


def _from_newest(launched: Launched) -> None:
    """Train on from the newest checkpoint that is good, with fresh workers for each one tried."""
    found = checkpoints(launched.journal.folder)
    bad: list[Path] = []
    for checkpoint in reversed(found):
        with crew_of(launched) as crew:
            try:
                done = start_crew(launched, crew, checkpoint)
            except CheckpointError as error:
                if checkpoint == found[0]:
                    raise
                launched.say(f"{error}. Trying the checkpoint before it")
                bad.append(checkpoint)
            else:
                for path in bad:
                    set_aside(path)
                _train(launched, crew, done)
                return
    with crew_of(launched) as crew:
        _train(launched, crew, start_crew(launched, crew, None))


def _drop_unrecorded(folder: Path) -> None:
    """Remove a checkpoint of the step after the last on record: the run was killed between them.

    Without clipping a step's own checkpoint can be complete before the step is recorded. Such a
    step is run again.
    """
    metrics = read_metrics(folder)
    for path in checkpoints(folder):
        if metrics and step_of(path) == metrics[-1].step + 1:
            remove(path)


@contextmanager
def crew_of(launched: Launched) -> Iterator[Crew]:
    """The ranks of the launch's plan, for the length of a `with` block."""
    crew = Crew(
        launched.plan,
        launched.folders,
        launched.how.interface,
        launched.worker,
        launched.meanwhile,
    )
    try:
        yield crew
    finally:
        session = launched.session
        crew.dismiss(head=session is None or session.head.alive())


def start_crew(launched: Launched, crew: Crew, checkpoint: Path | None) -> int:
    """Let the ranks look at their machines and get their state; the steps done."""
    if (told := crew.prepare()) and told not in launched.said:
        launched.said.add(told)
        launched.say(told)
    crew.ask("preflight", doing="checking its machine")
    return crew.start(checkpoint)


def _train(launched: Launched, crew: Crew, done: int) -> None:
    journal, how = launched.journal, launched.how
    journal.start(done)
    launched.stop.patient = True
    promise = Promise.of(launched.plan)
    stopping = lambda: launched.stop.asked  # noqa: E731 -- as the others below
    with progress(launched.console, done, journal.target, promise) as show:
        wanted = launched.plan.training.preference
        if wanted is not None and wanted.refers:
            References(crew, journal.folder, done).give(show, stopping)
        _write_down(launched)
        (journal.folder / FOLDER).mkdir(exist_ok=True)
        pace = Pace(how.checkpoint_every)
        leaving, anew = partial(may_grow, launched), partial(_write_anew, launched)
        keep, most = how.checkpoint_keep, how.max_skipped
        Steps(crew, journal, keep, pace, stopping, most, leaving, anew).run(show)
    if launched.stop.asked or journal.done == journal.target:
        journal.finished += crew.ask("finish", doing="finishing")
    crew.ask("close", doing="closing")


def _announce(launched: Launched) -> None:
    where = f"the Ray cluster at {launched.address}" if launched.address else "a local Ray"
    ranks, journal = launched.plan.strategy.ranks, launched.journal
    done = newest_step(journal.folder)
    todo = f"steps {done + 1} to {journal.target}" if done else counted(journal.target, "step")
    if done == journal.target:
        todo = f"{counted(done, 'step')} done, the record to close"
    launched.say(
        f"Launching {launched.plan.model.name}: {counted(ranks, 'rank')} on {where}, "
        f"{todo}, record in {shown(journal.folder)}",
    )
