"""Plan to program: the list of actions of each rank role."""

from bigplan.lower.program import lower, lower_buffers, lower_stage, lower_steady

__all__ = ["lower", "lower_buffers", "lower_stage", "lower_steady"]
