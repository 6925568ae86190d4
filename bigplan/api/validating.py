"""`bigplan.validate`: the cost model against measured training runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigplan.page.html import grids_html
from bigplan.page.sureness import published, validation_grid
from bigplan.validate.quality import Quality, Regret, group_quality, memory_quality, pick_regret
from bigplan.validate.rows import read_rows
from bigplan.validate.score import Scored, score


@dataclass(frozen=True, slots=True)
class Validation:
    """Every run with its prediction, and how good these are table by table.

    `groups`: of step times; `memory`: of peak memory; `picks`: of the run predicted fastest.
    """

    scored: tuple[Scored, ...]
    groups: Mapping[str, Quality]
    memory: Mapping[str, Quality]
    picks: Mapping[str, Regret]

    @property
    def summary(self) -> str:
        """How many runs were predicted."""
        number = sum(one.status == "scored" for one in self.scored)
        return f"{number} of {len(self.scored)} measured runs, each with its own configuration."

    def __repr__(self) -> str:
        return f"<Validation: {self.summary}>"

    def _repr_html_(self) -> str:
        return grids_html(self.summary, validation_grid(dict(self.groups)))


def validate(rows: str | Path | None = None) -> Validation:
    """Predict measured runs: the published ones that are shipped, or those of a CSV file.

    Raises InputError where the file cannot be read.
    """
    scored = published() if rows is None else tuple(score(read_rows(Path(rows).expanduser())))
    return Validation(scored, group_quality(scored), memory_quality(scored), pick_regret(scored))
