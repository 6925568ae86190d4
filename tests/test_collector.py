import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from bigplan.collector import COLLECTED, collected_rarely
from bigplan.engines import make_plan
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("users", "within"), [(700, COLLECTED), (2 * COLLECTED, 2 * COLLECTED), (0, 0)]
)
def test_the_users_threshold_holds_again_after_the_block(users: int, within: int) -> None:
    gc.set_threshold(users, 11, 12)
    with suppress(KeyError), collected_rarely():
        assert gc.get_threshold() == (within, 11, 12)
        raise KeyError
    assert gc.get_threshold() == (users, 11, 12)


@pytest.mark.usefixtures("first_plans")
def test_it_holds_while_python_asks_for_a_plan() -> None:
    seen = set[int]()

    def watch(best: float | None, bound: float, left: int) -> bool:
        seen.add(gc.get_threshold()[0])
        return True

    gc.set_threshold(700)
    training = Training(sequence_length=32, global_batch=4)
    make_plan(Request(find_model("tiny-llama-test"), training, find_cluster("h200-1x")), watch)
    assert seen == {COLLECTED}
    assert gc.get_threshold()[0] == 700
