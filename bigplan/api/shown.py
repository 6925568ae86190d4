"""Results of a plan's methods: report values that notebooks show as tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bigplan.page.help import Help
from bigplan.page.html import grids_html
from bigplan.page.parts import grid
from bigplan.plan import Predicted
from bigplan.report import explain as explained
from bigplan.report.explain import (
    advice_lines,
    efficiency_lines,
    moves_table,
    operators_table,
)
from bigplan.report.tables import batch_text, bound_text, busy_table, help_table
from bigplan.report.text import seconds_text
from bigplan.spec.files.document import write_text
from bigplan.targets import TRACE, require_target
from bigplan.timeline import Timeline


class Explanation(explained.OperatorExplanation):
    """Why a plan takes as long as it does."""

    @classmethod
    def of(cls, found: explained.OperatorExplanation) -> Self:
        """The report's explanation with its tables."""
        return cls(**vars(found))

    def to_json(self) -> dict[str, Any]:
        """What `bigplan explain --json` prints: seconds, FLOPs, bytes; shares from 0 to 1."""
        return explained.explain_json(self)

    def __repr__(self) -> str:
        return f"<Explanation: {self.headline} Bound by: {self.bound_by}.>"

    def _repr_html_(self) -> str:
        layers = [row for row in self.rows if row.of_layers]
        moves = [row for row in self.rows if not row.of_layers]
        return grids_html(
            f"{self.headline} Bound by: {self.bound_by}.",
            grid(operators_table(layers)),
            grid(moves_table(moves)),
            lines=(*efficiency_lines(self.efficiency, self.monitor), *advice_lines(self)),
        )


@dataclass(frozen=True)
class Simulation(Timeline):
    """A steady step: `events`, `seconds`, and the plan's promise of it."""

    predicted: Predicted

    def save(self, path: str | Path) -> Path:
        """Write a trace for ui.perfetto.dev; only a trace is replaced. Raises InputError."""
        where = Path(path).expanduser()
        require_target("path", where, TRACE)
        write_text(where, json.dumps(self.to_chrome()), "trace")
        return where

    def __repr__(self) -> str:
        bound, step = bound_text(self.predicted), seconds_text(self.seconds)
        return f"<Simulation: a step of {step} in {len(self.events)} events, bound by {bound}>"

    def _repr_html_(self) -> str:
        path = self.predicted.critical_path
        return grids_html(
            f"One step: {seconds_text(self.seconds)}. Bound by: {bound_text(self.predicted)}.",
            grid(busy_table(self.predicted.busy_seconds, path, self.seconds)),
        )


class WhatWouldHelp(Help):
    """Changes of the cluster, each solved again."""

    def _repr_html_(self) -> str:
        step = seconds_text(self.before_seconds)
        lines = [] if self.answer.batch is None else [batch_text(self.answer.batch)]
        lines += [f"Not asked for lack of time: {change}." for change in self.answer.unasked]
        return grids_html(
            f"As it is: {step} a step.", grid(help_table(self.answer.outcomes)), lines=lines
        )
