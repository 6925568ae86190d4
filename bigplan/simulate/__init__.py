"""The program priced and played: when every action of a step starts and ends.

Lanes run their actions in program order. An action starts when its lane is free and its
dependencies have ended. Nothing here knows how the solver estimated the plan.
"""

from bigplan.simulate.critical import critical_events, critical_path
from bigplan.simulate.play import simulate, step_seconds, steps_seconds
from bigplan.simulate.seconds import (
    COLLECTIVES,
    LAUNCHING,
    Totals,
    action_seconds,
    busy_seconds,
    total_seconds,
)

__all__ = [
    "COLLECTIVES",
    "LAUNCHING",
    "Totals",
    "action_seconds",
    "busy_seconds",
    "critical_events",
    "critical_path",
    "simulate",
    "step_seconds",
    "steps_seconds",
    "total_seconds",
]
