"""Fused GPU kernels, generated for any graph and chosen by a model.

optimise.py             a module or function that runs fused
capture.py              torch's graphs to ours and back
graph.py, families.py   operators and tensors, without torch; blocks of shipped models
rewritten.py            functions captured as other operators than torch's own
decomposed.py           batch norm in steps that are one kernel each
cover.py, keep.py       which operators are one kernel; what the backward computes again
price.py                seconds of a group, and of torch's own operators
fuse.py, body.py, operators.py   a group as arithmetic on rows and columns
source.py, launch.py    its Triton source; compiled and launched
single.py, library.py   a block's operators one by one, for the runtime; update.py
loss.py                 linear + cross-entropy in chunks, also where captured code has them apart
alibi.py                attention with linear biases, written by hand
here.py                 the GPU of this machine
tuned.py                tiles that were timed once
"""

from __future__ import annotations

from typing import Any

__all__ = ["optimise"]


def __getattr__(name: str) -> Any:
    """`bigplan.kernels.optimise`, loaded when it is asked for: it needs torch."""
    if name == "optimise":
        from bigplan.kernels.optimised import optimise

        return optimise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
