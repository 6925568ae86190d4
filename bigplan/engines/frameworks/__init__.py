"""Frameworks that are planned for and never run, priced by the closed formulas of bigplan/cost."""

from bigplan.engines.frameworks.engine import FrameworkPlan
from bigplan.engines.frameworks.tool import TOOLS, Tool

__all__ = ["FRAMEWORKS", "Planned", "Tool"]

FRAMEWORKS = {tool.name: FrameworkPlan(tool) for tool in TOOLS}
