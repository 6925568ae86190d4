"""Steady repetitions, played only until every later one is known.

A repetition maps times to times by sums and maxima, so it commutes with adding a constant to all of
them: when every clock advances by the same time, so will it in every repetition that follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.program import Op
from bigplan.simulate.moment import Skipped
from bigplan.simulate.rank import Mail, Message, Rank, run

SAME = 1e-9  # two shifts are equal if they differ by less than this part of them
ROUNDS = 8  # fewer repetitions than this are played one by one,
ROUNDS_PER_STAGE = 3  # fewer for each stage of a pipeline are, too, until it is steady


def _main_segment(rank: Rank) -> int | None:
    """The repeated forward and backward passes, if there are enough of them to be worth it."""
    sizes = [len(segment.steps) * (segment.count - 1) for segment in rank.segments]
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    ops = {step[-1].op for step, *_ in rank.segments[longest].steps}
    return longest if ops >= {Op.FORWARD, Op.BACKWARD} else None


@dataclass(frozen=True, slots=True)
class _Steady:
    """The lanes and places that a repetition of a rank's main segment uses."""

    rank: Rank
    stride: int
    lanes: list[int]
    paces: bool  # whether its actions change the pace of paced chunks
    changed: list[int]
    used: list[int]
    # By place of a ring that moves: the ring's first place and its length.
    ring: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, rank: Rank) -> _Steady:
        """The lanes and places that the main segment's steps name."""
        assert rank.main is not None
        segment = rank.segments[rank.main]
        every = [step[1] for step, *_ in segment.steps]
        moving = {(a, n) for uses in every for a, _, n in uses.moving_reads + uses.moving_changes}
        ring = {a + i: (a, n) for a, n in moving for i in range(n)}
        changed = {place for uses in every for place in uses.changes} | set(ring)
        return cls(
            rank,
            segment.stride,
            sorted({step[0] for step, *_ in segment.steps}),
            any(uses.sets_pace for uses in every),
            sorted(changed),
            sorted(changed | {place for uses in every for place in uses.reads}),
            ring,
        )

    def moved(self, place: int, rounds: int) -> int:
        """The place that has `place`'s role after `rounds` more rounds."""
        if place not in self.ring:
            return place
        first, count = self.ring[place]
        return first + (place - first + rounds * self.stride) % count

    def times(self, rounds: int) -> list[float]:
        """All times that the coming repetitions depend on, in an order that follows the roles."""
        rank = self.rank
        return [*[rank.clock(lane) for lane in self.lanes], *self._of_places(rounds)]

    def ends(self, rounds: int) -> list[float]:
        """As `times`, but for lanes that share a link the end of their own last action."""
        return [*[self.rank.clocks[lane] for lane in self.lanes], *self._of_places(rounds)]

    def _of_places(self, rounds: int) -> list[float]:
        waits = self.rank.waits
        return [
            *([waits.pace] if self.paces else []),
            *[waits.changed[self.moved(place, rounds)] for place in self.changed],
            *[waits.used[self.moved(place, rounds)] for place in self.used],
        ]

    def skip(self, skipped: Skipped) -> None:
        """Let repetitions pass that together advance every time by the same amount."""
        rank, waits = self.rank, self.rank.waits
        changed, used = waits.changed[:], waits.used[:]
        for lane in self.lanes:
            rank.clocks[lane] = skipped.later(rank.clocks[lane])
        for link in {id(link): link for link in rank.links.values()}.values():
            link.shift(skipped.seconds)
        if self.paces:
            waits.pace = skipped.later(waits.pace)
        for place in self.changed:
            waits.changed[self.moved(place, skipped.rounds)] = skipped.later(changed[place])
        for place in self.used:
            waits.used[self.moved(place, skipped.rounds)] = skipped.later(used[place])
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
    """By how much every time has advanced; None if not all advanced alike."""
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
