"""What a sentence says, without how it says it."""

from __future__ import annotations


def tells(text: str, *facts: str) -> bool:
    """Whether these names and figures stand in the text, in this order."""
    place = 0
    words = " ".join(text.split())
    for fact in facts:
        found = words.find(fact, place)
        if found < 0:
            return False
        place = found + len(fact)
    return True
