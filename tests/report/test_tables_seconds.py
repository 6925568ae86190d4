from bigplan.plan import StepParts
from bigplan.report.tables import bound_text, busy_table, part_seconds, parts_table
from tests.report.shown import shown
from tests.tiny import tiny_plan
from tests.wording import tells

PARTS = StepParts(
    compute=6.0,
    recompute=2.0,
    collectives=0.0,
    update=0.0,
    bubble=1.0,
    waiting=1.0,
    waits_for="cpu",
)


def test_the_longest_on_the_critical_path_binds_and_idle_ones_are_left_out() -> None:
    busy = {"gpu compute": 8.0, "nvme read": 7.0, "nvme write": 5.0, "cpu": 0.0}
    path = {"nvme read": 6.0, "gpu compute": 4.0}
    text = shown(busy_table(busy, path, 10.0))
    lines = [line.split() for line in text.splitlines() if "█" in line]
    assert [line[:2] for line in lines] == [["nvme", "read"], ["gpu", "compute"], ["nvme", "write"]]
    assert lines[0][-4:] == ["70%", "6", "s", "binds"]
    assert lines[1][-3:] == ["80%", "4", "s"]
    assert lines[2][-2:] == ["50%", "-"]
    assert "cpu" not in text
    assert text.count("binds") == 1


def test_the_bound_is_told_with_its_seconds_and_the_others_on_the_path() -> None:
    predicted = tiny_plan(1).predicted

    def told(path: dict[str, float], **busy: float) -> str:
        update = {
            "critical_path": path,
            "busy_seconds": {**path, **busy},
            "bottleneck": next(iter(path)),
            "step_seconds": 19.6,
        }
        return bound_text(predicted.model_copy(update=update))

    first = ("nvme write", "14.2 s of 19.6 s", "72%", "gpu compute")
    text = told({"nvme write": 14.2, "gpu compute": 5.35, "cpu": 0.05})
    assert tells(text, *first, "5.35 s")
    assert "cpu" not in text
    path = {"nvme write": 14.2, "gpu compute": 5.4}
    assert tells(told(path, cpu=14.0), *first, "5.4 s", "cpu", "nearly as long", "14 s")
    assert tells(told(path, cpu=15.0), *first, "cpu", "longer", "15 s")
    assert tells(told(path, **{"gpu compute": 15.0}), *first, "5.4 s", "15 s")
    assert tells(told({"gpu compute": 19.58, "cpu": 0.02}), "gpu compute", "all")


def test_parts_are_shares_of_the_step_and_nothing_is_left_out_that_counts() -> None:
    text = shown(parts_table(PARTS))
    assert "60%" in text
    assert "waiting (cpu is busiest)" in text
    assert "collectives" not in text
    assert sum(part_seconds(PARTS).values()) == 10.0
