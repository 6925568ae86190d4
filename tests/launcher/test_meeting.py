"""A board alone; tests/launcher/test_nodes.py has ranks that meet at one."""

import asyncio

import pytest

pytest.importorskip("torch")

from bigplan.launcher.meeting import Board


async def _meet() -> None:
    board = Board()
    waiting = asyncio.ensure_future(board.found(["a", "b"], 10.0))
    await board.put("a", b"1")
    assert not await board.has(["a", "b"])
    await board.put("b", b"2")
    assert await waiting == [b"1", b"2"]
    assert await board.found(["c"], 0.01) is None
    assert [await board.added("n", 2), await board.added("n", 3)] == [2, 5]
    assert await board.exchanged("n", b"4", b"9") == b"5"
    assert await board.exchanged("n", b"5", b"9") == b"9"
    assert await board.exchanged("new", b"", b"1") == b"1"
    assert await board.exchanged("newer", b"x", b"1") == b"x"
    assert await board.number() == 4
    assert [await board.removed("a"), await board.removed("a")] == [True, False]


def test_keys_that_come_later_are_waited_for() -> None:
    asyncio.run(_meet())
