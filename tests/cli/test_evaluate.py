"""`bigplan evaluate`, with workers that only count."""

import json
from pathlib import Path

import pytest

from bigplan.plan import save_plan
from bigplan.spec.training import ValidationSpec
from tests.cli.conftest import Run
from tests.launcher.fakes import plan_with, without_ray

__all__ = ["without_ray"]
pytestmark = pytest.mark.usefixtures("without_ray")

RUN = Path("runs/tiny-llama-test-1")


def ran(bigplan: Run, validation: ValidationSpec | None) -> None:
    save_plan(plan_with(validation=validation), Path("plan.yaml"))
    code, _, err = bigplan("launch", "plan.yaml")
    assert code == 0, err


def test_on_the_data_of_the_run_or_other(bigplan: Run) -> None:
    ran(bigplan, ValidationSpec(data="bundled", batches=2))
    code, out, err = bigplan("evaluate", RUN)
    assert (code, out) == (0, "After step 3, on bundled: loss 4.0000, perplexity 54.598\n"), err
    Path("text.txt").write_text("a text of some length, over and over. " * 50)
    code, out, err = bigplan("evaluate", RUN, "--data", "text.txt", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["step"], told["data"], told["loss"], told["rewards"]) == (3, "text.txt", 4.0, None)
    assert told["perplexity"] == pytest.approx(54.598, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((RUN,), "no validation data; name some with --data"),
        ((RUN, "--data", "nowhere"), "nowhere"),
        ((RUN, "--data", "bundled", "--batches", "0"), "batches"),
        (("elsewhere",), "elsewhere: no such file or folder"),
        (("plan.yaml",), "holds no plan.yaml"),
    ],
)
def test_what_cannot_be_evaluated(
    bigplan: Run, arguments: tuple[object, ...], message: str
) -> None:
    ran(bigplan, None)
    code, _, err = bigplan("evaluate", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("held", "meant"),
    [
        ("config.json", "a Hugging Face folder; name the run that it was exported from"),
        ("adapter_config.json", "a folder of adapters; name the run that it was exported from"),
        ("manifest.json", "a checkpoint; name the folder of the run"),
    ],
)
def test_what_a_run_wrote_is_told_from_the_run(bigplan: Run, held: str, meant: str) -> None:
    Path("written").mkdir()
    Path("written", held).write_text("{}")
    for command in (("evaluate",), ("launch", "--resume")):
        code, _, err = bigplan(*command, "written")
        assert code == 2
        assert meant in err
