"""The cost model against measured runs, from Python."""

from pathlib import Path

import pytest

import bigplan
from bigplan.errors import InputError


def test_the_published_runs() -> None:
    found = bigplan.validate()
    whole = found.groups["all of trust A"]
    assert whole.n > 100
    assert whole.mape < 10
    shown = found._repr_html_()
    assert all(name in shown for name in found.groups)
    assert f"{whole.mape:.1f}%" in shown


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing"):
        bigplan.validate(tmp_path / "nothing.csv")
