"""bigplan from Python: `bigplan.plan`, `bigplan.launch`, `bigplan.validate` and their results."""

from bigplan.api.planning import Plan, plan
from bigplan.api.running import Run, launch
from bigplan.api.validating import Validation, validate
from bigplan.errors import BigplanError

__all__ = ["BigplanError", "Plan", "Run", "Validation", "launch", "plan", "validate"]
