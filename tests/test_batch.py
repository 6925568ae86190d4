"""Batches that split better are tried where this one splits badly, and told if they bring much."""

from dataclasses import replace

import pytest

from bigplan import batch as module
from bigplan.batch import WORTH, LargerBatch, batches_tried, larger_batch
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan
from bigplan.solve.search import Watch
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training


@pytest.mark.parametrize(
    ("batch", "gpus", "tried"),
    [
        (512, 24, [528, 516]),
        (512, 16, []),  # all GPUs divide it
        (16, 24, []),  # 18 is an eighth more
        (1536, 10240, [1600, 1560]),
        (100, 8, [104]),
        (7, 1, []),
    ],
)
def test_batches_up_to_a_tenth_larger_that_more_ranks_divide(
    batch: int, gpus: int, tried: list[int]
) -> None:
    assert batches_tried(batch, gpus) == tried


def request_for(batch: int) -> Request:
    cluster = find_cluster("dgx-h100").with_nodes(3)
    training = Training(sequence_length=1024, global_batch=batch)
    return Request(find_model("tiny-llama-demo"), training, cluster, {"tp": 1, "pp": 1})


def test_what_it_brings_is_what_planning_it_brings() -> None:
    request = request_for(512)
    plan = make_plan(request)
    found = larger_batch(request, plan)
    assert found is not None
    assert (found.global_batch, found.instead_of) == (528, 512)
    assert (found.strategy.dp, plan.strategy.dp) == (24, 16)
    again = make_plan(request_for(528)).predicted
    assert not found.at_least
    assert found.gain == pytest.approx(
        again.tokens_per_second / plan.predicted.tokens_per_second - 1
    )
    # A search that is stopped at once finds nothing, and pinned ranks leave nothing to find.
    assert larger_batch(request, plan, lambda best, bound, left: False) is None
    pinned = replace(request, settings={"dp": 16, "tp": 1, "pp": 1})
    assert larger_batch(pinned, plan) is None


def test_a_gain_that_is_not_worth_it_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for(528)
    plan = make_plan(request)
    request = request_for(512)

    def gaining(gain: float) -> LargerBatch | None:
        seconds = plan.predicted.step_seconds * 528 / 512 / (1 + gain)

        def planned(asked: Request, watch: Watch) -> Plan:
            assert asked.training.global_batch in (528, 516)
            # It is searched for as long as a plan may be that is worth it.
            enough = plan.predicted.step_seconds * asked.training.global_batch / 512 / (1 + WORTH)
            assert watch(None, 0.999 * enough, 1)
            assert not watch(None, 1.001 * enough, 1)
            predicted = plan.predicted.model_copy(update={"step_seconds": seconds})
            return plan.model_copy(update={"predicted": predicted})

        monkeypatch.setattr(module, "make_plan", planned)
        return larger_batch(request, plan)

    assert gaining(WORTH / 2) is None
    found = gaining(0.1)
    assert found is not None
    assert found.gain == pytest.approx(0.1)
