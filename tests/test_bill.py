"""Days, dollars and kWh of a training, from a step's prediction."""

import pytest

from bigplan.bill import bill_of
from bigplan.plan import Plan
from bigplan.spec.cluster import Running
from tests.tiny import tiny_plan

_TOLD = {"price": "datasheet", "power": "datasheet"}


def billed(running: Running | None, tokens: int | None = None, nodes: int = 1) -> Plan:
    """The tiny plan at 1,000 tokens a second."""
    plan = tiny_plan()
    group = plan.cluster.group.model_copy(update={"running": running, "nodes": nodes})
    return plan.model_copy(
        update={
            "cluster": plan.cluster.model_copy(update={"node_groups": (group,)}),
            "training": plan.training.model_copy(update={"tokens": tokens}),
            "predicted": plan.predicted.model_copy(update={"tokens_per_second": 1000.0}),
        }
    )


def test_a_million_tokens_at_1000_a_second_take_1000_s_of_every_node() -> None:
    bill = bill_of(billed(Running(price=36.0, power=7200.0, sources=_TOLD), nodes=2))
    assert bill.node_hours_per_million_tokens == pytest.approx(2 * 1000 / 3600)
    assert bill.dollars_per_million_tokens == pytest.approx(20.0)
    assert bill.kwh_per_million_tokens == pytest.approx(4.0)
    assert (bill.days, bill.dollars, bill.kwh, bill.tokens) == (None, None, None, None)
    assert not bill.meets(1e9), "how long is not known"
    assert bill.meets(None)


def test_the_whole_training() -> None:
    bill = bill_of(billed(Running(price=36.0, power=7200.0, sources=_TOLD), 86_400_000))
    assert bill.days == pytest.approx(1.0)
    assert bill.dollars == pytest.approx(24 * 36.0)
    assert bill.kwh == pytest.approx(24 * 7.2)
    assert bill.meets(86401.0)
    assert not bill.meets(86399.0)


def test_what_is_not_stated_is_not_made_up() -> None:
    power = Running(power=7200.0, sources={"power": "datasheet"})
    for running, kwh in ((None, None), (power, pytest.approx(2.0))):
        bill = bill_of(billed(running, 1_000_000))
        assert (bill.dollars, bill.dollars_per_million_tokens, bill.kwh) == (None, None, kwh)
        assert bill.rank == bill.node_hours_per_million_tokens
