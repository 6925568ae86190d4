"""`bigplan report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.inputs import checked_plan
from bigplan.targets import PAGE, PNG, SVG, require_target

if TYPE_CHECKING:
    from bigplan.cli.plan import PlanAnswer
    from bigplan.page.help import Help
    from bigplan.page.parts import Page
    from bigplan.page.subject import Subject
    from bigplan.plan import Plan

# Seconds for changes that would help, where the user asks neither for all nor for none.
UNASKED = 10.0


def report(
    what: Annotated[
        str,
        typer.Argument(
            help="A plan, the folder of a run or of an experiment, a cluster (a file or a shipped "
            "name), or an experiment's file, which is planned first.",
            metavar="PLAN|RUN|CLUSTER|EXPERIMENT",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write one page that loads nothing; only a page is replaced."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write the page's main charts as a picture.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="The same as PNG.")] = None,
    what_if: Annotated[
        bool | None,
        typer.Option(
            "--what-if/--no-what-if",
            help="On a plan's page: solve again with another drive, more memory, another node "
            "(default: as far as ten seconds go).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan, a run, a cluster or an experiment: in the terminal, as a page, as a picture.

    Of a run the terminal has predicted against measured, by resource, by action and by memory tier.
    Exit codes: 0, 2 bad input, also where pages and pictures need the extra `report`.
    """
    from bigplan.page.subject import find_subject

    targets = (("--html", html, PAGE), ("--svg", svg, SVG), ("--png", png, PNG))
    subject = find_subject(what)
    wanted = [target for target in targets if target[1] is not None]
    if not wanted:
        (_print_json if as_json else _print)(subject)
        return
    from bigplan.page.files import write_page
    from bigplan.page.html import require_library

    require_library()
    for option, path, kind in wanted:
        assert path is not None
        require_target(option, path, kind, [Path(what)])
    write_page(_page(subject, what_if), html, svg, png)
    _tell([str(path) for _, path, _ in wanted], as_json=as_json)


def _tell(written: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"written": written})
        return
    text = f"Written: {', '.join(written)}"
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _print(subject: Subject) -> None:
    """In a terminal: a plan's tables, a run's comparison, a cluster's YAML, all points."""
    from bigplan.page.subject import Cluster, Experiment, PlanFile, Record, StudyOutcome

    console = Console()
    match subject:
        case PlanFile():
            _print_plan(checked_plan(subject.path, subject.plan), console)
        case Record():
            from bigplan.report.run_report import run_report

            console.print(run_report(subject))
        case Cluster():
            from bigplan.spec.files.dump import to_yaml

            print(to_yaml(subject), end="")
        case StudyOutcome():
            from bigplan.experiment.shown import outcome_report

            console.print(outcome_report(subject))
        case Experiment():
            from bigplan.cli.plan import plan_experiment

            _print_plan(plan_experiment(subject).plan, console)


def _print_json(subject: Subject) -> None:
    """The same contents as one JSON object."""
    from bigplan.page.subject import Cluster, Experiment, PlanFile, Record, StudyOutcome
    from bigplan.report.plan_json import plan_facts

    match subject:
        case PlanFile():
            print_json(plan_facts(checked_plan(subject.path, subject.plan)))
        case Record():
            from bigplan.report.run_report import run_json

            print_json(run_json(subject))
        case Cluster():
            print_json({"cluster": subject.model_dump()})
        case StudyOutcome():
            from bigplan.cli.experiment import outcome_json

            print_json(outcome_json(subject))
        case Experiment():
            from bigplan.cli.plan import plan_experiment

            print_json(plan_facts(plan_experiment(subject).plan))


def _print_plan(plan: Plan, console: Console) -> None:
    from bigplan.report.decision import decision
    from bigplan.report.plan_report import plan_tables
    from bigplan.report.stages import stages_of

    console.print(decision(plan, stages_of(plan)), highlight=False)
    for part in plan_tables(plan):
        console.print(part)


def _page(subject: Subject, what_if: bool | None) -> Page:
    from bigplan.page.cluster_page import cluster_page
    from bigplan.page.experiment_page import experiment_page
    from bigplan.page.plan_page import plan_page
    from bigplan.page.run_page import run_page
    from bigplan.page.subject import Cluster, Experiment, PlanFile, Record, StudyOutcome

    match subject:
        case PlanFile():
            plan = checked_plan(subject.path, subject.plan)
            return plan_page(plan, None if what_if is False else _solved_again(plan, what_if))
        case Record():
            return run_page(subject)
        case Cluster():
            return cluster_page(subject)
        case StudyOutcome():
            return experiment_page(subject)
        case Experiment():
            from bigplan.cli.plan import plan_experiment

            planned = plan_experiment(subject)
            return plan_page(planned.plan, None if what_if is False else _help(planned, what_if))


def _help(planned: PlanAnswer, what_if: bool | None) -> Help:
    from bigplan.page.help import Help

    limit = None if what_if else planned.seconds + UNASKED
    return Help(planned.plan.predicted.step_seconds, planned.what_would_help(limit))


def _solved_again(plan: Plan, what_if: bool | None) -> Help:
    """Changes compared with a free plan, because a plan's file does not say what was pinned."""
    from bigplan.cli.plan import plan_request
    from bigplan.planner import Request

    return _help(plan_request(Request.of_plan(plan)), what_if)
