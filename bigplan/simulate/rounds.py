"""Steady repetitions, played only until every later one is known.

A repetition maps times to times by sums and maxima, so it commutes with adding a constant to all of
them: when every clock advances by the same time, so will it in every repetition that follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.program import Op
from bigplan.simulate.moment import Skipped
from bigplan.simulate.rank import PACE, Mail, Message, Rank, run

SAME = 1e-9  # two shifts this close, relative to the shift, are equal
ROUNDS = 8  # fewer repetitions are played one by one,
ROUNDS_PER_STAGE = 3  # as are as many as a pipeline needs until it is steady


def _main_segment(rank: Rank) -> int | None:
    """The repeated forward and backward passes, if there are enough of them to be worth it."""
    sizes = [len(segment.steps) * (segment.count - 1) for segment in rank.segments]
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    ops = {step[-1].op for step, _ in rank.segments[longest].steps}
    return longest if ops >= {Op.FORWARD, Op.BACKWARD} else None


@dataclass(frozen=True, slots=True)
class _Steady:
    """What a repetition of a rank's main segment uses; `pairs`: where an entry's role goes next."""

    rank: Rank
    stride: int
    lanes: list[int]
    written: list[int]
    used: list[int]
    ring: dict[int, tuple[int, int]]  # by entry of a ring that moves

    @classmethod
    def of(cls, rank: Rank) -> _Steady:
        """The lanes and entries that the main segment's steps name."""
        assert rank.main is not None
        segment = rank.segments[rank.main]
        steps = [step for step, _ in segment.steps]
        moving = {(a, n) for step in steps for a, _, n in (*step[3], *step[5])}
        ring = {a + i: (a, n) for a, n in moving for i in range(n)}
        saves = any(step[-1].op is Op.SAVE for step in steps)  # else the pace's clock stands
        changed = {e for step in steps for e in step[4]} | set(ring)
        return cls(
            rank,
            segment.stride,
            [*sorted({step[0] for step in steps}), *([PACE] if saves else [])],
            sorted(changed),
            sorted(changed | {e for step in steps for e in step[2]}),
            ring,
        )

    def moved(self, entry: int, rounds: int) -> int:
        """The entry that plays `entry`'s part so many rounds later."""
        if entry not in self.ring:
            return entry
        first, count = self.ring[entry]
        return first + (entry - first + rounds * self.stride) % count

    def times(self, rounds: int) -> list[float]:
        """All times that the coming repetitions depend on, in an order that follows the roles."""
        rank = self.rank
        return [*[rank.clock(lane) for lane in self.lanes], *self._entries(rounds)]

    def ends(self, rounds: int) -> list[float]:
        """The same, but of lanes that share a link the end of their own last action."""
        return [*[self.rank.clocks[lane] for lane in self.lanes], *self._entries(rounds)]

    def _entries(self, rounds: int) -> list[float]:
        rank = self.rank
        return [
            *[rank.written[self.moved(entry, rounds)] for entry in self.written],
            *[rank.used[self.moved(entry, rounds)] for entry in self.used],
        ]

    def skip(self, skipped: Skipped) -> None:
        """Let the repetitions pass, which together advance every time alike."""
        rank = self.rank
        written, used = rank.written[:], rank.used[:]
        for lane in self.lanes:
            rank.clocks[lane] = skipped.later(rank.clocks[lane])
        for link in {id(link): link for link in rank.links.values()}.values():
            link.shift(skipped.seconds)
        for entry in self.written:
            rank.written[self.moved(entry, skipped.rounds)] = skipped.later(written[entry])
        for entry in self.used:
            rank.used[self.moved(entry, skipped.rounds)] = skipped.later(used[entry])
        rank.repetition += skipped.rounds


def play_steady(ranks: list[Rank]) -> None:
    """Play the ranks up to the end of their steady passes, where those are worth skipping."""
    mains = [_main_segment(rank) for rank in ranks]
    long = ROUNDS + ROUNDS_PER_STAGE * (len(ranks) - 1)
    pairs = list(zip(ranks, mains, strict=True))
    if all(main is not None and rank.segments[main].count >= long for rank, main in pairs):
        for rank, main in pairs:
            rank.main = main
        _run_rounds(ranks)
        for rank in ranks:
            rank.main, rank.at_round = None, False


def _run_rounds(ranks: list[Rank]) -> None:
    """Play one repetition of every main segment at a time; skip those that repeat the last one.

    Two equal advances in a row show that no time from outside the block matters any more.
    """
    run(ranks)
    every = [_Steady.of(rank) for rank in ranks]
    count = min(rank.segments[rank.main or 0].count for rank in ranks)
    mail, stride = ranks[0].mail, every[0].stride
    if any(steady.stride != stride for steady in every):
        return
    last: tuple[list[Message], list[float]] | None = None
    last_shift, before = None, list[float]()
    for done in range(count - 1):
        messages = sorted((content, number - done * stride) for content, number in mail)
        times = [mail[content, number + done * stride] for content, number in messages]
        now = messages, [*times, *(t for steady in every for t in steady.times(done))]
        ends = [*times, *(t for steady in every for t in steady.ends(done))]
        shift = _shift(last, now)
        if shift is not None and last_shift is not None and abs(shift - last_shift) <= SAME * shift:
            rounds = count - 1 - done
            _skip(every, mail, Skipped(rounds, rounds * shift, before, ends))
            return
        last, last_shift, before = now, shift, ends
        for rank in ranks:
            rank.at_round = False
        run(ranks)


def _shift(
    last: tuple[list[Message], list[float]] | None,
    now: tuple[list[Message], list[float]],
) -> float | None:
    """By how much every time has advanced; None where not all by the same."""
    if last is None or last[0] != now[0]:
        return None
    shift = now[1][-1] - last[1][-1]
    same = all(abs(b - a - shift) <= SAME * shift for a, b in zip(last[1], now[1], strict=True))
    return shift if same and shift > 0 else None


def _skip(every: list[_Steady], mail: Mail, skipped: Skipped) -> None:
    for steady in every:
        steady.skip(skipped)
    further = skipped.rounds * every[0].stride
    moved = {(content, n + further): skipped.later(t) for (content, n), t in mail.items()}
    mail.clear()
    mail.update(moved)
