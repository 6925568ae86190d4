"""`bigplan plan` and `bigplan simulate`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.given import experiment_of
from bigplan.cli.inputs import checked_plan, files_read, refuse_plan, warnings
from bigplan.cli.options import ExperimentOptions
from bigplan.cli.spread import takes
from bigplan.effort import Effort
from bigplan.errors import InfeasibleError, LateError
from bigplan.plan import Plan
from bigplan.spec.experiment import Experiment
from bigplan.targets import PLAN, TRACE, require_target

if TYPE_CHECKING:  # the solver is slow to import, and `--help` needs none of it
    from bigplan.cheapest import Tried
    from bigplan.cli.waiting import Waiting
    from bigplan.engines import Chosen
    from bigplan.largest import Largest
    from bigplan.planner import Request
    from bigplan.runnable import Runnable
    from bigplan.whatif import Answer

WHAT_IF = typer.Option(
    "--what-if/--no-what-if",
    help="Solve again with another drive, more memory, another node: what would help "
    "(default: as far as it takes no time worth mentioning).",
)
TIME_LIMIT = typer.Option(
    "--time-limit", min=0.0, help="Seconds after which the best plan so far is taken, with its gap."
)
LARGEST = typer.Option(
    "--largest",
    help="Look for the longest sequence, the most layers and the largest micro-batch that fit.",
)
EFFORT = typer.Option("--effort", help="high: improve plans in up to 400 more simulations.")

# Changes that would help are solved unasked within so many seconds from the start of planning. With
# imports, a plan of one machine then stays below a second.
UNASKED = 0.4
ADAPTERS_SECONDS = 10.0  # search time for a plan that trains adapters alone, where nothing fits
BATCH_SECONDS = 2.0  # search time for a larger batch, unasked, where this one splits badly


@dataclass(frozen=True)
class PlanCommandOptions(ExperimentOptions):
    """What to plan, how hard to search, and what to show of the plan."""

    exact: Annotated[
        bool, typer.Option("--exact", help="Try every placement: small problems only.")
    ] = False
    effort: Annotated[Effort, EFFORT] = Effort.USUAL
    what_if: Annotated[bool | None, WHAT_IF] = None
    largest: Annotated[bool, LARGEST] = False
    time_limit: Annotated[float | None, TIME_LIMIT] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the plan to this file; only a plan is replaced."),
    ] = None
    as_json: AsJson = False


@takes(PlanCommandOptions)
def plan(
    options: PlanCommandOptions,
    experiment: Annotated[
        Path | None, typer.Argument(help="Experiment YAML; options win over its keys.")
    ] = None,
) -> None:
    """Find the fastest way to train a model on a cluster. Needs no GPU.

    Ctrl-C takes the best plan so far, with its gap. Exit codes: 0 planned, 2 bad input, 3 nothing
    fits.
    """
    wanted, limit = _wanted(experiment, options), options.time_limit
    try:
        planned = plan_experiment(
            wanted, exact=options.exact, effort=options.effort, time_limit=limit
        )
    except InfeasibleError as error:
        if not isinstance(error, LateError):
            if options.what_if:
                _say_what_would_fit(wanted)
            _say_whether_adapters_fit(wanted)
        raise
    if options.out is not None:
        from bigplan.plan import save_plan

        save_plan(planned.plan, options.out)
    if planned.interrupted:
        if options.what_if or options.largest:
            told = "note: --what-if and --largest are left out: Ctrl-C ended the planning"
            Console(stderr=True).print(told, highlight=False)
        options = replace(options, what_if=False, largest=False)
    if options.as_json:
        _print_json(planned, options)
    else:
        _show(planned, options)
        if options.out is not None:
            Console().print(f"Plan written to {options.out}", highlight=False)
    for text in warnings(planned.plan.model, planned.plan.training):
        Console(stderr=True).print(f"warning: {text}", highlight=False, markup=False)


def _print_json(planned: PlanAnswer, options: PlanCommandOptions) -> None:
    from bigplan.report.plan_json import plan_json

    runnable = planned.best_runnable(options.time_limit)
    answer = planned.what_would_help(None, options.time_limit) if options.what_if else None
    found = planned.largest(options.time_limit) if options.largest else None
    shown = plan_json(planned.plan, planned.seconds, runnable, answer, found)
    print_json(shown | {"nodes_tried": _tried_json(planned)})


def _wanted(path: Path | None, options: PlanCommandOptions) -> Experiment:
    """The experiment to plan, after checking that --out can be written. Raises InputError."""
    if path is not None:
        refuse_plan(path)
    wanted = experiment_of(path, options)
    if options.out is not None:
        require_target("--out", options.out, PLAN, files_read(wanted, path))
    return wanted


def _show(planned: PlanAnswer, options: PlanCommandOptions) -> None:
    """Show the plan at once, then what would help; unasked, only what takes almost no time."""
    from bigplan.report.plan_report import plan_report
    from bigplan.report.tables import help_report, largest_table

    console, what_if = Console(), options.what_if
    runnable = planned.best_runnable(options.time_limit)
    console.print(plan_report(planned.plan, planned.seconds, runnable))
    if planned.tried:
        from bigplan.report.bill import nodes_table

        console.print(nodes_table(planned.tried, planned.plan.cluster.nodes))
    if what_if is not False:
        within = None if what_if else UNASKED
        console.print(help_report(planned.what_would_help(within, options.time_limit)))
    if options.largest:
        console.print(largest_table(planned.largest(options.time_limit)))


def _tried_json(planned: PlanAnswer) -> list[dict[str, object]] | None:
    return [asdict(tried) for tried in planned.tried] or None


@dataclass(frozen=True)
class PlanAnswer:
    """A plan, the request that it answers, and the seconds its search took."""

    request: Request
    plan: Plan
    seconds: float
    chosen: Chosen | None = None  # where the experiment leaves the engine open
    tried: tuple[Tried, ...] = ()  # numbers of nodes, where the cheapest plan was asked for
    interrupted: bool = False  # the search, by Ctrl-C: no other follows

    def best_runnable(self, time_limit: float | None = None) -> Runnable:
        """The best plan that runs today; where this one does not, a search takes the time left."""
        from bigplan.cli.waiting import Waiting
        from bigplan.runnable import Runnable, best_runnable

        if self.chosen is not None and self.plan.executable[self.plan.engine] is True:
            return Runnable(self.plan, chosen=self.chosen)
        left = None if time_limit is None else max(0.0, time_limit - self.seconds)
        with Waiting("Planning what runs today", left) as waiting:
            return best_runnable(self.request, self.plan, waiting.go_on)

    def what_would_help(
        self, seconds: float | None = None, time_limit: float | None = None
    ) -> Answer:
        """Changes solved again for `time_limit`; those that would end later than `seconds` after
        the start of planning are left out. Each is expected to take as long as the plan did. A
        larger batch is asked for in any case, with `seconds` for as long as the plan took, but
        BATCH_SECONDS.
        """
        from bigplan.cli.waiting import Waiting
        from bigplan.whatif import what_would_help

        with Waiting("Solving again", time_limit) as waiting:

            def go_on() -> bool:
                spent = self.seconds + waiting.seconds
                in_time = seconds is None or spent + self.seconds <= seconds
                return in_time and waiting.in_time

            limit = min(self.seconds, BATCH_SECONDS)

            def brief(best: float | None, bound: float, left: int) -> bool:
                return waiting.go_on(best, bound, left) and waiting.seconds < limit

            return what_would_help(
                self._of_its_engine(),
                self.plan,
                go_on,
                waiting.go_on,
                None if seconds is None else brief,
            )

    def largest(self, time_limit: float | None = None) -> list[Largest]:
        """The longest sequence, the deepest model and the largest micro-batch that fit."""
        from bigplan.cli.waiting import Waiting
        from bigplan.largest import largest_that_fit

        with Waiting("Looking for the largest", time_limit) as waiting:

            def watch(best: float | None, bound: float, left: int) -> bool:
                return waiting.go_on(best, bound, left) and waiting.in_time

            request = self._of_its_engine()
            found = list(largest_that_fit(request, self.plan, lambda: waiting.in_time, watch))
        if not waiting.in_time:
            told = "the search for the largest was stopped: where it names none that does not fit,"
            Console(stderr=True).print(f"note: {told} larger ones may", highlight=False)
        return found

    def _of_its_engine(self) -> Request:
        """The request for the chosen engine; otherwise each solve would choose an engine anew."""
        runs = self.plan.executable[self.plan.engine] is True
        engine = self.plan.engine if runs and self.chosen else self.request.engine
        return replace(self.request, engine="any" if engine == "auto" else engine)


def plan_experiment(
    experiment: Experiment,
    *,
    exact: bool = False,
    effort: Effort = Effort.USUAL,
    time_limit: float | None = None,
    keeps_best: bool = True,
) -> PlanAnswer:
    """The plan of an experiment; Ctrl-C `keeps_best` or ends the program. Raises BigplanError."""
    from bigplan.cheapest import cheapest, require_in_time
    from bigplan.cli.waiting import Waiting
    from bigplan.planner import Request

    request = replace(Request.of(experiment, exact=exact), effort=effort)
    if experiment.prefer == "fastest":
        answer = plan_request(request, time_limit, keeps_best=keeps_best)
        require_in_time(answer.plan, experiment.within)
        return answer
    title = f"Planning {request.model.name}"
    with Waiting(title, time_limit, keeps_best=keeps_best) as waiting:
        found = cheapest(
            request,
            experiment.within,
            lambda request: _planned(request, waiting),
            lambda: not waiting.interrupted,
        )
        return replace(found.best, seconds=waiting.seconds, tried=found.tried)


def plan_request(
    request: Request, time_limit: float | None = None, *, keeps_best: bool = True
) -> PlanAnswer:
    """The fastest plan of a request; Ctrl-C as in plan_experiment. Raises BigplanError."""
    from bigplan.cli.waiting import Waiting

    title = f"Planning {request.model.name}"
    with Waiting(title, time_limit, keeps_best=keeps_best) as waiting:
        return _planned(request, waiting)


def _planned(request: Request, waiting: Waiting) -> PlanAnswer:
    from bigplan.engines import chosen, make_plan

    found = chosen(request, waiting.go_on) if request.engine == "auto" else None
    plan = found.plan if found else make_plan(request, waiting.go_on)
    if plan.cluster.members:  # further questions are about these groups
        request = replace(request, cluster=plan.cluster)
    return PlanAnswer(request, plan, waiting.seconds, found, interrupted=waiting.interrupted)


def _say_what_would_fit(experiment: Experiment) -> None:
    """On stderr: which changes make a plan possible."""
    from bigplan.cli.waiting import Waiting
    from bigplan.planner import Request
    from bigplan.report.tables import help_report
    from bigplan.spec.mixed import choices
    from bigplan.whatif import what_would_help

    with Waiting("Solving again") as waiting:
        request = Request.of(experiment)
        request = replace(request, cluster=choices(request.cluster)[-1])  # most groups of a mix
        answer = what_would_help(request, None, lambda: not waiting.interrupted, waiting.go_on)
    Console(stderr=True).print(help_report(answer))


def _say_whether_adapters_fit(experiment: Experiment) -> None:
    """On stderr: that adapters alone can be trained where the whole model cannot."""
    from bigplan.errors import BigplanError
    from bigplan.planner import Request
    from bigplan.spec.files.document import validate
    from bigplan.spec.lora import Lora, check_lora
    from bigplan.spec.training import Training
    from bigplan.units import format_seconds

    request = Request.of(experiment)
    low = " --no-fp8-gemms" if request.training.fp8_gemms else ""
    given = request.training.model_dump() | {"fp8_gemms": False}
    if request.training.lora is not None or request.engine not in ("auto", "any", "native"):
        return
    for lora, options in (
        (Lora(rank=16), "--lora-rank 16"),
        (Lora(rank=16, frozen="nf4"), "--lora-rank 16 --lora-frozen nf4"),
    ):
        try:
            check_lora(lora, request.model)
            training = validate({**given, "lora": lora.model_dump()}, Training, "training")
            alone = replace(request, training=training, engine="native")
            seconds = plan_request(alone, ADAPTERS_SECONDS).plan.predicted.step_seconds
        except BigplanError:  # they do not fit either, or do not go with this model
            continue
        told = f"{options}{low} trains adapters alone, which fits: {format_seconds(seconds)} a step"
        Console(stderr=True).print(f"note: {told}", highlight=False)
        return


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan written by `bigplan plan --out`.")],
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Write a trace for ui.perfetto.dev; only a trace is replaced."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a plan's steady step again: its time, and how busy each resource is."""
    from bigplan.engines import engine_of
    from bigplan.report.plan_json import step_json
    from bigplan.report.plan_report import step_report
    from bigplan.spec.files.document import write_text

    if trace is not None:
        require_target("--trace", trace, TRACE, (plan,))
    checked = checked_plan(plan)  # the check has played it again
    if trace is not None:
        write_text(trace, json.dumps(engine_of(checked).timeline(checked).to_chrome()), "trace")
    if as_json:
        print_json(step_json(checked.predicted))
        return
    console = Console()
    console.print(step_report(checked.predicted))
    if trace is not None:
        console.print(f"Trace written to {trace}; open it at ui.perfetto.dev", highlight=False)
