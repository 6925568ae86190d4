import pytest

from bigplan.batch import LargerBatch
from bigplan.graph.strategy import Strategy
from bigplan.largest import Largest
from bigplan.report.tables import help_report, largest_table, step_text, unasked_text
from bigplan.whatif import Answer, Outcome
from tests.report.shown import shown
from tests.wording import tells


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


def test_a_larger_batch_is_told_with_what_it_brings() -> None:
    batch = LargerBatch(528, 512, 0.1, 31.0, Strategy(dp=24), at_least=False)
    text = " ".join(shown(help_report(Answer((), (), batch))).split())
    assert tells(text, "528 sequences", "512", "10%")
    assert "a step of 31 s with data parallel 24" in text
    stopped = LargerBatch(528, 512, 0.1, 31.0, Strategy(dp=16), at_least=True)
    text = " ".join(shown(help_report(Answer((), (), stopped))).split())
    assert "at least 10% more" in text


def test_what_fits_stands_beside_what_does_not() -> None:
    deeper = Largest("layers", 32, 400, 416, 88 * 10**9, 12.5, 65536)
    as_it_is = Largest("micro_batch", 2, 2, None, 8 * 10**9, None, None)
    lines = [
        " ".join(line.split()) for line in shown(largest_table([deeper, as_it_is])).split("\n")
    ]
    assert "layers of this kind 32 400 (88 B parameters) 416 12.5 s for 65.5 k tokens" in lines
    assert "sequences that a GPU computes at once 2 2 - -" in lines
