from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.content import Content, Held, Holds
from bigplan.placement import Share, Tier
from bigplan.program import (
    Action,
    Buffer,
    Dependencies,
    Lane,
    Op,
    Program,
    Ref,
    Repeat,
    counted,
    entry,
    expand,
    held,
    order_of,
)

WEIGHTS, OTHERS = Content(Holds.PARAMETERS, 1), Content(Holds.PARAMETERS, 2)
GRADIENTS, ACTIVATIONS = Content(Holds.GRADIENTS, 1), Content(Holds.ACTIVATIONS, 1)
BUFFERS = {
    "ring": Buffer("ring", Tier.GPU, 10, "slots", 3),
    "home": Buffer("home", Tier.HOST, 7, "parameters"),
    "split": Buffer("split", Tier.HOST, 5, "parameters", shares=(Share.STREAMED, Share.HOST)),
}


def _forward(micro_batch: int, layer: int = 0) -> Action:
    return Action(Op.FORWARD, Lane.COMPUTE, layer, micro_batch=micro_batch)


def test_repeats_advance_micro_batches() -> None:
    once = Action(Op.LOAD, Lane.H2D, 0)
    inner = Repeat(2, 1, (_forward(0),))
    outer = Repeat(3, 2, (once, inner))
    numbers = [action.micro_batch for action in expand((_forward(0), outer))]
    assert numbers == [0, -1, 0, 1, -1, 2, 3, -1, 4, 5]
    assert list(counted((_forward(0), outer))) == [(_forward(0), 1), (once, 3), (_forward(0), 6)]


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 20))
def test_a_repeat_is_its_body_written_out(count: int, stride: int, start: int) -> None:
    body = (_forward(start), _forward(start + 1, layer=1))
    written = [_forward(a.micro_batch + i * stride, a.layer) for i in range(count) for a in body]
    assert list(expand((Repeat(count, stride, body),))) == written


def test_entries_and_contents_follow_the_micro_batch() -> None:
    moving = Ref("ring", ACTIVATIONS, 2, moving=True)
    assert [entry(moving, BUFFERS, m) for m in range(3)] == [("ring", 2), ("ring", 0), ("ring", 1)]
    assert held(moving, 5) == Held(ACTIVATIONS, 5)
    still = Ref("ring", WEIGHTS, 4)
    assert (entry(still, BUFFERS, 5), held(still, 5)) == (("ring", 1), Held(WEIGHTS))


def test_dependencies_are_reads_after_writes_and_writes_after_reads() -> None:
    slot, home, other = Ref("ring", WEIGHTS), Ref("home", WEIGHTS), Ref("ring", OTHERS, 1)
    order = Dependencies(BUFFERS)
    waits = [
        order.add(Action(Op.LOAD, Lane.H2D, 0, (home,), (slot,))),
        order.add(Action(Op.FORWARD, Lane.COMPUTE, 0, (slot,))),  # after the load
        order.add(Action(Op.FORWARD, Lane.COMPUTE, 0, (slot,))),  # readers do not wait
        order.add(Action(Op.LOAD, Lane.H2D, 1, (), (other,))),  # another entry
        order.add(Action(Op.LOAD, Lane.H2D, 0, (home,), (slot,))),  # after writer and readers
        order.add(Action(Op.FREE, Lane.COMPUTE, 0, frees=(slot,))),  # a free is a write
        order.add(Action(Op.UPDATE, Lane.CPU, 0, (home,), (home,))),  # not after itself
    ]
    assert waits == [set(), {0}, {0}, set(), {0, 1, 2}, {4}, {0, 4}]


def test_rows_of_other_shares_do_not_wait_for_each_other() -> None:
    shares = Share.STREAMED, Share.HOST
    buffers = {"w0": Buffer("w0", Tier.HOST, 8, "parameters", shares=shares)}
    whole, streamed, by_cpu = (Ref("w0", WEIGHTS, rows=rows) for rows in (None, *shares))
    order = Dependencies(buffers)
    waits = [
        order.add(Action(Op.STATE_OUT, Lane.STATE_OUT, 0, writes=(streamed,))),
        order.add(Action(Op.UPDATE, Lane.CPU, 0, writes=(by_cpu,))),
        order.add(Action(Op.STATE_OUT, Lane.STATE_OUT, 0, writes=(streamed,))),
        order.add(Action(Op.LOAD, Lane.H2D, 0, reads=(whole,))),  # needs all rows
        order.add(Action(Op.UPDATE, Lane.CPU, 0, writes=(by_cpu,))),
        order.add(Action(Op.GATHER, Lane.COMM, 0, writes=(whole,))),
        order.add(Action(Op.UPDATE, Lane.CPU, 0, reads=(by_cpu,))),
    ]
    assert waits == [set(), set(), {0}, {1, 2}, {1, 3}, {2, 3, 4}, {5}]


def test_what_begins_in_the_memory_of_another_takes_turns_with_it() -> None:
    home = Buffer("g1", Tier.HOST, 10, "gradients")
    kept = Buffer("a1", Tier.HOST, 8, "activations", 2, within="g1")
    buffers = {"g1": home, "a1": kept, "w1": Buffer("w1", Tier.HOST, 5, "parameters")}
    gradients, activations = Ref("g1", GRADIENTS), Ref("a1", ACTIVATIONS, moving=True)
    order = Dependencies(buffers)
    waits = [
        order.add(Action(Op.UPDATE, Lane.CPU, 1, (gradients,))),
        order.add(Action(Op.SAVE, Lane.D2H, 1, writes=(activations,), micro_batch=0)),
        order.add(Action(Op.SAVE, Lane.D2H, 1, writes=(activations,), micro_batch=1)),
        order.add(Action(Op.FETCH, Lane.H2D, 1, (activations,), (), (activations,), 0, 0)),
        order.add(Action(Op.GRAD_OUT, Lane.D2H, 1, writes=(gradients,))),
    ]
    assert waits == [set(), {0}, {1}, {1, 2}, {3}]
    program = Program(0, buffers, {}, (), (), ())
    assert [program.added_bytes(b) for b in buffers.values()] == [10, 6, 5]
    assert program.bytes_by_tier()[Tier.HOST] == 21
    less = Program(0, buffers | {"a1": replace(kept, count=1)}, {}, (), (), ())
    assert less.bytes_by_tier()[Tier.HOST] == 15


def test_chunks_of_state_go_no_further_ahead_of_the_forward_than_the_program_has_them() -> None:
    arrival = Action(Op.STATE_IN, Lane.STATE_IN, 5)
    kept = Ref("ring", ACTIVATIONS, moving=True)
    forwards = [_forward(m)._replace(writes=(kept,)) for m in range(2)]
    save = Action(Op.SAVE, Lane.D2H, 0, (kept,), (), (kept,), micro_batch=1)
    order = Dependencies(BUFFERS)
    actions = [arrival, *forwards, arrival, save, _forward(0, 1), arrival]
    assert [order.add(a) for a in actions] == [set(), set(), set(), set(), {2}, set(), {2}]


ROWS = st.sampled_from((None, Share.STREAMED, Share.HOST))
ENTRIES = st.lists(
    st.integers(0, 2).map(lambda number: Ref("ring", WEIGHTS, number))
    | ROWS.map(lambda rows: Ref("split", WEIGHTS, rows=rows)),
    max_size=2,
)
ACTIONS = st.builds(
    lambda lane, reads, writes: Action(Op.FREE, lane, 0, tuple(reads), tuple(writes)),
    st.sampled_from((Lane.COMPUTE, Lane.H2D, Lane.CPU)),
    ENTRIES,
    ENTRIES,
)


@given(st.lists(ACTIONS, max_size=14))
@settings(deadline=None)
def test_an_order_names_the_last_of_each_other_lane_and_keeps_all_that_must_wait(
    actions: list[Action],
) -> None:
    dependencies = Dependencies(BUFFERS)
    before: list[set[int]] = []  # of every action all that has ended when it starts
    for number, (action, waits) in enumerate(order_of(BUFFERS, actions)):
        lanes = [actions[other].lane for other in waits]
        assert len(set(lanes)) == len(lanes)
        assert action.lane not in lanes
        earlier = {i for i in range(number) if actions[i].lane is action.lane} | set(waits)
        before.append(earlier.union(*(before[i] for i in earlier)))
        assert dependencies.add(action) <= before[number]


def test_bytes_by_tier() -> None:
    program = Program(0, BUFFERS, {}, (), (), ())
    assert program.bytes_by_tier() == {Tier.GPU: 30, Tier.HOST: 12, Tier.NVME: 0}
