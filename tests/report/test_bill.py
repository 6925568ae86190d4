import pytest

from bigplan.plan import Plan
from bigplan.program import Lane
from bigplan.report.bill import wear_text
from bigplan.spec.cluster import Cluster
from bigplan.wear import wear_of
from tests.tiny import tiny_plan


def writing(nbytes: int, seconds: float, endurance: int | None, drives: int = 1) -> Plan:
    """Two GPUs of one node, each writing `nbytes` in a step of `seconds`."""
    plan = tiny_plan()
    moved = {Lane.NVME_WRITE: nbytes} if nbytes else {}
    predicted = plan.predicted.model_copy(update={"step_seconds": seconds, "moved_bytes": moved})
    group = plan.cluster.group
    assert group.nvme is not None
    nvme = group.nvme.model_copy(update={"endurance": endurance, "drives": drives})
    cluster = Cluster(name="c", node_groups=(group.model_copy(update={"nvme": nvme}),))
    return plan.model_copy(update={"predicted": predicted, "cluster": cluster})


def test_what_a_node_writes_and_how_long_its_drives_last() -> None:
    wear = wear_of(writing(10**9, 86.4, endurance=10**15, drives=2))
    assert wear is not None
    assert wear.bytes_per_step == 2 * 10**9
    assert wear.bytes_per_day == pytest.approx(2 * 10**12)
    assert wear.life_days == pytest.approx(1000.0)
    assert "its 2 drives last 2.74 years" in wear_text(wear)


def test_an_unknown_endurance_is_said_and_not_guessed() -> None:
    wear = wear_of(writing(10**9, 86.4, endurance=None))
    assert wear is not None
    assert wear.life_days is None
    assert "how long its drive lasts is unknown: endurance not stated" in wear_text(wear)


def test_a_plan_that_writes_nothing_wears_nothing() -> None:
    assert wear_of(writing(0, 1.0, endurance=10**15)) is None


def test_one_drive_in_days() -> None:
    wear = wear_of(writing(10**9, 86.4, endurance=10**14))
    assert wear is not None
    assert "its drive lasts 50 days" in wear_text(wear)


def test_a_job_of_known_length_takes_its_share_of_the_rated_writes() -> None:
    plan = writing(10**9, 86.4, endurance=10**14)
    steps = 1000
    training = plan.training.model_copy(update={"tokens": steps * plan.training.tokens_per_step})
    wear = wear_of(plan.model_copy(update={"training": training}))
    assert wear is not None
    assert wear.job_share is not None
    assert wear.life_days is not None
    assert wear.job_share == pytest.approx(steps * wear.bytes_per_step / 10**14)
    assert wear.job_share * wear.life_days == pytest.approx(steps * 86.4 / 86400)
    assert "the whole training takes" in wear_text(wear)
