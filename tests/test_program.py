from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bigplan.content import Content, HeldContent, Holds
from bigplan.placement import Share, Tier
from bigplan.program import (
    Action,
    Buffer,
    Lane,
    Op,
    Program,
    Ref,
    Repeat,
    counted,
    entry,
    expand,
    held,
)

WEIGHTS, ACTIVATIONS = Content(Holds.PARAMETERS, 1), Content(Holds.ACTIVATIONS, 1)
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
    assert held(moving, 5) == HeldContent(ACTIVATIONS, 5)
    still = Ref("ring", WEIGHTS, 4)
    assert (entry(still, BUFFERS, 5), held(still, 5)) == (("ring", 1), HeldContent(WEIGHTS))


def test_bytes_by_tier() -> None:
    program = Program(0, BUFFERS, {}, (), (), ())
    assert program.bytes_by_tier() == {Tier.GPU: 30, Tier.HOST: 12, Tier.NVME: 0}


def test_what_begins_in_the_memory_of_another_takes_what_it_has_more() -> None:
    kept = Buffer("a1", Tier.HOST, 8, "activations", 2, within="g1")
    buffers = {
        "g1": Buffer("g1", Tier.HOST, 10, "gradients"),
        "a1": kept,
        "w1": Buffer("w1", Tier.HOST, 5, "parameters"),
    }
    program = Program(0, buffers, {}, (), (), ())
    assert [program.added_bytes(b) for b in buffers.values()] == [10, 6, 5]
    assert program.bytes_by_tier()[Tier.HOST] == 21
    less = Program(0, buffers | {"a1": replace(kept, count=1)}, {}, (), (), ())
    assert less.bytes_by_tier()[Tier.HOST] == 15


def test_what_is_at_home_is_found_by_content() -> None:
    state = Content(Holds.STATE, 1, Share.NVME)
    home = Buffer("home", Tier.HOST, 7, "parameters", home_of=WEIGHTS)
    chunks = Buffer("chunks", Tier.NVME, 7, "optimizer", 3, home_of=state)
    passing = Buffer("ring", Tier.GPU, 7, "slots", 3)
    buffers = {buffer.name: buffer for buffer in (home, chunks, passing)}
    program = Program(0, buffers, {}, (), (), ())
    assert program.home(WEIGHTS) is home
    assert program.home(ACTIVATIONS) is None
    assert [program.home(state._replace(chunk=i)) for i in range(3)] == [chunks] * 3
    assert program.home(state._replace(share=Share.HOST)) is None
    assert replace(program, buffers={}).home(WEIGHTS) is None
