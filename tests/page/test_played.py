"""The critical path of an engine that prices events one after the other."""

from bigplan.page.played import chain
from bigplan.program import Lane, Op
from bigplan.timeline import Event


def event(stage: int, start: float, end: float) -> Event:
    return Event(stage, Lane.COMPUTE, Op.FORWARD, 0, 0, start, end)


def test_a_path_leads_back_from_the_last_end_over_stages() -> None:
    first, beside, second = event(0, 0, 2), event(1, 0, 1), event(1, 2, 5)
    assert chain([first, beside, second]) == {0, 2}
    assert chain([second, first, event(0, 2, 3)]) == {0, 1}
    assert chain([]) == frozenset()
