"""The command line: thin commands over the planner, the launcher and the reports."""

from bigplan.cli.app import main

__all__ = ["main"]
