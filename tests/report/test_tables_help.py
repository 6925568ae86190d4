import pytest

from bigplan.report.tables import help_report, step_text, unasked_text
from bigplan.whatif import Answer, Outcome
from tests.report.shown import shown


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome("x", 3.3, 2.6), "3.3 s -> 2.6 s (x1.27)"),
        (Outcome("x", 3.3, 3.3), "no faster (3.3 s)"),
        (Outcome("x", None, 2.6), "fits: step 2.6 s"),
        (Outcome("x", None, None), "still does not fit"),
        (Outcome("x", 3.3, None, reason="dp=3"), "cannot be planned as it stands"),
    ],
)
def test_what_a_change_brings(outcome: Outcome, text: str) -> None:
    assert step_text(outcome) == text
    assert text in shown(help_report(Answer((outcome,), ())))


def test_what_was_not_asked_is_named() -> None:
    assert unasked_text(["more", "other"]).startswith("Would this help? more; other:")
    text = shown(help_report(Answer((), ("more",))))
    assert text.startswith("Would this help? more:")
    assert "solved again" not in text
