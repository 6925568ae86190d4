"""The number of nodes with the fewest dollars, by plans of every number worth one."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from bigplan.cheapest import Cheapest, cheapest, require_in_time, too_late
from bigplan.errors import InfeasibleError, LateError
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.solve.choice import node_counts
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.tiny import tiny_plan

TOKENS = 10**9
Speed = Callable[[int], float]


@dataclass(frozen=True)
class Made:
    plan: Plan


def solved(speed: Speed, nodes: int, within: float | None = None) -> Cheapest[Made]:
    """The cheapest where so many nodes train `speed` tokens a second; 0: nothing fits them."""
    training = Training(sequence_length=32, global_batch=4, tokens=TOKENS)
    cluster = find_cluster("dgx-h100").with_nodes(nodes)

    def plan(request: Request) -> Made:
        number = request.cluster.nodes
        if not speed(number):
            raise InfeasibleError("nothing fits; take more nodes")
        made = tiny_plan()
        predicted = made.predicted.model_copy(update={"tokens_per_second": speed(number)})
        parts = {"predicted": predicted, "cluster": request.cluster, "training": training}
        return Made(made.model_copy(update=parts))

    request = Request(find_model("tiny-llama-test"), training, cluster)
    return cheapest(request, within, plan)


def nodes_of(found: Cheapest[Made]) -> int:
    return found.best.plan.cluster.nodes


def test_fewer_nodes_where_more_of_them_wait_for_each_other() -> None:
    found = solved(lambda n: 1000.0 * n**0.9, 4)
    assert nodes_of(found) == 1
    assert [tried.nodes for tried in found.tried] == [1, 2, 3, 4]
    assert all(tried.bill is not None for tried in found.tried)


def test_more_nodes_where_few_have_to_offload_or_cannot() -> None:
    assert nodes_of(solved(lambda n: 0.0 if n < 2 else (500.0 if n == 2 else 1000.0 * n), 4)) == 4


def test_of_equal_bills_the_faster() -> None:
    assert nodes_of(solved(lambda n: 1024.0 * n, 4)) == 4


def test_of_bills_less_than_a_hundredth_apart_the_faster() -> None:
    """Simulations tell plans apart to a hundredth: fewer dollars are no reason to wait."""
    assert nodes_of(solved(lambda n: 1000.0 * n * 0.997 ** (n - 1), 4)) == 4
    assert nodes_of(solved(lambda n: 1000.0 * n * 0.994 ** (n - 1), 4)) == 2


def test_in_time_comes_before_cheap() -> None:
    day = 86400.0
    speed: Speed = lambda n: 1000.0 * n**0.9  # noqa: E731
    assert nodes_of(solved(speed, 8, TOKENS / 1000.0 / 2.5)) == 3
    with pytest.raises(InfeasibleError, match=r"up to 2 ends within 1 days: the fastest .* 6\.2"):
        solved(speed, 2, day)


def test_a_fastest_plan_ends_in_time_or_is_none() -> None:
    fastest = solved(lambda n: 1000.0, 1).best.plan  # of one node
    require_in_time(fastest, None)
    require_in_time(fastest, TOKENS / 999.0)
    with pytest.raises(LateError, match=r"may take 11\.\d+ days; allow more time"):
        require_in_time(fastest, TOKENS / 1001.0)


def test_nothing_fits_any_number_of_nodes() -> None:
    with pytest.raises(InfeasibleError, match="nothing fits"):
        solved(lambda _: 0.0, 2)


def test_what_the_peak_cannot_reach_is_not_planned() -> None:
    training = Training(sequence_length=8192, global_batch=512, tokens=10**12)
    cluster = find_cluster("dgx-h100").with_nodes(16)
    request = Request(find_model("llama-3-70b"), training, cluster)
    # 6 x 70e9 x 1e12 FLOP, and attention, on 128 GPUs of 989 TFLOP/s: 38 days and more
    assert too_late(request, 30 * 86400.0)
    assert not too_late(request, 60 * 86400.0)
    assert not too_late(request, None)


def test_numbers_of_nodes_worth_a_plan() -> None:
    assert node_counts(5) == (1, 2, 3, 4, 5)
    assert node_counts(40) == (*range(1, 17), *range(18, 33, 2), 36, 40)
    assert node_counts(41)[-2:] == (40, 41)
