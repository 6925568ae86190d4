import tomllib
from pathlib import Path

import pytest

from bigplan.doctor import packages
from bigplan.engines import ENGINES

ROOT = Path(__file__).parent.parent.parent


def test_every_package_is_of_the_extra_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, (names, _) in packages.EXTRAS.items():
        needed = " ".join(project["optional-dependencies"][extra])
        assert all(name in needed for name in names), extra


def test_what_is_missing_says_what_for_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_version", lambda name: "" if name == "ray" else "1")
    monkeypatch.setattr(packages, "highs_available", lambda: False)
    found = {one.name: one for one in packages.examine()}
    launch = found["launch"]
    assert (launch.state, launch.remedy) == ("note", "pip install 'bigplan[launch]'")
    assert "without ray: running plans needs it" in launch.found
    assert "solves instead" in found["solver"].found
    assert found["data"].state == "good"


def test_engines_say_whether_they_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {one.name: one for one in packages.examine() if one.topic == packages.ENGINE}
    for name, engine in ENGINES.items():
        assert (told[name].state == "good") is (engine.missing() is None)
    monkeypatch.setattr("bigplan.engines.native.find_spec", lambda name: None)
    told = {one.name: one for one in packages.examine() if one.topic == packages.ENGINE}
    assert told["native"].remedy == "pip install 'bigplan[launch]'"
    assert "torch is not installed" in told["native"].found
