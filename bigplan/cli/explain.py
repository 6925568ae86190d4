"""`bigplan explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigplan.cli.as_json import AsJson, print_json


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan written by `bigplan plan --out`.")],
    as_json: AsJson = False,
) -> None:
    """Why a plan takes as long as it does: every operator and move, efficiency, and advice."""
    from bigplan.cli.inputs import checked_plan
    from bigplan.report.explain import explain as explained
    from bigplan.report.explain import explain_json

    found = explained(checked_plan(plan))
    if as_json:
        print_json(explain_json(found))
        return
    from rich.console import Console

    from bigplan.report.explain import explain_report

    console = Console()
    console.print(explain_report(found, console.width))
