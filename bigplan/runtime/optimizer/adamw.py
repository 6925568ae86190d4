"""AdamW (Loshchilov and Hutter 2019), for runtime/cpu/step.cpp and through torch's fused kernel.

torch's operator is called directly. torch.optim's function sorts tensors first. For every part of a
core that sorting takes more of the interpreter's time than the kernel's launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from bigplan.runtime.cpu.native import Piece, Step
from bigplan.runtime.optimizer.fused import Kernel
from bigplan.spec.optimizer import Optimizer


def adamw_kernel(
    settings: Optimizer, step: int, learning_rate: float, weight_decay: float
) -> Kernel:
    """Update number `step` (the first is 1), decay decoupled. State: first and second moments."""
    assert step >= 1, step
    native = Step(
        "adamw",
        (
            1 - learning_rate * weight_decay,
            1 - settings.beta1,
            settings.beta2,
            1 - settings.beta2,
            sqrt(1 - settings.beta2**step),
            settings.epsilon,
            -learning_rate / (1 - settings.beta1**step),
        ),
    )

    def fused(pieces: Sequence[Piece], divisor: Tensor | None) -> None:
        device = pieces[0].parameter.device
        torch._fused_adamw_(
            [piece.parameter for piece in pieces],
            [piece.gradient for piece in pieces],
            [piece.state[0] for piece in pieces],
            [piece.state[1] for piece in pieces],
            [],
            # fp32 counts exactly to 16.7 M steps
            [torch.full((), float(step), device=device) for _ in pieces],
            amsgrad=False,
            lr=learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=weight_decay,
            eps=settings.epsilon,
            maximize=False,
            grad_scale=divisor,
        )

    return Kernel(native, fused)
