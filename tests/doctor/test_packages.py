import importlib.util
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from bigplan import installed
from bigplan.doctor import packages
from bigplan.doctor.finding import Finding
from bigplan.engines import ENGINES
from bigplan.errors import RefusedError
from bigplan.launcher.session import require_packages

ROOT = Path(__file__).parent.parent.parent


def test_every_package_is_of_the_extra_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, purposes in packages.EXTRAS.items():
        needed = " ".join(project["optional-dependencies"][extra])
        assert all(name in needed for name in purposes), extra


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> dict[str, Finding]:
    """What is found where these modules cannot be imported, by name."""
    real = importlib.util.find_spec
    found = dict.fromkeys(absent)
    monkeypatch.setattr(
        installed, "find_spec", lambda name: found[name] if name in found else real(name)
    )
    return {one.name: one for one in packages.examine()}


def test_what_is_missing_says_what_for_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "highs_available", lambda: False)
    found = without(monkeypatch, "pyarrow", "vl_convert")
    assert (found["data"].state, found["data"].remedy) == ("note", "pip install 'bigplan[data]'")
    assert "without pyarrow" in found["data"].found
    assert "without vl-convert-python" in found["report"].found
    assert found["solver"].state == "note"


@pytest.mark.parametrize("absent", installed.LAUNCH)
def test_without_what_launches_import_no_engine_runs(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = without(monkeypatch, absent)
    assert found["launch"].state == found["native"].state == found["deepspeed"].state == "note"
    assert f"{absent} is not installed" in found["native"].found
    with pytest.raises(RefusedError, match=f"{absent} is not installed"):
        require_packages()


def test_runs_do_without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    found = without(monkeypatch, "tensorboardX")
    assert (found["launch"].state, found["native"].state) == ("note", "good")
    assert "no TensorBoard" in found["launch"].found


def test_a_deepspeed_that_pip_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators are kept by its version, so it could not be launched."""

    def version_of_others(name: str) -> str:
        if name == "deepspeed":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    monkeypatch.setattr(installed, "version", version_of_others)
    deepspeed = [one for one in packages.examine() if one.name == "deepspeed"]
    assert [one.state for one in deepspeed] == ["note", "note"]  # the extra's line, the engine's
    assert "pip did not install it" in deepspeed[1].found


def test_engines_say_whether_they_run_here() -> None:
    told = {one.name: one for one in packages.examine() if one.topic == packages.ENGINE}
    for name, engine in ENGINES.items():
        assert (told[name].state == "good") is (engine.missing() is None)
