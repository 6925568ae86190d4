"""What gates an MLP beside the experts: the sigmoid of a score of each token (Qwen2-MoE).

It multiplies before the last product, as the weights of experts do, so that the gate's gradient
needs no result of that product.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bigplan.runtime.experts.activations import Activation
from bigplan.runtime.experts.mlp import Weighted


def gated_by_score(
    activation: Activation,
    inputs: tuple[Tensor, Tensor],
    score: Tensor,
    forget: Callable[..., None],
) -> Tensor:
    """silu(gate) * up of `inputs` [..., f], times the sigmoid of score [..., 1].

    `forget` as ways.Ways has it.
    """
    weights = score.float().sigmoid().flatten()
    gate, up = (one.flatten(0, -2) for one in inputs)
    inner = Weighted.apply(activation, gate, up, weights)  # type: ignore[no-untyped-call]
    forget(inner, activation.forward, gate, up, weights)
    return inner.view(inputs[0].shape)  # type: ignore[no-any-return]
