"""Log-probabilities under the first weights: asked for once, kept, and given to every crew."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bigplan.errors import InputError
from bigplan.launcher.driver import LaunchOptions, launch
from bigplan.launcher.record import Metric, read_record
from bigplan.launcher.references import FILE, References, read
from bigplan.launcher.resume import read_resumable
from bigplan.plan import Plan, load_plan
from bigplan.runtime.result import Evaluated, PairData
from bigplan.spec.preference import Preference
from bigplan.spec.training import ValidationSpec
from tests.launcher.fakes import Fake, plan_with, quiet, told, without_ray

__all__ = ["without_ray"]

TRAINING, VALIDATION = PairData("train", 10, 10, 3), PairData("held-out", 9, 4, 1)


@dataclass(frozen=True)
class Batch:
    """As runtime.preference.Scored."""

    pairs: Any
    values: Any


def values(pairs: Any) -> Any:
    """Some for each pair."""
    return np.stack((pairs, -pairs), -1) - 0.5


@dataclass
class Ranks:
    """Two of them, each with every other pair of a batch of four."""

    data: dict[str, PairData]
    asked: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)

    def ask(self, method: str, *arguments: Any, doing: str) -> list[Any]:
        """See crew."""
        self.asked.append(method)
        if method == "pair_data":
            return [self.data, self.data]
        if method == "refer":
            self.given = arguments[0]
            return [None, None]
        part, step = arguments
        every = np.arange(4 * step, min(4 * step + 4, self.data[part].wanted))
        return [
            Batch(mine, np.stack((mine, -mine), -1) - 0.5) for mine in (every[::2], every[1::2])
        ]


@dataclass
class Show:
    """What was told."""

    said: list[str] = field(default_factory=list)

    def step(self, metric: Metric) -> None:
        """None ends here."""

    def say(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)


def never() -> bool:
    """Nobody asks to stop."""
    return False


def test_they_are_computed_once_and_given_again(tmp_path: Path) -> None:
    ranks, show = Ranks({"training": TRAINING, "validation": VALIDATION}), Show()
    References(ranks, tmp_path, 0).give(show, never)
    wanted = values(np.arange(10.0))
    np.testing.assert_array_equal(ranks.given["training"], wanted)
    np.testing.assert_array_equal(ranks.given["validation"][:4], wanted[:4])
    assert np.isnan(ranks.given["validation"][4:]).all()
    assert show.said[0] == "Reference: 10 pairs of training in 3 forward passes"
    later = Ranks(ranks.data)
    References(later, tmp_path, 7).give(show, never)
    assert later.asked == ["pair_data", "refer"]
    np.testing.assert_array_equal(later.given["training"], wanted)


@pytest.mark.parametrize("changed", [PairData("other", 9, 4, 1), PairData("held-out", 9, 8, 2)])
def test_a_run_that_goes_on_cannot_score_new_data(tmp_path: Path, changed: PairData) -> None:
    ranks = Ranks({"training": TRAINING, "validation": VALIDATION})
    References(ranks, tmp_path, 0).give(Show(), never)
    ranks.data["validation"] = changed
    with pytest.raises(InputError, match="of all pairs of validation under the weights"):
        References(ranks, tmp_path, 1).give(Show(), never)
    References(ranks, tmp_path, 0).give(Show(), never)  # no step was made yet


def test_whoever_stops_leaves_nothing_half(tmp_path: Path) -> None:
    ranks = Ranks({"training": TRAINING})
    References(ranks, tmp_path, 0).give(Show(), lambda: "score" in ranks.asked)
    assert ranks.asked.count("score") == 1
    assert not ranks.given
    assert read(tmp_path) == {}


def test_what_is_not_finite_is_no_reference(tmp_path: Path) -> None:
    ranks = Ranks({"training": PairData("train", 10, 10, 2)})  # the last two pairs are in no batch
    with pytest.raises(InputError, match="2 pairs of training have no finite log-probability"):
        References(ranks, tmp_path, 0).give(Show(), never)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and so on", None])
def test_a_damaged_file_is_told(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        with (tmp_path / FILE).open("wb") as file:
            np.savez(file, a=np.zeros(3))
    else:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InputError, match="restore it"):
        read(tmp_path)


class Paired(Fake):
    """A worker that knows the pairs of its plan's validation."""

    def __init__(self, plan: Plan, rank: int, scratch: Path) -> None:
        super().__init__(plan, rank, scratch)
        validation = plan.training.validation
        assert validation is not None
        self.pairs = {"validation": PairData(validation.data, 1, 1, 1)}

    def pair_data(self) -> dict[str, PairData]:
        return self.pairs

    def score(self, part: str, step: int) -> Batch:
        return Batch(np.array([0]), np.zeros((1, 2)))

    def refer(self, references: object) -> None:
        """None is read."""

    def evaluate_pairs(self) -> Evaluated:
        return Evaluated(self.loss())


def longer(folder: Path) -> LaunchOptions:
    run = read_resumable(folder)
    return LaunchOptions(run.how.model_copy(update={"steps": 12}), run)


@pytest.mark.usefixtures("without_ray")
def test_validation_by_pairs_without_a_reference_takes_no_place(tmp_path: Path) -> None:
    """The weights that the run started from are gone, and its own plan goes on as ever."""
    paired = {"preference": Preference(method="dpo"), "isolate_documents": True}
    held = plan_with(**paired, validation=ValidationSpec(data="held-out"))
    folder = launch(held, told(tmp_path), quiet(), Paired)
    other = plan_with(**paired, validation=ValidationSpec(data="other"))
    with pytest.raises(InputError, match="of all pairs of validation"):
        launch(other, longer(folder), quiet(), Paired)
    assert load_plan(folder / "plan.yaml") == held
    assert read_record(launch(held, longer(folder), quiet(), Paired)).metrics[-1].step == 12


class Stopped(Paired):
    """A worker that is interrupted when it scores the second part of its data."""

    parts: tuple[str, ...] = ("training", "validation")

    def pair_data(self) -> dict[str, PairData]:
        return {part: PairData(part, 1, 1, 1) for part in self.parts}

    def score(self, part: str, step: int) -> Batch:
        if part == self.parts[-1]:
            raise KeyboardInterrupt
        return super().score(part, step)


class StoppedSooner(Stopped):
    """One that is interrupted in the first part."""

    parts = ("training",)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("worker", [Stopped, StoppedSooner])
def test_a_reference_that_is_known_stays(tmp_path: Path, worker: type[Stopped]) -> None:
    out = StringIO()
    paired = {"preference": Preference(method="dpo"), "isolate_documents": True}
    plan = plan_with(**paired, validation=ValidationSpec(data="held-out"))
    with pytest.raises(KeyboardInterrupt):
        launch(plan, told(tmp_path), Console(file=out, width=500), worker)
    runs = [path.name for path in tmp_path.iterdir()]
    if worker is Stopped:
        assert (
            f"Start it again with: bigplan launch --resume {tmp_path / runs[0]}" in out.getvalue()
        )
        assert list(read(tmp_path / runs[0])) == ["training"]
    else:
        assert "nothing of it is kept" in out.getvalue()
        assert runs == []
