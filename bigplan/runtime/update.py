"""NORM, CLIP and UPDATE: the optimizer on rows wherever their state lives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigplan.placement import Tier
from bigplan.program import Action, Lane
from bigplan.runtime.adamw import adamw_step
from bigplan.runtime.context import Context, find
from bigplan.runtime.pieces import Box

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Update:
    """AdamW on the pieces of a rank's layers.

    A state buffer holds first moments, second moments and, in mixed precision, fp32 parameters:
    as many elements each as the piece has.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._squares: dict[int, Tensor] = {}
        self.clip_factor = 1.0
        self.step = 1  # of the update, counted from 1

    def norm(self, action: Action) -> None:
        """Square sum of a layer's final gradients, in fp32."""
        gradients = self._context.flat(action.reads[0], action, self._context.gradient_dtype)
        norm = torch.linalg.vector_norm(gradients, dtype=torch.float32)
        self._squares[action.layer] = norm.double().square()

    def clip(self) -> None:
        """All square sums to the factor that the next updates scale gradients by."""
        limit = self._context.training.clip_norm
        assert limit is not None
        norm = sum(float(square) for square in self._squares.values()) ** 0.5
        self.clip_factor = min(1.0, limit / (norm + EPSILON))
        self._squares.clear()

    def update(self, action: Action) -> None:
        """One piece, or one chunk of an NVMe piece."""
        context, layer = self._context, action.layer
        rows = context.rows[layer]
        if action.piece is Tier.NVME:
            state = next(ref for ref in action.reads if ref.buffer == "stage.o")
            boxes = rows.chunks[state.entry]
        else:
            assert action.piece is not None
            state = find(action.reads, f"o{layer}.{action.piece}")
            boxes = rows.pieces[action.piece]
        if not boxes:
            return
        gradients = context.flat(find(action.reads, f"g{layer}"), action, context.gradient_dtype)
        weights = context.flat(find(action.writes, f"w{layer}"), action, context.parameter_dtype)
        moments = self.state_views(context.bytes_of(state, action), boxes)
        self._adamw(layer, boxes, weights, gradients, moments)

    def state_views(self, buffer: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
        """First moments, second moments and, where kept, fp32 parameters of a piece."""
        parts = 3 if self._context.graph.sizes.master else 2
        elements = sum(box.count for box in boxes)
        flat = buffer[: parts * elements * 4].view(torch.float32)
        return list(flat.view(parts, elements).unbind())

    def _adamw(
        self,
        layer: int,
        boxes: Sequence[Box],
        weights: Tensor,
        gradients: Tensor,
        moments: list[Tensor],
    ) -> None:
        settings, master = self._context.training.optimizer, len(moments) == 3
        decays = {p.name: p.decay for p in self._context.parameters(layer)}
        for decay in (True, False):
            group = [box for box in boxes if decays[box.tensor] == decay]
            rule = settings if decay else settings.model_copy(update={"weight_decay": 0.0})
            adamw_step(
                [moments[2][b.in_piece] if master else weights[b.in_layer] for b in group],
                [gradients[b.in_layer] for b in group],
                [moments[0][b.in_piece] for b in group],
                [moments[1][b.in_piece] for b in group],
                self.step,
                rule,
                self.clip_factor,
            )
        if master:
            for box in boxes:
                weights[box.in_layer].copy_(moments[2][box.in_piece])

    def accumulate(self, action: Action) -> None:
        """Add a unit's gradients to their sum in host memory."""
        assert action.lane is Lane.CPU, "sharded gradients are not executed"
        part, total = (
            self._context.flat(ref, action, self._context.gradient_dtype)
            for ref in action.reads[:2]
        )
        total.add_(part)
