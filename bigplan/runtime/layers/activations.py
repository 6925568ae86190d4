"""The activation of an MLP that all tokens pass, by torch's operators or generated kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime import generated
from bigplan.runtime.layers.xielu import xielu
from bigplan.runtime.mixers.ways import Ways
from bigplan.runtime.operators import geglu, squared_relu, swiglu
from bigplan.spec.model import ModelSpec

_ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": squared_relu,
}


def activation(inputs: tuple[Tensor, ...], model: ModelSpec, ways: Ways) -> Tensor:
    """The MLP's activation, [b, s, f] as its inputs."""
    assert model.mlp != "clamped_swiglu", "experts alone have it"
    if model.mlp == "xielu":
        made = partial(xielu, ways.kernels)
        output = made(*inputs)
        ways.forget(output, made, *inputs)
        return output
    if ways.kernels is not None:
        made = partial(generated.activation, ways.kernels, model.mlp)
        output = made(*inputs)
        if model.mlp != "relu":
            ways.forget(output, made, *inputs)
        return output
    if model.mlp == "relu":
        return F.relu(inputs[0])  # its output is all that it needs itself
    function = _ACTIVATIONS[model.mlp]
    output = function(*inputs)
    ways.forget(output, function, *inputs)
    return output
