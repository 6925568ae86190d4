"""The experiments in launch/: each is read whole, and a few of its points are planned."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bigplan.experiment.planning import Task, plan_task
from bigplan.experiment.row import StudyRow
from bigplan.experiment.running import check
from bigplan.spec.experiment import Experiment
from bigplan.spec.files.document import parse_document
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.sweep import Studied, load_study
from tests.tiny import small_cluster

pytestmark = pytest.mark.usefixtures("first_plans")

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-24-experiments"
STUDIES = tuple(
    path.stem for path in sorted(LAUNCH.glob("*.yaml")) if "\nsweep:" in path.read_text()
)
"""native-against-deepspeed names a file of the machine that it runs on"""


def study(name: str) -> Studied:
    return load_study(LAUNCH / f"{name}.yaml")


def planned(studied: Studied, *numbers: int, **pins: int | str) -> list[StudyRow]:
    """Rows of some points, with what a file leaves open pinned where nothing is asked of it."""
    found = [pinned(studied.points[number].experiment, pins) for number in numbers]
    rows = [plan_task(Task("key", experiment)).row for experiment in found]
    assert [row.status for row in rows] == ["planned"] * len(rows), rows
    return rows


def pinned(experiment: Experiment, pins: Mapping[str, int | str]) -> Experiment:
    return experiment.model_copy(update={"set": {**experiment.set, **pins}})


def fits(studied: Studied, number: int, value: int, **pins: int | str) -> bool:
    """Whether a point has a plan with that value of what is to be the largest."""
    find = studied.study.find
    assert find is not None
    only = find.model_copy(update={"least": value, "most": value})
    row = plan_task(Task("key", pinned(studied.points[number].experiment, pins), only)).row
    assert (row.found == value) is (row.status == "planned")
    return row.status == "planned"


def speed(row: StudyRow) -> float:
    """Tokens a second of a planned row."""
    assert row.tokens_per_second is not None
    return row.tokens_per_second


@pytest.mark.parametrize("name", STUDIES)
def test_all_points_name_what_there_is(name: str) -> None:
    studied = study(name)
    if name == "native-against-deepspeed":
        points = [
            replace(p, experiment=p.experiment.model_copy(update={"cluster": small_cluster()}))
            for p in studied.points
        ]
        studied = replace(studied, points=tuple(points))
    check(studied)
    assert len(studied.points) == studied.study.sweep.count > 1


def test_there_are_all() -> None:
    assert set(STUDIES) == {
        "batch-against-offload",
        "cheapest-70b",
        "drives-workstation",
        "gpu-generations",
        "largest-batch",
        "largest-model",
        "longest-sequence",
        "native-against-deepspeed",
    }


def test_cheapest_70b_as_it_was_answered() -> None:
    """All of it takes five minutes of a core, so its results are kept, and their bills checked."""
    studied = study("cheapest-70b")
    with (RESULTS / "cheapest-70b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cluster"] for row in rows] == [p.experiment.cluster for p in studied.points]
    for row, point in zip(rows, studied.points, strict=True):
        running = point.experiment.cluster_spec().group.running
        assert running is not None
        hours, nodes = float(row["days"]) * 24, int(row["nodes"])
        assert hours * float(row["tokens_per_second"]) * 3600 == pytest.approx(1e12)
        assert float(row["dollars"]) == pytest.approx(hours * nodes * (running.price or 0.0))
        assert float(row["kwh"]) == pytest.approx(hours * nodes * (running.power or 0.0) / 1e3)
        assert row["in_time"] == "True"
        assert hours <= 30 * 24
        assert nodes <= 256


def test_cheapest_within_a_month_of_a_smaller_model() -> None:
    """The same file with 8 B parameters and tokens for a few nodes."""
    studied = study("cheapest-70b")
    (h100,) = (p.experiment for p in studied.points if p.experiment.cluster == "dgx-h100")
    training = h100.training.model_copy(update={"tokens": 500_000_000_000})
    # One node takes 69 days and two a little more than half of that: a third is needed.
    update = {"model": "llama-3-8b", "nodes": 3, "training": training}
    row = plan_task(Task("key", h100.model_copy(update=update))).row
    assert row.status == "planned", row.reason
    assert (row.nodes, row.in_time) == (3, True)
    assert row.days is not None
    assert row.days <= 30
    assert row.dollars == pytest.approx(3 * row.days * 24 * 55.04)


def test_a_drive_more_pays() -> None:
    one, two = planned(study("drives-workstation"), 0, 1, micro_batch=4)
    assert speed(two) > 1.1 * speed(one)
    assert one.drive_life_days is not None


def test_larger_steps_hide_offload() -> None:
    pins: dict[str, int | str] = {"micro_batch": 4, "recompute": "full"}
    small, large = planned(study("batch-against-offload"), 6, 9, **pins)
    assert small.bottleneck == "nvme write"
    assert speed(large) > 3 * speed(small)


def test_newer_gpus_are_faster() -> None:
    rows = planned(study("gpu-generations"), 0, 2, 4)
    assert speed(rows[0]) < speed(rows[1]) < speed(rows[2])
    assert [row.gpus for row in rows] == [8, 8, 8]
    assert [row.dollars is not None for row in rows] == [False, True, True]


def test_recomputation_makes_room_for_longer_sequences() -> None:
    studied = study("longest-sequence")
    none, full = (fits(studied, number, 16384) for number in (0, 1))
    assert (none, full) == (False, True)


def test_drives_make_room_for_deeper_models() -> None:
    studied = study("largest-model")
    least: dict[str, int | str] = {"micro_batch": 1, "recompute": "full"}  # of memory
    without, one = (fits(studied, number, 20, **least) for number in (0, 1))
    assert (without, one) == (False, True)


def test_a_larger_gpu_holds_a_larger_batch() -> None:
    studied = study("largest-batch")
    small, large = (fits(studied, number, 64) for number in (1, 2))
    assert (small, large) == (False, True)


def test_native_against_deepspeed_is_planned_for_both() -> None:
    studied = study("native-against-deepspeed")
    assert studied.study.measure == "all"
    cluster = parse_document(to_yaml(small_cluster()), type(small_cluster()))
    rows = []
    for point in studied.points:
        experiment = point.experiment.model_copy(update={"cluster": cluster})
        rows.append(plan_task(Task("key", experiment)).row)
    assert [row.engine for row in rows] == ["native", "native", "deepspeed", "deepspeed"]
    assert all(row.runs for row in rows)
