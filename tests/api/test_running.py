"""Launches from Python, with workers that only count."""

from pathlib import Path

import pytest

import bigplan
from bigplan.errors import InputError
from tests.launcher.fakes import without_ray
from tests.tiny import tiny_plan

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture
def run(tmp_path: Path) -> bigplan.Run:
    plan = bigplan.Plan.of(tiny_plan())
    return bigplan.launch(plan, run_dir=str(tmp_path), checkpoint_every=2, quiet=True)


def test_a_run_is_read_back(run: bigplan.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.summary.status == "finished"
    assert [metric.step for metric in run.metrics] == [1, 2, 3]
    assert run.plan == tiny_plan()
    assert bigplan.Run.load(run.folder) == run
    shown = run._repr_html_()
    assert "3 steps in" in shown
    assert "One steady step by resource" in shown
    told = repr(run)  # what a terminal shows: no plan, no events
    assert told.startswith(f"<Run: {run.folder.name}: tiny-llama-test")
    assert "3 steps in" in told
    assert len(told) < 1000
    assert capsys.readouterr().out == ""


def test_a_run_goes_on(run: bigplan.Run) -> None:
    longer = bigplan.launch(resume=run.folder, steps=5, quiet=True)
    assert longer.folder == run.folder
    assert [metric.step for metric in longer.metrics] == [1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="run_dir: a resumed run stays in its folder"):
        bigplan.launch(resume=run.folder, steps=7, run_dir="elsewhere")


def test_a_plan_by_its_file(tmp_path: Path) -> None:
    path = bigplan.Plan.of(tiny_plan()).save(tmp_path / "plan.yaml")
    run = bigplan.launch(path, run_dir=str(tmp_path / "runs"), steps=1, quiet=True)
    assert len(run.metrics) == 1


def test_what_cannot_be_launched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a plan.* or a run"):
        bigplan.launch()
    with pytest.raises(InputError, match="unknown key 'stps'"):
        bigplan.launch(bigplan.Plan.of(tiny_plan()), stps=3)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="steps"):
        bigplan.launch(bigplan.Plan.of(tiny_plan()), steps=0)


def test_a_page(run: bigplan.Run, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    run.report(html=tmp_path / "run.html")
    assert "Measured and predicted" in (tmp_path / "run.html").read_text()
