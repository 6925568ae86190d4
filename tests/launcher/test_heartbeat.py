"""How long a rank may be silent, by what it is called for."""

import pytest

from bigplan.errors import LostError
from bigplan.launcher.actor import Beat
from bigplan.launcher.heartbeat import EVERY, PATIENT, SILENT, Allowed, Heartbeat, _RankPulse


class Silent(Heartbeat):
    """Of ranks that never answer."""

    now = 0.0

    def _ask(self, actor: object) -> object:
        return actor

    def _hear(self, rank: _RankPulse, now: float) -> None:
        del rank, now


def silent(beat: Beat | None) -> Silent:
    """One rank that was asked at 0 s, and what it said before."""
    found = Silent([object()], clock=lambda: Silent.now)
    Silent.now = 0.0
    found.begin()
    found._ranks[0].beat = beat
    return found


def longest(beat: Beat | None, allowed: Allowed) -> float:
    """Seconds after which it is called lost."""
    heart = silent(beat)
    while True:
        Silent.now += EVERY
        try:
            heart.look(allowed, "checking")
        except LostError:
            return Silent.now


def test_a_rank_that_froze_while_its_machine_is_checked_is_noticed_within_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bigplan.launcher.heartbeat._end", lambda beat: None)
    beat = Beat("node", 1, 0, ())
    assert longest(beat, Allowed.checking()) == SILENT + EVERY < 60
    assert longest(beat, Allowed.elsewhere()) == PATIENT * SILENT + EVERY
    assert longest(None, Allowed.checking()) == PATIENT * SILENT + EVERY  # it may be importing
