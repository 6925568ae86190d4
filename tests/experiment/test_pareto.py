"""The Pareto front: what no other point beats in everything."""

from bigplan.experiment.pareto import front
from tests.experiment.rows import row


def test_each_objective_keeps_a_point() -> None:
    rows = [
        row(1000.0, dollars_per_million_tokens=5.0, drive_bytes_per_million_tokens=8.0),
        row(900.0, dollars_per_million_tokens=4.0, drive_bytes_per_million_tokens=8.0),
        row(
            800.0, dollars_per_million_tokens=6.0, gpu_bytes=10, drive_bytes_per_million_tokens=8.0
        ),
        row(700.0, dollars_per_million_tokens=6.0),
        row(600.0, dollars_per_million_tokens=7.0),  # slower and dearer than the one before
        row(5000.0, status="failed"),
    ]
    assert front(rows) == (0, 1, 2, 3)


def test_of_equal_points_the_first_and_the_fourth_digit_is_none() -> None:
    assert front([row(1000.0), row(1000.0), row(1000.4)]) == (0,)


def test_another_model_or_one_without_a_price_is_no_rival() -> None:
    priced = row(500.0, dollars_per_million_tokens=1.0)
    assert front([row(1000.0), priced, row(400.0, model="n"), row(300.0, parameters=11)]) == (
        0,
        1,
        2,
        3,
    )
