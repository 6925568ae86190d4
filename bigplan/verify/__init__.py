"""Rules that every program keeps, checked before it is simulated or run.

The checks know nothing of the solver or of how the program was made. They follow what every buffer
entry holds (bigplan/content.py), action by action, through the first step, a steady one and the
flush.
"""

from bigplan.verify.contents import CHANGES
from bigplan.verify.rules import rank_bytes, used_bytes, verify

__all__ = ["CHANGES", "rank_bytes", "used_bytes", "verify"]
