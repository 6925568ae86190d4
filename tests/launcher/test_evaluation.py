"""A run's newest checkpoint evaluated, with workers that only count."""

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bigplan.errors import CheckpointError, InputError
from bigplan.interrupted import ToldInterrupt
from bigplan.launcher.driver import launch
from bigplan.launcher.evaluation import Evaluation, evaluate, evaluating
from bigplan.launcher.resume import Resumable, read_resumable
from bigplan.runtime.result import Evaluated
from bigplan.spec.preference import Preference
from bigplan.spec.training import ValidationSpec
from tests.launcher.fakes import Fake, plan_with, quiet, told, without_ray
from tests.launcher.test_references import Paired
from tests.tiny import tiny_plan

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")


def on(folder: Path, data: str) -> Resumable:
    run = read_resumable(folder)
    return replace(run, plan=evaluating(run.plan, ValidationSpec(data=data)))


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path): path.read_bytes() for path in files}


def test_the_newest_checkpoint_and_the_record_as_it_was(tmp_path: Path) -> None:
    folder = launch(tiny_plan(), told(tmp_path, checkpoint_every=2), quiet(), Fake)
    before = content(folder)
    assert evaluate(on(folder, "bundled"), quiet(), Fake) == Evaluation(3, "bundled", 4.0, None)
    assert content(folder) == before


def test_a_damaged_checkpoint_stays_and_none_takes_its_place(tmp_path: Path) -> None:
    folder = launch(tiny_plan(), told(tmp_path, checkpoint_every=2), quiet(), Fake)
    (folder / "checkpoints" / "step-000003" / "state").write_text("damaged")
    before = content(folder)
    with pytest.raises(CheckpointError, match="damaged"):
        evaluate(on(folder, "bundled"), quiet(), Fake)
    assert content(folder) == before


def test_without_a_checkpoint(tmp_path: Path) -> None:
    folder = launch(tiny_plan(), told(tmp_path, checkpoint_keep=0), quiet(), Fake)
    with pytest.raises(InputError, match="cannot be evaluated"):
        evaluate(on(folder, "bundled"), quiet(), Fake)


class Rewarded(Paired):
    """Its pairs have a reward."""

    def evaluate_pairs(self) -> Evaluated:
        return Evaluated(self.loss(), {"accuracy": 0.75})


def test_pairs_by_the_reference_that_the_run_has(tmp_path: Path) -> None:
    paired = {"preference": Preference(method="dpo"), "isolate_documents": True}
    plan = plan_with(**paired, validation=ValidationSpec(data="held-out"))
    folder = launch(plan, told(tmp_path), quiet(), Rewarded)
    found = evaluate(on(folder, "held-out"), quiet(), Rewarded)
    assert (found.loss, found.rewards, found.perplexity) == (2.0, {"accuracy": 0.75}, None)
    with pytest.raises(InputError, match="of all pairs of validation"):
        evaluate(on(folder, "other"), quiet(), Rewarded)


def test_perplexity() -> None:
    assert Evaluation(1, "a", math.log(50.0), None).perplexity == pytest.approx(50.0)
    for loss in (1e3, math.inf, math.nan):
        assert Evaluation(1, "a", loss, None).perplexity is None


class Interrupted(Fake):
    """Its user loses patience."""

    def evaluate(self) -> float:
        raise KeyboardInterrupt


def test_ctrl_c_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    folder = launch(tiny_plan(), told(tmp_path, checkpoint_every=2), quiet(), Fake)
    before, out = content(folder), StringIO()
    with pytest.raises(ToldInterrupt):
        evaluate(on(folder, "bundled"), Console(file=out, width=500), Interrupted)
    assert out.getvalue().splitlines()[-1] == "Stopped; the run is as it was before"
    assert content(folder) == before
