import inspect

import pytest

from bigplan import errors


def test_every_error_descends_from_the_root_and_has_an_exit_code() -> None:
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass)]
    raised = [item for item in classes if item.__module__ == errors.__name__]
    assert len(raised) == 14
    assert all(issubclass(item, errors.BigplanError) for item in raised)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BigplanError, 1),
        (errors.InputError, 2),
        (errors.RefusedError, 2),
        (errors.InfeasibleError, 3),
        (errors.LateError, 3),
        (errors.PreflightError, 4),
        (errors.WorkerError, 5),
        (errors.CheckpointError, 6),
        (errors.VerificationError, 1),
    ],
)
def test_exit_codes(error: type[errors.BigplanError], code: int) -> None:
    assert error("text").exit_code == code


def test_infeasible_says_what_is_missing() -> None:
    error = errors.InfeasibleError("no", tier="host", stage="last", bytes_short=7, remedy="more")
    assert (str(error), error.tier, error.stage, error.bytes_short, error.remedy) == (
        "no",
        "host",
        "last",
        7,
        "more",
    )
