"""`bigplan report`: pages and pictures of whatever is named, and what is refused."""

from pathlib import Path

import pytest

from bigplan.plan import save_plan
from tests.cli.conftest import Run
from tests.experiment.studies import BASE, SWEEP
from tests.tiny import tiny_plan, write_cluster

vl_convert = pytest.importorskip("vl_convert")


@pytest.fixture
def made(bigplan: Run) -> Run:
    """A plan, a cluster and two experiments lie in the current folder."""
    save_plan(tiny_plan(), Path("plan.yaml"))
    write_cluster(Path())
    Path("one.yaml").write_text(BASE)
    Path("many.yaml").write_text(BASE + SWEEP)
    return bigplan


@pytest.mark.parametrize(
    ("named", "held"),
    [
        ("plan.yaml", "What would help"),
        ("one.yaml", "What would help"),
        ("small.yaml", "Where every number is from"),
        ("dgx-h100", "Where every number is from"),
    ],
)
def test_a_page_of_each(made: Run, named: str, held: str) -> None:
    code, out, err = made("report", named, "--html", "page.html")
    assert (code, out, err) == (0, "Written: page.html\n", "")
    text = Path("page.html").read_text()
    assert held in text
    assert made("report", named, "--html", "page.html", "--no-what-if")[0] == 0  # replaced


def test_an_experiment_and_pictures(made: Run) -> None:
    assert made("experiment", "run", "many.yaml", "--out", "out", "--jobs", "1")[0] == 0
    arguments = ("--html", "a.html", "--svg", "a.svg", "--png", "a.png")
    code, out, _ = made("report", "out", *arguments)
    assert (code, out) == (0, "Written: a.html, a.svg, a.png\n")
    assert "What each point takes" in Path("a.html").read_text()
    assert "Why points failed" in Path("a.html").read_text()
    code, out, _ = made("report", "out")
    assert "3 points, 2 planned" in out


def test_without_a_file_the_terminal_has_it(made: Run) -> None:
    code, out, _ = made("report", "plan.yaml")
    assert code == 0
    assert "Train tiny-llama-test" in out
    assert "Where tensors live" in out
    assert "name: small" in made("report", "small.yaml")[1]
    assert "Train tiny-llama-test" in made("report", "one.yaml")[1]


def test_other_files_are_never_replaced(made: Run) -> None:
    Path("notes.html").write_text("<p>mine")
    code, _, err = made("report", "plan.yaml", "--html", "notes.html")
    assert code == 2
    assert "notes.html exists and is no page" in err
    assert Path("notes.html").read_text() == "<p>mine"
    for option in ("--html", "--svg", "--png"):
        code, _, err = made("report", "plan.yaml", option, "plan.yaml")
        assert code == 2
        assert "input of this command" in err
    code, _, err = made("report", "plan.yaml", "--png", "nowhere/a.png")
    assert "the folder nowhere does not exist" in err


def test_without_the_library(made: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigplan.page.html.find_spec", lambda name: None)
    code, out, err = made("report", "plan.yaml", "--html", "page.html")
    assert (code, out) == (2, "")
    assert "pip install 'bigplan[report]'" in err
    assert made("report", "plan.yaml")[0] == 0


def test_many_points_are_run_first(made: Run) -> None:
    code, _, err = made("report", "many.yaml", "--html", "page.html")
    assert code == 2
    assert "bigplan experiment run many.yaml" in err
