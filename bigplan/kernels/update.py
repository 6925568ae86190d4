"""A generated AdamW: one pass over parameters, gradients and moments, 16-bit copies included.

torch's fused kernel takes only fp32 gradients, writes divided gradients back, and leaves copies to
other kernels. It moves 38 bytes a parameter, and 44 if gradients have 16 bits. Here it is 30 and
28. Pieces of all lengths run one kernel, which is told the number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from bigplan.cost.kernel import Shape
from bigplan.kernels.fusion import single
from bigplan.kernels.fusion.price import Fused, Pricer
from bigplan.kernels.fusion.source import source
from bigplan.kernels.launch import compiled
from bigplan.kernels.numbers import to_gpu

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
NOMINAL = 2**24  # elements that the tile is chosen for


class AdamW:
    """The kernels of a process, by the dtypes of gradient and copy."""

    most = 2**30  # elements of a call: offsets are 32 bits wide

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self._made: dict[tuple[str, str | None], tuple[Any, tuple[str, ...], int, int]] = {}

    def factors(self, constants: Sequence[float], divisor: float, device: torch.device) -> Tensor:
        """What `step` multiplies by, fp32 on the device, as runtime/optimizer/adamw.py has it."""
        return to_gpu([*constants, divisor], device)

    def step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        moments: tuple[Tensor, Tensor],
        copy: Tensor | None,
        factors: Tensor,
    ) -> None:
        """Update contiguous fp32 parameters [n] and moments in place, and write `copy`, if any.

        The gradient, in any dtype, is divided by the last of the factors and stays as it is.
        """
        count = parameter.numel()
        assert count <= self.most, count
        kernel, order, tile, warps = self._kernel(
            gradient.dtype, copy.dtype if copy is not None else None
        )
        named = {"p": parameter, "g": gradient, "m": moments[0], "v": moments[1]}
        named |= dict(zip(single.FACTORS, factors.view(-1, 1).unbind(), strict=True))
        named |= {"new p": parameter, "new m": moments[0], "new v": moments[1]}
        if copy is not None:
            named["copy"] = copy
        tensors = (named[name] for name in order)
        # Every product is rounded before it is added to: the compiler may fuse the two in one
        # kernel and not in another, and an update has the same bits however it is cut.
        kernel[(triton.cdiv(count, tile),)](
            *tensors, count, num_warps=warps, enable_fp_fusion=False
        )

    def _kernel(
        self, gradient: torch.dtype, copy: torch.dtype | None
    ) -> tuple[Any, tuple[str, ...], int, int]:
        key = NAMES[gradient], None if copy is None else NAMES[copy]
        if key not in self._made:
            made = single.adamw(NOMINAL, *key)
            fused = self.pricer.fused(made.graph, made.graph.nodes, frozenset(made.wanted))
            assert isinstance(fused, Fused), fused
            tile, body = fused.tile, fused.body
            assert tile.shape is Shape.FLAT, tile
            order = tuple(value.name for value in (*body.inputs, *body.outputs))
            kernel = compiled(source(body, tile, counted=True))
            self._made[key] = kernel, order, tile.columns, tile.warps
        return self._made[key]
