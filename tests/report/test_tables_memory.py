from rich.console import Group

from bigplan.placement import Tier
from bigplan.plan import MemoryUse
from bigplan.report.plan_report import plan_tables
from bigplan.report.tables import ROWS_SHOWN, kept_back, memory_table
from bigplan.spec.gpu import find_gpu
from tests.report.shown import shown
from tests.tiny import tiny_plan

GIB = 2**30


def use(stage: int, tier: Tier, **purposes: int) -> MemoryUse:
    return MemoryUse(
        stage=stage,
        tier=tier,
        scope="gpu" if tier is Tier.GPU else "node",
        used_bytes=sum(purposes.values()),
        capacity_bytes=80 * GIB,
        by_purpose=purposes,
    )


def test_equal_neighbours_share_a_row_and_tiers_follow_each_other() -> None:
    memory = [use(s, Tier.GPU, parameters=8 * GIB, slots=2 * GIB) for s in range(3)]
    memory += [use(s, Tier.HOST, optimizer=(40 + s) * GIB) for s in range(2)]
    text = shown(memory_table(memory))
    rows = [line.split() for line in text.splitlines() if " of 80 GiB" in line]
    assert [row[:2] for row in rows] == [["0-2", "GPU"], ["0", "host"], ["1", "host"]]
    assert "10 of 80 GiB" in text
    assert "P 8, s 2" in text
    assert "P parameters, O optimizer, s slots, · free" in text


def test_host_memory_for_a_few_scalars_is_not_worth_a_row() -> None:
    memory = [use(0, Tier.GPU, parameters=1000), use(0, Tier.HOST, staging=900)]
    assert "host " not in shown(memory_table(memory)).split("free)")[1]


def test_of_a_long_pipeline_the_fullest_stage_and_the_ends_are_shown() -> None:
    memory = [use(s, Tier.GPU, activations=(s * 37 % 64 + 1) * GIB) for s in range(64)]
    text = shown(memory_table(memory))
    rows = [line.split() for line in text.splitlines() if " of 80 GiB" in line]
    assert len(rows) == ROWS_SHOWN
    assert {"0", "63"} <= {row[0] for row in rows}
    assert "64 of 80 GiB" in text


def test_a_tier_much_larger_than_its_use_is_told_in_both_units() -> None:
    memory = [use(0, Tier.NVME, optimizer=GIB // 2)]
    assert "512 MiB of 80 GiB" in shown(memory_table(memory))


def test_large_parts_are_written_without_an_exponent() -> None:
    for size, told in ((79, "A 79"), (500, "A 500")):
        text = shown(memory_table([use(0, Tier.GPU, activations=size * GIB // 1024)]))
        assert told in text
        assert "e+" not in text


def test_what_a_gpu_keeps_back_is_told() -> None:
    """The capacity leaves out the context, page tables and the allocator; stages may differ."""
    gpu = find_gpu("rtx-3090")
    room = gpu.memory - 2 * GIB
    one = use(0, Tier.GPU, parameters=GIB).model_copy(update={"capacity_bytes": room})
    text = kept_back([one, use(0, Tier.HOST, parameters=GIB)], gpu)
    assert text.startswith("Of a GPU's 23.5 GiB ")
    assert text.endswith(" have 2 GiB.")
    less = one.model_copy(update={"capacity_bytes": room - GIB})
    assert kept_back([one, less], gpu).endswith(" have 2 GiB to 3 GiB.")
    plan = tiny_plan()
    assert kept_back(plan.predicted.memory, plan.cluster.group.gpu) in " ".join(
        shown(Group(*plan_tables(plan))).split()
    )
