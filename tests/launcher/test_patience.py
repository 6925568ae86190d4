"""So many starts in a row, and again as many once a step is gained."""

from bigplan.launcher.patience import Patience


def test_starts_without_a_new_step_are_counted() -> None:
    patience = Patience(2)
    assert [patience.again(0) for _ in range(3)] == [True, True, False]


def test_a_step_that_was_done_before_is_no_gain() -> None:
    patience = Patience(2)
    assert [patience.again(reached) for reached in (5, 5, 6, 6, 6)] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_none() -> None:
    assert not Patience(0).again(7)
