"""What actions wait for: by hand, and against all pairs of actions that share a place."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.content import Content, Holds
from bigplan.order import PACED, EntryPlaces, TimeWaits, Waits, order_of
from bigplan.placement import Share, Tier
from bigplan.program import Action, Buffer, Lane, Op, Ref, entry
from tests.examples import examples

WEIGHTS, OTHERS = Content(Holds.PARAMETERS, 1), Content(Holds.PARAMETERS, 2)
GRADIENTS, ACTIVATIONS = Content(Holds.GRADIENTS, 1), Content(Holds.ACTIVATIONS, 1)
SHARES = (Share.STREAMED, Share.HOST)
BUFFERS = {
    "ring": Buffer("ring", Tier.GPU, 10, "slots", 3),
    "home": Buffer("home", Tier.HOST, 7, "parameters"),
    "split": Buffer("split", Tier.HOST, 5, "parameters", shares=SHARES),
    "g1": Buffer("g1", Tier.HOST, 10, "gradients"),
    "a1": Buffer("a1", Tier.HOST, 8, "activations", 2, within="g1"),
}
KEPT = Ref("a1", ACTIVATIONS, moving=True)
LANES = (Lane.COMPUTE, Lane.H2D, Lane.CPU, Lane.STATE_IN)


def _waits(*actions: Action) -> list[set[int]]:
    return [set(waits) for _, waits in order_of(BUFFERS, actions)]


def test_reads_come_after_changes_and_changes_after_reads() -> None:
    slot, home, other = Ref("ring", WEIGHTS), Ref("home", WEIGHTS), Ref("ring", OTHERS, 1)
    assert _waits(
        Action(Op.LOAD, Lane.H2D, 0, (home,), (slot,)),
        Action(Op.FORWARD, Lane.COMPUTE, 0, (slot,)),  # after the load
        Action(Op.FORWARD, Lane.COMPUTE, 0, (slot,)),  # its lane has waited
        Action(Op.LOAD, Lane.H2D, 1, (), (other,)),  # another entry
        Action(Op.LOAD, Lane.H2D, 0, (home,), (slot,)),  # after the last reader
        Action(Op.FREE, Lane.COMPUTE, 0, frees=(slot,)),  # a free is a change
        Action(Op.UPDATE, Lane.CPU, 0, (home,), (home,)),  # not after itself
    ) == [set(), {0}, set(), set(), {2}, {4}, {4}]


def test_rows_of_other_shares_do_not_wait_for_each_other() -> None:
    whole, streamed, by_cpu = (Ref("split", WEIGHTS, rows=rows) for rows in (None, *SHARES))
    assert _waits(
        Action(Op.STATE_OUT, Lane.STATE_OUT, 0, writes=(streamed,)),
        Action(Op.UPDATE, Lane.CPU, 0, writes=(by_cpu,)),
        Action(Op.UPDATE, Lane.GPU_UPDATE, 0, reads=(streamed,)),
        Action(Op.LOAD, Lane.H2D, 0, reads=(whole,)),  # needs all rows
        Action(Op.UPDATE, Lane.CPU, 0, writes=(by_cpu,)),
        Action(Op.GATHER, Lane.COMM, 0, writes=(whole,)),
        Action(Op.UPDATE, Lane.CPU, 0, reads=(by_cpu,)),
    ) == [set(), set(), {0}, {0, 1}, {3}, {2, 4}, {5}]


def test_what_begins_in_the_memory_of_another_takes_turns_with_it() -> None:
    gradients = Ref("g1", GRADIENTS)
    assert _waits(
        Action(Op.UPDATE, Lane.CPU, 1, (gradients,)),
        Action(Op.SAVE, Lane.D2H, 1, writes=(KEPT,), micro_batch=0),
        Action(Op.FETCH, Lane.H2D, 1, (KEPT,), (), (KEPT,), 0, 0),
        Action(Op.GRAD_OUT, Lane.D2H, 1, writes=(gradients,)),
    ) == [set(), {0}, {1}, {2}]


def test_chunks_of_state_go_no_further_ahead_of_the_forward_than_the_program_has_them() -> None:
    arrival = Action(Op.STATE_IN, Lane.STATE_IN, 5)
    left = Ref("ring", ACTIVATIONS, moving=True)
    forwards = [
        Action(Op.FORWARD, Lane.COMPUTE, 0, writes=(left,), micro_batch=number)
        for number in range(2)
    ]
    save = Action(Op.SAVE, Lane.D2H, 0, (left,), (), (left,), micro_batch=1)
    last = Action(Op.FORWARD, Lane.COMPUTE, 1)
    waits = _waits(arrival, *forwards, arrival, save, last, arrival)
    assert waits == [set(), set(), set(), set(), {2}, set(), {2}]


ONE = (
    st.integers(0, 2).map(lambda number: Ref("ring", WEIGHTS, number))
    | st.sampled_from((None, *SHARES)).map(lambda rows: Ref("split", WEIGHTS, rows=rows))
    | st.sampled_from((Ref("g1", GRADIENTS), KEPT, KEPT._replace(entry=1)))
)
REFS = st.sampled_from((0, 1, 1, 2)).flatmap(lambda count: st.tuples(*[ONE] * count))
ACTIONS = st.builds(
    lambda lane, reads, writes, frees, number: Action(
        Op.FREE, lane, 0, reads, writes, frees, micro_batch=number
    ),
    st.sampled_from(LANES),
    REFS,
    REFS,
    REFS,
    st.integers(0, 3),
) | st.builds(
    lambda ref, number: Action(Op.SAVE, Lane.D2H, 0, (ref,), micro_batch=number),
    ONE,
    st.integers(0, 3),
)


def _touched(refs: Iterable[Ref], action: Action) -> set[tuple[str, int, Share | None]]:
    """Entries, or rows of them, with those in whose memory they are."""
    found = set[tuple[str, int, Share | None]]()
    for ref in refs:
        name, number = entry(ref, BUFFERS, action.micro_batch)
        rows = (ref.rows,) if ref.rows else BUFFERS[name].shares or (None,)
        found |= {(name, number, share) for share in rows}
        if BUFFERS[name].within:
            found.add((BUFFERS[name].within, 0, None))
    return found


def _must_follow(actions: list[Action], late: int) -> set[int]:
    """All earlier actions that share a place with this one which either changes; and the pace."""
    reads = [_touched(action.reads, action) for action in actions]
    changes = [_touched((*action.writes, *action.frees), action) for action in actions]
    after = {
        early
        for early in range(late)
        if changes[early] & (reads[late] | changes[late]) or reads[early] & changes[late]
    }
    saves = [number for number in range(late) if actions[number].op is Op.SAVE]
    if actions[late].lane in PACED and saves:
        left = [early for early in range(saves[-1]) if changes[early] & reads[saves[-1]]]
        after |= set(left)
    return after


@given(st.lists(ACTIONS, max_size=14))
@settings(max_examples=examples(200), deadline=None)
def test_an_order_has_what_must_wait_and_nothing_else(actions: list[Action]) -> None:
    before: list[set[int]] = []  # of every action all that has ended when it starts
    for number, (action, waits) in enumerate(order_of(BUFFERS, actions)):
        lanes = [actions[other].lane for other in waits]
        assert len(set(lanes)) == len(lanes)
        assert action.lane not in lanes
        own = {i for i in range(number) if actions[i].lane is action.lane}
        earlier = own | set(waits)
        before.append(earlier.union(*(before[i] for i in earlier)))
        assert not any(wait in before[i] for wait in waits for i in earlier)  # none needlessly
        needed = _must_follow(actions, number)
        assert set(waits) <= needed <= before[number]


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 3)), max_size=20))
@settings(max_examples=examples(200), deadline=None)
def test_times_wait_by_the_same_rules(actions: list[tuple[Action, int]]) -> None:
    places = EntryPlaces(BUFFERS)
    rules, times = Waits[float](places.count, 0.0, max), TimeWaits(places.count, 0.0, max)
    for action, seconds in actions:
        uses = places.uses(action)
        reads, changes = uses.at(action.micro_batch)
        begin = rules.begin(uses, reads, changes, 0.0)
        assert times.begin(uses, reads, changes, 0.0) == begin
        rules.end(reads, changes, begin + seconds)
        times.end(reads, changes, begin + seconds)
        assert (times.changed, times.used, times.pace) == (rules.changed, rules.used, rules.pace)
