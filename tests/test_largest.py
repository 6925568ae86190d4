"""The largest value is looked for by doubling and halving: it fits, and the next does not."""

from dataclasses import replace

import pytest

from bigplan.errors import InfeasibleError
from bigplan.largest import CLOSE, largest_that_fit, largest_value
from bigplan.planner import Request, make_plan
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

pytestmark = pytest.mark.usefixtures("first_plans")


@pytest.mark.parametrize("limit", [1, 2, 7, 100, 999, 1000])
@pytest.mark.parametrize("close", [0, CLOSE])
def test_a_value_fits_and_the_next_does_not(limit: int, close: int) -> None:
    tried: list[int] = []

    def fits(value: int) -> str | None:
        tried.append(value)
        return str(value) if value <= limit else None

    value, beyond, answer = largest_value(1, 1000, fits, close)
    assert value <= limit < beyond
    assert answer == (None if value == 1 else str(value))
    assert beyond - value <= max(1, value // close if close else 1)
    assert len(tried) == len(set(tried)) <= 20


MIB = 2**20


@pytest.fixture(scope="module")
def request_() -> Request:
    cluster = find_cluster("h200-1x")
    context = cluster.group.gpu.context_memory
    cluster = cluster.with_caps(gpu=24 * MIB + context, host=96 * MIB, nvme=0)
    training = Training(sequence_length=256, global_batch=4)
    return Request(find_model("tiny-llama-demo"), training, cluster)


def test_what_fits_can_be_planned_and_what_is_beyond_cannot(request_: Request) -> None:
    plan = make_plan(request_)
    found = {one.subject: one for one in largest_that_fit(request_, plan)}
    assert list(found) == ["sequence_length", "layers", "micro_batch"]
    layers = found["layers"]
    assert layers.now == plan.model.layers < layers.value
    assert layers.parameters > plan.model.parameter_count
    assert layers.next is not None
    assert layers.next - layers.value <= max(1, layers.value // CLOSE)
    deeper = request_.model.model_copy(update={"layers": layers.next})
    with pytest.raises(InfeasibleError):
        make_plan(replace(request_, model=deeper))
    longest = found["sequence_length"]
    assert longest.value > longest.now == 256
    assert longest.value % 256 == 0
    longer = request_.training.model_copy(update={"sequence_length": longest.value})
    assert make_plan(replace(request_, training=longer)).training == longer
    assert longest.tokens_per_step == longer.tokens_per_step
    assert layers.tokens_per_step == request_.training.tokens_per_step
    widest = found["micro_batch"]
    assert widest.value > widest.now == plan.strategy.micro_batch
    assert widest.tokens_per_step == widest.value * 256  # on one GPU


def test_once_stopped_nothing_more_is_told(request_: Request) -> None:
    plan = make_plan(request_)
    assert list(largest_that_fit(request_, plan, lambda: False)) == []


def test_stopped_midway_it_tells_what_fits_and_claims_nothing_of_the_rest(
    request_: Request,
) -> None:
    """Values that there was no time for are none that do not fit."""
    plan = make_plan(request_)
    left = iter([True, True])  # two lengths are tried, which fit
    (found,) = largest_that_fit(request_, plan, lambda: next(left, False))
    assert found.subject == "sequence_length"
    assert found.value > found.now
    assert found.next is None
