"""Rules that every program keeps, checked before it is simulated or run.

The checks know nothing of the solver or of how the program was made. They follow what every buffer
entry holds, action by action, through the first step, a steady one and the flush. Names say what
is in an entry (bigplan/lower/buffers.py has the buffers'): w parameters, o optimizer state, g
gradients, p a unit's part of them, n a square sum; a number is the layer.
"""

from bigplan.verify.contents import CHANGES
from bigplan.verify.rules import node_bytes, verify

__all__ = ["CHANGES", "node_bytes", "verify"]
