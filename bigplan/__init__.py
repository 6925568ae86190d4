"""Plans the best way to train a model on a cluster, and runs exactly that plan.

    import bigplan

    plan = bigplan.plan(model="llama-3-70b", cluster="dgx-h100", nodes=4)
    plan.save("plan.yaml")

Importing the package is fast: what a name needs is imported when the name is first used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bigplan.version import __version__

if TYPE_CHECKING:
    from bigplan.api import BigplanError as BigplanError
    from bigplan.api import Plan as Plan
    from bigplan.api import Run as Run
    from bigplan.api import Validation as Validation
    from bigplan.api import launch as launch
    from bigplan.api import plan as plan
    from bigplan.api import validate as validate

_API = ("BigplanError", "Plan", "Run", "Validation", "launch", "plan", "validate")
__all__ = [*_API, "__version__"]  # noqa: PLE0604 -- all of them are text


class _Package(ModuleType):
    """The package, whose attributes `plan` and `validate` are functions, not submodules.

    Submodules have the same names. Python sets an imported submodule as an attribute of its
    package, which would hide the function. `from bigplan.plan import ...` works without that
    attribute.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _API and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bigplan import api

    globals()[name] = found = getattr(api, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
