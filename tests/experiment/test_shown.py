"""What a person reads of an experiment."""

from pathlib import Path

from rich.console import Console

from bigplan.experiment.folder import MeasuredPoint, StudyIndex
from bigplan.experiment.row import StudyRow
from bigplan.experiment.running import StudyOutcome
from bigplan.experiment.shown import (
    accuracy_text,
    best_point,
    headline,
    outcome_report,
    ranks,
    short_keys,
)
from tests.experiment.rows import index, row
from tests.wording import tells


def outcome(points: StudyIndex, *rows: StudyRow, **measured: MeasuredPoint) -> StudyOutcome:
    found = {int(name.removeprefix("p")): value for name, value in measured.items()}
    return StudyOutcome(Path("runs/e"), points, rows, found)


def words(shown: StudyOutcome) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(outcome_report(shown))
    return " ".join(capture.get().split())


def test_the_fastest_is_of_a_token_not_of_a_step() -> None:
    small = row(100.0, tokens_per_step=10, step_seconds=0.1)
    shown = outcome(index({"set.tp": 1}, {"set.tp": 2}), small, row(1000.0))
    assert best_point(shown) == 1
    assert tells(headline(shown), "2 points", "2 planned", "point 1", "tp=2", "1 node", "1 s")


def test_the_cheapest_is_in_time_and_has_a_price() -> None:
    rows = (
        row(1000.0, dollars_per_million_tokens=3.0, dollars=3e6, days=20.0, in_time=True),
        row(1000.0, dollars_per_million_tokens=1.0, dollars=1e6, days=40.0, in_time=False),
        row(1000.0, in_time=True),
        row(1000.0, dollars_per_million_tokens=2.0, dollars=2e6, days=29.0, in_time=True),
    )
    points = index({"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}, prefer="cheapest", within=30 * 86400.0)
    told = headline(outcome(points, *rows))
    assert tells(told, "30 days", "point 3", "n=4", "29 days", "$2 M")
    none = headline(outcome(points, *[rows[1]] * 4))
    assert tells(none, "4 planned", "in time")
    assert "point 1" not in none


def test_nodes_are_shown_where_not_every_point_states_them() -> None:
    some = index({"cluster": "a"}, {"cluster": "b", "nodes": 16})
    every: list[dict[str, object]] = [{"nodes": 1}, {"nodes": 16}]
    rows = row(nodes=1), row(nodes=16)
    told = words(outcome(some, *rows))
    assert "point nodes step" in told
    assert "cluster b, nodes 16 16 1 s" in told
    assert "nodes nodes" not in words(outcome(index(*every), *rows))
    chosen = words(outcome(index(*every, prefer="cheapest"), row(nodes=1), row(nodes=12)))
    assert "nodes nodes step" in chosen


def test_dollars_are_of_the_whole_training_where_its_tokens_are_stated() -> None:
    points = index({"n": 1}, {"n": 2})
    whole = row(1000.0, dollars_per_million_tokens=3.0, dollars=36_000.0, days=20.0)
    told = words(outcome(points, whole, row()))
    assert tells(told, "dollars", "$36,000")
    assert "$ / M tokens" not in told
    assert tells(words(outcome(points, row(dollars_per_million_tokens=3.0), row())), "$ / M tokens")


def test_the_largest() -> None:
    points = index({"n": 1}, {"n": 2}, largest="model.layers")
    told = headline(outcome(points, row(found=7), row(found=9)))
    assert tells(told, "model.layers: 9", "point 1", "n=2")


def test_keys_are_short_where_that_tells_them_apart() -> None:
    shown = outcome(index({"set.tp": 1, "caps.gpu": 2, "hardware.gpu": 3}), row())
    assert short_keys(shown) == {
        "set.tp": "tp",
        "caps.gpu": "caps.gpu",
        "hardware.gpu": "hardware.gpu",
    }


def test_predicted_beside_measured_with_error_and_ranks() -> None:
    points = index({"n": 1}, {"n": 2}, {"n": 3})
    rows = (row(1000.0), row(500.0), row(250.0))
    shown = outcome(
        points,
        *rows,
        p0=MeasuredPoint(step_seconds=2.0),
        p1=MeasuredPoint(step_seconds=1.6),
        p2=MeasuredPoint(step_seconds=5.0),
    )
    text = words(shown)
    assert "0 1 1 s 2 s -50.0% 1 2 1 GiB" in text
    assert "1 2 2 s 1.6 s +25.0% 2 1 1 GiB" in text
    assert "2 3 4 s 5 s -20.0% 3 3 1 GiB" in text
    assert tells(accuracy_text(shown), "3 points", "31.7%", "2 of 3 pairs")
    assert "Nothing was measured yet" in accuracy_text(outcome(points, *rows))
    failed = outcome(points, *rows, p1=MeasuredPoint(reason="a worker died"))
    assert "Nothing was measured: 1 launch failed" in accuracy_text(failed)


def test_every_reason_once() -> None:
    points = index({"n": 1}, {"n": 2}, {"n": 3})
    failed = StudyRow.failed("does not fit; take more")
    text = words(outcome(points, failed, failed, row(), p2=MeasuredPoint(reason="a worker died")))
    assert "Points 0, 1: does not fit; take more" in text
    assert "Point 2: launch failed: a worker died" in text
    assert "3 points, 1 planned." in text


def test_ranks() -> None:
    assert ranks([3.0, None, 1.0, 3.0]) == [2, None, 1, 2]


def test_points_with_keys_of_their_own_say_what_each_is() -> None:
    """A column for each key would be empty but for one point, and take the figures' room."""
    points = index({"cluster": "dgx-h100"}, {"cluster": "v100-4x", "a.power": "5 kW"})
    console = Console(width=80)
    with console.capture() as capture:
        console.print(outcome_report(outcome(points, row(1000.0), row(2000.0))))
    told = " ".join(capture.get().split())
    assert "0 cluster dgx-h100 1 s" in told
    assert "1 cluster v100-4x, power 5 kW 500 ms" in told
