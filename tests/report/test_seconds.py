from bigplan.plan import StepParts
from bigplan.report.seconds import busy_table, part_seconds, parts_table
from tests.report.shown import shown

PARTS = StepParts(
    compute=6.0,
    recompute=2.0,
    collectives=0.0,
    update=0.0,
    bubble=1.0,
    waiting=1.0,
    waits_for="cpu",
)


def test_the_busiest_resource_binds_and_idle_ones_are_left_out() -> None:
    text = shown(busy_table({"cpu": 2.0, "nvme read": 5.0, "gpu compute": 0.0}, 10.0))
    lines = [line.split() for line in text.splitlines() if "█" in line]
    assert [line[0] for line in lines] == ["nvme", "cpu"]
    assert lines[0][-2:] == ["50%", "binds"]
    assert "gpu compute" not in text
    assert text.count("binds") == 1


def test_parts_are_shares_of_the_step_and_nothing_is_left_out_that_counts() -> None:
    text = shown(parts_table(PARTS))
    assert "60%" in text
    assert "waiting (cpu is busiest)" in text
    assert "collectives" not in text
    assert sum(part_seconds(PARTS).values()) == 10.0
