"""Plan to program: the list of actions of each rank role."""

from bigplan.lower.program import lower, lower_stage, lower_steady

__all__ = ["lower", "lower_stage", "lower_steady"]
