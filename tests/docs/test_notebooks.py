"""The notebooks run from top to bottom, and show what they are stored with."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("vl_convert")

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def kinds(cell: Any) -> list[tuple[str, tuple[str, ...]]]:
    """What a cell showed, without its figures: those change with the planner."""
    return [(each.output_type, tuple(sorted(each.get("data", ())))) for each in cell.outputs]


@contextmanager
def first_plans(notebook: Any) -> Iterator[None]:
    """Searches in the notebook end with their first plans: no figure of theirs is looked at."""
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import tests.effort as effort; "
    code += "effort = effort.first_plans_alone(); effort.__enter__()"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(code))
    yield
    del notebook.cells[0]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where it makes folders, which stay
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = [kinds(cell) for cell in notebook.cells if cell.cell_type == "code"]
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    with first_plans(notebook):
        client.execute()  # raises where a cell does
    assert [kinds(cell) for cell in notebook.cells if cell.cell_type == "code"] == stored
    assert any("text/html" in shown for cell in stored for _, shown in cell)


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_plan", "which_machine"]
