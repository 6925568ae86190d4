"""Which blocks attend within a window or a chunk: a pattern of local and global blocks, in runs.

[5 local, 1 global] is five local blocks and a global one, over and over, as far as there are
blocks. Blocks differ in attention alone, so all have the same parameters and keep the same bytes,
unless global ones have heads of their own (global_heads.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import cycle, groupby, islice
from typing import NamedTuple

from bigplan.errors import InputError, quoted
from bigplan.spec.rope_scaling import QueryGrowth

LOCAL, GLOBAL = "local", "global"
SHARING_GLOBAL = "sharing_global"  # global blocks that read keys and values of others
_RUN = re.compile(r"([1-9]\d{0,3}) (\w+)", re.ASCII)


class BlockAttention(NamedTuple):
    """What attention of one block may have unlike that of another."""

    window: int | None = None  # tokens that a token attends to; None: all before it
    rope_theta: float | None = None  # base of rope's angles; None: it turns nothing
    scaled: bool = False  # the angles are scaled as `rope_scaling` says
    chunk: int | None = None  # tokens of a chunk, within which tokens attend; None: all are one
    growth: QueryGrowth | None = None  # of queries with their position, beside rope's own

    def within(self, length: int) -> tuple[int, int | None]:
        """Tokens of a chunk of so many, and the window if it hides a token of such a chunk."""
        own = min(length, self.chunk or length)
        return own, self.window if self.window is not None and self.window < own else None


def expanded(pattern: Sequence[str], blocks: int) -> tuple[bool, ...]:
    """Whether each of so many blocks is local. Raises InputError where a run is misspelt."""
    words = in_runs("attention_pattern", pattern, blocks, (LOCAL, GLOBAL))
    return tuple(word == LOCAL for word in words)


def in_runs(key: str, pattern: Sequence[str], blocks: int, words: Sequence[str]) -> tuple[str, ...]:
    """The word of each of so many blocks, by the pattern under `key`.

    Raises InputError where a run is not a number and one of `words`.
    """
    once: list[str] = []
    for run in pattern:
        found = _RUN.fullmatch(run)
        if found is None or found[2] not in words:
            raise InputError(
                f"`{key}` has {quoted(run)}; write runs of blocks, such as "
                f"[5 {words[0]}, 1 {words[-1]}]"
            )
        once += [found[2]] * int(found[1])
    return tuple(islice(cycle(once), blocks))


@lru_cache(maxsize=256)  # a search asks thousands of times
def of_blocks(
    pattern: tuple[str, ...], blocks: int, near: BlockAttention, far: BlockAttention
) -> tuple[BlockAttention, ...]:
    """The attention of each block: `near` of local ones, `far` of global ones.

    Without a pattern, all are local.
    """
    local = expanded(pattern, blocks) or (True,) * blocks
    return tuple(near if one else far for one in local)


@lru_cache(maxsize=256)
def shares_of(attentions: tuple[BlockAttention, ...]) -> Mapping[BlockAttention, float]:
    """The part of the blocks that has each kind of attention."""
    return {one: n / len(attentions) for one, n in Counter(attentions).items()}


def compact(local: Sequence[bool]) -> list[str]:
    """The shortest pattern that gives these blocks."""
    return compact_words([LOCAL if one else GLOBAL for one in local])


def compact_words(words: Sequence[str]) -> list[str]:
    """The shortest pattern that gives blocks with these words."""
    length = next(n for n in range(1, len(words) + 1) if _repeats(words, n))
    return [f"{len([*run])} {word}" for word, run in groupby(words[:length])]


def _repeats(words: Sequence[str], length: int) -> bool:
    return all(one == words[i % length] for i, one in enumerate(words))
