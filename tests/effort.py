"""Plans as a search first finds them: for tests that ask nothing about how good plans are.

The climb that improves plans takes much of a search: 5.8 of 6.2 s of a small model that moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bigplan.solve.improve import Budget

# Of the tests in these folders and files none asks. How good plans are is asked in tests/solve,
# tests/engines and tests/test_*.py.
FIRST_PLANS = (
    *("api", "cli", "experiment", "export", "intake", "page", "report"),
    *("engines/test_unequal.py", "test_experts.py", "test_recheck.py", "test_runnable.py"),
    *("test_whatif.py", "test_zero_groups.py"),
)


def gets_first_plans(test: Path) -> bool:
    """Whether that file of tests does."""
    place = test.relative_to(Path(__file__).parent).as_posix()
    return test.parent.name in FIRST_PLANS or place in FIRST_PLANS


@contextmanager
def first_plans_alone() -> Iterator[None]:
    """Searches end with their first plans."""
    from bigplan.solve.improve import Budget

    with _budget(Budget(simulations=0, instructions=0, strategies=0, patience=0)):
        yield


@contextmanager
def whole_searches() -> Iterator[None]:
    """Searches improve their plans, in tests with first plans as well."""
    with _budget(_usual()):
        yield


@contextmanager
def _budget(budget: Budget) -> Iterator[None]:
    from bigplan.effort import Effort
    from bigplan.solve.improve import BUDGETS

    _usual()  # known before the first change
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, Effort.USUAL, budget)
        yield


@cache
def _usual() -> Budget:
    """As it is before any test changes it."""
    from bigplan.effort import Effort
    from bigplan.solve.improve import BUDGETS

    return BUDGETS[Effort.USUAL]
