"""The steps of a block that mixes tokens by a short convolution (bigplan/spec/mixers.py).

Three products of the residual stream give each token's vectors. Tensor-parallel ranks split them,
and the convolution, by channels.
"""

from __future__ import annotations

from bigplan.spec.architecture import Architecture
from bigplan.spec.mixers import CONVOLUTION, OUTPUTS
from bigplan.spec.step import LayerStep, Parameter, StepOp, StepValue, product

FILTERS, FILTERS_BIAS = "conv.weight", "conv.bias"
BEFORE, AFTER, VALUE = "conv.before_proj", "conv.after_proj", "conv.value_proj"
INPUT, OUTPUT = "convolution input", "convolution output"  # names of the products


def convolution(model: Architecture, x: StepValue) -> list[LayerStep]:
    """What makes the three vectors of x, convolves them, and leads back.

    The result takes little work beside the products, so it is cheap to make again.
    """
    conv = model.convolution
    assert conv is not None, model.name
    names = {BEFORE: "gate before", AFTER: "gate after", VALUE: "convolved"}
    modules = {module: StepValue(name, model.hidden) for module, name in names.items()}
    read, mixed = tuple(modules.values()), StepValue("convolution's values", model.hidden)
    filters = [Parameter(FILTERS, (model.hidden, conv.taps), "rows", True, filters=True)]
    if conv.bias:
        filters.append(Parameter(FILTERS_BIAS, (model.hidden,), "rows", False))
    core = LayerStep(
        StepOp.CONVOLUTION, CONVOLUTION, read, (mixed,), tuple(filters), saves=read, cheap=True
    )
    output = {OUTPUTS[CONVOLUTION]: StepValue(OUTPUT, model.hidden, split=False)}
    return [
        product(INPUT, x, modules, bias=conv.bias),
        core,
        product(OUTPUT, mixed, output, bias=conv.bias),
    ]
