"""The command line: thin commands over the planner, the launcher and the reports."""

import gc
import signal

from bigplan.cli.interrupts import ended_by
from bigplan.collector import collected_rarely
from bigplan.importing import environment
from bigplan.system import ENDING

__all__ = ["main"]


def main() -> None:
    """Entry point. Exit codes: 0, 2 bad input, 3 infeasible, others as in errors.py."""
    with collected_rarely(), ended_by(*ENDING):
        # pydantic would search everything that is installed for plugins.
        with ended_by(signal.SIGINT), environment(PYDANTIC_DISABLE_PLUGINS="__all__"):
            from bigplan.cli.app import run

        try:
            run()
        finally:
            gc.freeze()  # else a collection at exit visits them all: 50-90 ms of a plan's 1,050
