"""What each engine can execute, as data the planner can ask without importing it."""

from bigplan.engines.capabilities import (
    deepspeed_refusal,
    executable,
    native_refusal,
)

__all__ = ["deepspeed_refusal", "executable", "native_refusal"]
