"""How a search is shown, limited and interrupted; clocks and signals are given, not waited for."""

import os
import signal

import pytest

from bigplan.cli import waiting
from bigplan.cli.waiting import Waiting, progress_text
from bigplan.errors import InputError
from tests.wording import tells


def test_a_time_limit_ends_the_search_once_there_is_a_plan() -> None:
    with Waiting("Planning", time_limit=0.0) as search:
        assert search.go_on(None, 1.0, 5)
        assert not search.go_on(2.0, 1.0, 4)
    with Waiting("Planning") as search:
        assert search.go_on(2.0, 1.0, 4)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_keeps_the_best_plan_and_a_second_one_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Waiting("Planning") as search:
        interrupt()
        assert not search.go_on(2.0, 1.0, 4)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def interrupted(*, keeps_best: bool, error: Exception | None) -> None:
    with Waiting("Planning", keeps_best=keeps_best) as search:
        interrupt()
        assert not search.go_on(None, 1.0, 4)
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("keeps_best", "error"), [(True, InputError("no plan yet")), (False, None)]
)
def test_without_a_plan_to_keep_an_interrupt_ends_the_program(
    keeps_best: bool, error: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted(keeps_best=keeps_best, error=error)
    assert signal.getsignal(signal.SIGINT) is before
    told = "bigplan: Planning: interrupted, and there is no answer to keep\n"
    assert capsys.readouterr().err == told
    interrupted(keeps_best=True, error=None)
    assert capsys.readouterr().err == ""


def test_it_is_shown_on_a_terminal_only_and_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Terminal:
        is_terminal = True

        def __init__(self, *, stderr: bool) -> None:
            assert stderr

        def status(self, text: str) -> "Terminal":
            shown.append(text)
            return self

        def start(self) -> None: ...

        def stop(self) -> None:
            shown.append("stopped")

        def update(self, text: str) -> None:
            shown.append(text)

    monkeypatch.setattr(waiting, "Console", Terminal)
    with Waiting("Planning") as search:
        search.go_on(None, 1.0, 5)
        assert shown == []
        monkeypatch.setattr(waiting, "SILENT", 0.0)
        search.go_on(None, 1.0, 5)
        search.go_on(2.0, 1.0, 1234)
    before, after, last = shown
    assert tells(before, "Planning", "no plan", "1 s", "5 strategies")
    assert tells(after, "Planning", "2 s", "1 s", "1,234 strategies")
    assert last == "stopped"
    monkeypatch.setattr(Terminal, "is_terminal", False)
    with Waiting("Planning") as search:
        search.go_on(2.0, 1.0, 4)
    assert len(shown) == 3


def test_progress_is_one_line() -> None:
    text = progress_text("Planning x", 90.0, 60.0, 7)
    assert tells(text, "Planning x", "90 s", "60 s", "7 strategies")
    assert "\n" not in text
    # Where nothing fits, no bound is finite.
    text = progress_text("Planning x", None, float("inf"), 3)
    assert tells(text, "Planning x", "no plan", "3 strategies")
    assert "inf" not in text
