"""Which blocks attend within a window: a pattern of local and global blocks, written in runs.

[5 local, 1 global] is five local blocks and a global one, over and over, as far as there are
blocks. Blocks differ in attention alone, so all have the same parameters and keep the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import cycle, groupby, islice
from typing import NamedTuple

from bigplan.errors import InputError, quoted

LOCAL, GLOBAL = "local", "global"
_RUN = re.compile(rf"([1-9]\d{{0,3}}) ({LOCAL}|{GLOBAL})", re.ASCII)


class BlockAttention(NamedTuple):
    """What attention of one block may have unlike that of another."""

    window: int | None = None  # tokens that a token attends to; None: all before it
    rope_theta: float | None = None  # base of rope's angles; None: it turns nothing
    scaled: bool = False  # the angles are scaled as `rope_scaling` says


def expanded(pattern: Sequence[str], blocks: int) -> tuple[bool, ...]:
    """Whether each of so many blocks is local. Raises InputError where a run is misspelt."""
    once: list[bool] = []
    for run in pattern:
        if (found := _RUN.fullmatch(run)) is None:
            raise InputError(
                f"`attention_pattern` has {quoted(run)}; write runs of blocks, such as "
                f"[5 {LOCAL}, 1 {GLOBAL}]"
            )
        once += [found[2] == LOCAL] * int(found[1])
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
    length = next(n for n in range(1, len(local) + 1) if _repeats(local, n))
    runs = groupby(local[:length])
    return [f"{len([*run])} {LOCAL if is_local else GLOBAL}" for is_local, run in runs]


def _repeats(local: Sequence[bool], length: int) -> bool:
    return all(one == local[i % length] for i, one in enumerate(local))
