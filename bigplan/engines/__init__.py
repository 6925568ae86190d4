"""What each engine can execute, as data the planner can ask without importing it."""

from bigplan.engines.capabilities import (
    NATIVE_RECOMPUTES,
    deepspeed_refusal,
    executable,
    native_refusal,
)

__all__ = ["NATIVE_RECOMPUTES", "deepspeed_refusal", "executable", "native_refusal"]
