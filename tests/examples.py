"""How many examples a property is tried on: a test's own number, scaled by the suite's profile.

The suite's own profile takes a fifth of them, `pytest --hypothesis-profile=quick` a tenth,
`thorough` ten times as many. With 35 in a hundred the dearest took 8 to 30 s of a core each.
"""

from __future__ import annotations

from hypothesis import settings

USUAL = 100  # hypothesis takes so many where a test has no number of its own


def examples(number: int) -> int:
    """That many under the usual profile, and at least one."""
    profile = settings.default
    assert profile is not None, "tests/conftest.py loads one"
    return max(1, number * profile.max_examples // USUAL)
