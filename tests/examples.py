"""How many examples a property is tried on: a test's own number, scaled by the suite's profile.

The suite's own profile takes 35 in a hundred of them, `pytest --hypothesis-profile=quick` a fifth,
`thorough` ten times as many. With half of them the properties took 70 s of a core of a suite of 20
minutes, the longest of them 8; a link that one lane does not wait for is found with these, too.
"""

from __future__ import annotations

from hypothesis import settings

USUAL = 100  # hypothesis takes so many where a test has no number of its own


def examples(number: int) -> int:
    """That many under the usual profile, and at least one."""
    profile = settings.default
    assert profile is not None, "tests/conftest.py loads one"
    return max(1, number * profile.max_examples // USUAL)
