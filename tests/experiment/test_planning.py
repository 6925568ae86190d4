"""One point planned: the largest value that fits, the cheapest number of nodes, or why nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bigplan.errors import InfeasibleError
from bigplan.experiment import planning
from bigplan.experiment.planning import Task, best_plan, largest, plan_task, with_value
from bigplan.plan import Plan
from bigplan.spec.experiment import Experiment, make_experiment
from bigplan.spec.sweep import Find
from tests.experiment.studies import study
from tests.tiny import tiny_plan

BASE = make_experiment({"model": "tiny-llama-test", "cluster": "rtx-4090-workstation"})


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Micro-batches up to a limit fit; the values that were planned."""

    def limited(limit: int) -> list[int]:
        values: list[int] = []

        def plan(experiment: Experiment) -> Plan:
            value = int(experiment.set["micro_batch"])
            values.append(value)
            if value > limit:
                raise InfeasibleError("too large")
            return tiny_plan()

        monkeypatch.setattr(planning, "best_plan", plan)
        return values

    return limited


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 31, 32, 33, 63, 64])
@pytest.mark.parametrize(("least", "most", "multiple"), [(1, 64, 1), (1, 60, 4), (2, 63, 3)])
def test_the_largest_is_the_largest(
    tried: Callable[[int], list[int]], limit: int, least: int, most: int, multiple: int
) -> None:
    find = Find(largest="set.micro_batch", least=least, most=most, multiple_of=multiple)
    values = tried(limit)
    able = [n for n in range(least, most + 1) if n % multiple == 0 and n <= limit]
    if not able:
        with pytest.raises(InfeasibleError, match="too large"):
            largest(BASE, find)
    else:
        assert largest(BASE, find)[0] == max(able)
    assert len(values) == len(set(values)) <= 14, "doubled, then halved"


def test_the_least_that_does_not_fit_is_a_row_with_the_reason(
    tried: Callable[[int], list[int]],
) -> None:
    tried(0)
    done = plan_task(Task("key", BASE, Find(largest="set.micro_batch")))
    assert (done.row.status, done.row.reason, done.plan) == ("failed", "too large", "")


def test_a_real_search_stops_where_planning_does(tmp_path: Path) -> None:
    """In 5 MiB of GPU and 16 of host memory 19 layers of the tiny model fit."""
    caps = "caps: {gpu: 5 MiB, host: 16 MiB, nvme: 0}\nset: {dp: 2, zero: 0}\n"
    base = study(tmp_path, "").path.read_text().replace("set: {dp: 2}\n", caps)
    experiment = study(tmp_path, "", base=base).points[0].experiment
    find = Find(largest="model.layers", least=8, most=24, multiple_of=8)
    found, plan = largest(experiment, find)
    assert (found, plan.model.layers) == (16, 16)
    with pytest.raises(InfeasibleError):
        best_plan(with_value(experiment, "model.layers", 24))


def test_the_cheapest_number_of_nodes() -> None:
    keys = {
        "model": "tiny-llama-test",
        "cluster": "dgx-h100",
        "nodes": 2,
        "engine": "native",
        "prefer": "cheapest",
        "training.sequence_length": 32,
        "training.global_batch": 64,
    }
    # A model of this size gains nothing from a second node.
    row = plan_task(Task("key", make_experiment(keys))).row
    assert (row.status, row.nodes) == ("planned", 1)
    assert row.dollars_per_million_tokens is not None
    assert row.in_time is None
    late = {**keys, "training.tokens": 10**12, "within": "1 s"}
    failed = plan_task(Task("key", make_experiment(late))).row
    assert "ends within" in failed.reason
