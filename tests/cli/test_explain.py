"""`bigplan explain`: a plan by operator, from a file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bigplan.plan import save_plan
from tests.tiny import tiny_plan

Run = Callable[..., tuple[int, str, str]]


def test_a_plan_is_explained_in_both_forms(bigplan: Run) -> None:
    save_plan(tiny_plan(), Path("plan.yaml"))
    code, out, _ = bigplan("explain", "plan.yaml", "--json")
    assert code == 0
    data = json.loads(out)
    assert {"operators", "efficiency", "advice", "hidden_from", "headline"} <= set(data)
    code, out, _ = bigplan("explain", "plan.yaml")
    assert code == 0
    for row in data["operators"]:
        assert row["name"] in out or row["seconds"] < 1e-3 * data["step_seconds"]
    assert "A process monitor would show" in out  # the tiny plan's device is a CPU


@pytest.mark.parametrize("text", ["", "model: x\n", "[1, 2]"])
def test_what_is_no_plan_is_bad_input(bigplan: Run, text: str) -> None:
    Path("plan.yaml").write_text(text)
    code, out, err = bigplan("explain", "plan.yaml")
    assert (code, out) == (2, "")
    assert "plan.yaml" in err
    assert bigplan("explain", "nowhere.yaml")[0] == 2
