"""The command line: thin commands over the planner, the launcher and the reports."""

import gc
import signal

from bigplan.cli.interrupts import ended_by
from bigplan.importing import environment

__all__ = ["main"]

# New objects between two garbage collections. Importing and planning make a million that live as
# long as the command. With Python's default of 700, collections take a tenth of its time.
COLLECTED = 1_000_000


def main() -> None:
    """Entry point. Exit codes: 0, 2 bad input, 3 infeasible, others as in errors.py."""
    gc.set_threshold(COLLECTED)
    with ended_by(signal.SIGTERM, signal.SIGHUP):
        # pydantic would search everything that is installed for plugins.
        with ended_by(signal.SIGINT), environment(PYDANTIC_DISABLE_PLUGINS="__all__"):
            from bigplan.cli.app import run

        try:
            run()
        finally:
            gc.freeze()  # else a collection at exit visits them all: 50-90 ms of a plan's 1,050
