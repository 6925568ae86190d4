"""Which blocks of a file have attention, and which another mixer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, Mixer
from bigplan.spec.pattern import compact_words


def attention_at(reader: ConfigReader, key: str, other: Mixer) -> list[Mixer]:
    """The mixer of each block, where `key` lists the numbers of those with attention."""
    blocks = reader.count("num_hidden_layers")
    places = reader.places(key, blocks)
    return [ATTENTION if block in places else other for block in range(blocks)]


def mixer_fields(
    mixers: Sequence[Mixer], other: Mixer, read: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Fields of ModelSpec: what `read` gives of the other mixer, and which blocks have it."""
    if other not in mixers:
        return {}
    pattern = compact_words(mixers) if ATTENTION in mixers else []
    return {other: dict(read()), "mixer_pattern": pattern}
