"""Operators of ATen that generated kernels compute: each entry of EXPAND says how."""

from __future__ import annotations

from collections.abc import Mapping

from bigplan.kernels.fusion.arithmetic import ARITHMETIC
from bigplan.kernels.fusion.expansion import Expansion
from bigplan.kernels.fusion.graph import FLOATS, KernelNode
from bigplan.kernels.fusion.row_operators import ROWS

EXPAND: Mapping[str, Expansion] = {**ARITHMETIC, **ROWS}


def why_not(node: KernelNode) -> str:
    """Why no kernel is generated for an operator, by itself; empty where one can be."""
    if node.refused:
        return node.refused
    if node.op not in EXPAND:
        return "no generated kernel computes it"
    strange = {value.dtype for value in node.outputs} - {*FLOATS, "bool"}
    return f"it gives {', '.join(sorted(strange))}" if strange else ""
