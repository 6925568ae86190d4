"""SGD with momentum, for runtime/cpu/step.cpp and through torch's fused kernel.

Weight decay is added to the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigplan.runtime.cpu.native import Piece, Step
from bigplan.runtime.optimizer.fused import Kernel
from bigplan.spec.optimizer import Optimizer


def sgd_kernel(settings: Optimizer, learning_rate: float, weight_decay: float) -> Kernel:
    """B = momentum b + g + decay p, then p -= rate b. State: b, where there is momentum.

    b starts as zeros, so the first one is the gradient, as torch.optim.SGD has it.
    """
    native = Step("sgd", (weight_decay, settings.momentum, -learning_rate))

    def fused(pieces: Sequence[Piece], divisor: Tensor | None) -> None:
        if divisor is not None and divisor.is_cuda:
            # CUDA's kernel rounds a division of its own differently in its vectors and its tail.
            torch._foreach_div_([piece.gradient for piece in pieces], divisor)
            divisor = None
        torch._fused_sgd_(
            [piece.parameter for piece in pieces],
            [piece.gradient for piece in pieces],
            [piece.state[0] for piece in pieces] if settings.momentum else [],
            weight_decay=weight_decay,
            momentum=settings.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=divisor,
        )

    return Kernel(native, fused)
