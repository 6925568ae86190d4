"""Fused GPU kernels, generated for any graph and chosen by a model.

fusion/                 which operators are one kernel, its price and its source, without torch
handwritten/            kernels that no generator makes
benchmark/              kernels measured beside predictions, limits and others' code
optimised.py            a module or function that runs fused
capture.py              torch's graphs to ours and back
rewritten.py            functions captured as other operators than torch's own
decomposed.py           batch norm in steps that are one kernel each
loss.py                 linear + cross-entropy in chunks, also where captured code has them apart
library.py              a block's operators one by one, for the runtime; update.py
launch.py               compiled and launched
tuned.py                tiles that were timed once
here.py                 the GPU of this machine
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
