"""What `import bigplan` gives, and what it costs."""

import json
import subprocess
import sys
from typing import get_type_hints

import bigplan
from bigplan.api.keys import ExperimentKeys, LaunchKeys
from bigplan.spec.experiment import Experiment, LaunchSpec


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_importing_is_light_and_planning_needs_no_gpu_framework() -> None:
    told = fresh(
        "import sys, json, bigplan\n"
        "first = set(sys.modules)\n"
        "bigplan.plan, bigplan.launch, bigplan.validate\n"
        "print(json.dumps([sorted(first), sorted(sys.modules)]))"
    )
    first, then = (set(names) for names in json.loads(told))
    assert not first & {"pydantic", "numpy", "yaml", "rich", "jinja2", "bigplan.plan"}
    assert {"bigplan.plan", "pydantic"} <= then
    assert not then & {"torch", "ray", "deepspeed", "triton", "vl_convert", "transformers"}


def test_modules_of_the_same_names_do_not_hide_the_functions() -> None:
    told = fresh(
        "import bigplan\n"
        "from bigplan.plan import load_plan\n"
        "from bigplan.validate.score import score\n"
        "from bigplan import plan, validate\n"
        "import bigplan.experiment\n"
        "print(plan.__module__, validate.__module__, callable(bigplan.plan), bigplan.experiment)"
    )
    planning, validating, function, module = told.split(maxsplit=3)
    assert (planning, validating) == ("bigplan.api.planning", "bigplan.api.validating")
    assert function == "True"
    assert module.startswith("<module 'bigplan.experiment'")


def test_every_public_name_is_there_and_documented() -> None:
    for name in bigplan.__all__:
        assert getattr(bigplan, name).__doc__ or name == "__version__"
    assert set(bigplan.__all__) <= set(dir(bigplan))
    assert not hasattr(bigplan, "no_such_name")


def test_arguments_have_the_names_of_the_yaml() -> None:
    assert set(get_type_hints(ExperimentKeys)) == set(Experiment.model_fields)
    assert set(get_type_hints(LaunchKeys)) == set(LaunchSpec.model_fields)
