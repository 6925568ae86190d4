"""The metrics for Weights & Biases, by its own library, where that is installed and asked for.

A run that goes on is the same run there. A step that is run again is sent again. Charts are over
`step`, because the library's own step number can never go back.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bigplan.errors import RefusedError
from bigplan.launcher.record import Metric
from bigplan.launcher.tensorboard import scalars
from bigplan.plan import Plan

STEP = "step"


def require_wandb(project: str | None) -> None:
    """Raise RefusedError where a project is named and the library is not installed."""
    if project is not None and find_spec("wandb") is None:
        raise RefusedError(
            "--wandb needs Weights & Biases' library, which is not installed; "
            "run: pip install 'bigplan[wandb]'"
        )


class WandbRun:
    """A run of `project`; `trouble` says why it ended early.

    The library's own variables, such as WANDB_API_KEY and WANDB_MODE=offline, decide whether the
    run is sent at once or kept in the run's folder.
    """

    def __init__(self, project: str, folder: Path, plan: Plan) -> None:
        import wandb

        self.trouble, self._run, self._error = "", None, wandb.Error
        mark = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
        try:
            self._run = wandb.init(
                project=project,
                dir=str(folder),
                name=folder.name,
                id=f"{folder.name}-{mark}",
                resume="allow",
                config=_config(plan),
                settings=wandb.Settings(silent=True, console="off"),
            )
            self._run.define_metric("*", step_metric=STEP)
        except (wandb.Error, OSError) as error:
            self._give_up(error)

    def add(self, metric: Metric) -> None:
        """One more step."""
        if self._run is None:
            return
        try:
            self._run.log({STEP: metric.step, **scalars(metric)})
        except (self._error, OSError) as error:
            self._give_up(error)

    def close(self) -> None:
        """Send what is left."""
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.finish()
        except (self._error, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.trouble = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._run = None


def _config(plan: Plan) -> dict[str, Any]:
    """What tells runs apart."""
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameter_count,
        "engine": plan.engine,
        "strategy": plan.strategy.model_dump(mode="json"),
        "training": plan.training.model_dump(mode="json"),
        "predicted_step_seconds": plan.predicted.step_seconds,
    }
