"""How many examples a property is tried on: a test's own number, scaled by the suite's profile.

`pytest --hypothesis-profile=quick` takes a fifth of them, `thorough` ten times as many.
"""

from __future__ import annotations

from hypothesis import settings

USUAL = 100  # of the profile that the numbers are stated for


def examples(number: int) -> int:
    """That many under the usual profile, and at least one."""
    profile = settings.default
    assert profile is not None, "tests/conftest.py loads one"
    return max(1, number * profile.max_examples // USUAL)
