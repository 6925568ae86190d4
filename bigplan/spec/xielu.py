"""xIELU, an activation with trained numbers of each block (Huang, arXiv 2411.13010, equation 6).

Of x it is p x^2 + b x above 0, and below n (e^m - 1 - x) + b x, where m is x, or e if that is less.
p is the softplus of a trained number, and n that of another, plus b. Files keep b and e, too.
"""

from __future__ import annotations

from math import expm1, log

from bigplan.spec.step import TERMS, Parameter

POSITIVE, NEGATIVE = "activation.positive", "activation.negative"
SLOPE, EDGE = "activation.slope", "activation.edge"  # b and e
# Elements at a time, of which torch's operators make LIVE tensors in fp32.
AT_ONCE, LIVE = 1 << 20, 8
# What they are at first: p and n are 0.8.
_BEGIN = 0.8
FIRST = {SLOPE: 0.5, EDGE: -1e-6}
FIRST |= {POSITIVE: log(expm1(_BEGIN)), NEGATIVE: log(expm1(_BEGIN - FIRST[SLOPE]))}


def xielu_numbers() -> tuple[Parameter, ...]:
    """The parameters of an activation, in the order in which it takes them."""
    trained = (Parameter(name, (1,), "replicated", False) for name in (POSITIVE, NEGATIVE))
    fixed = (
        Parameter(name, (TERMS, 1), "replicated", False, constant=True) for name in (SLOPE, EDGE)
    )
    return (*trained, *fixed)
