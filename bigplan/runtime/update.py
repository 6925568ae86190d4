"""NORM, CLIP and UPDATE: the optimizer on rows wherever their state lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from bigplan.errors import WorkerError
from bigplan.placement import Tier
from bigplan.program import Action, Lane
from bigplan.runtime.adamw import adamw_kernel
from bigplan.runtime.context import Context, find
from bigplan.runtime.cores import Cores
from bigplan.runtime.fused import Kernel, Piece, fused_step
from bigplan.runtime.pieces import Box
from bigplan.runtime.scaling import Scaling, Verdict
from bigplan.runtime.sgd import sgd_kernel
from bigplan.spec.optimizer import Optimizer, Rule, rules

# Elements whose squares are added in fp32 at once on the CPU; their sums are added in fp64. CUDA
# adds in a tree, which loses nothing to length.
NORM_CHUNK = 2**22


class Update:
    """The optimizer on the pieces of a rank's layers.

    A state buffer holds the moments and, in mixed precision, fp32 parameters: as many elements each
    as the piece has. Updates that wait for the norm obey the verdict that CLIP passed at the end of
    the step before; others the one that `begin` passes.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._squares: dict[int, Tensor] = {}
        self._step = 0  # counted from 1
        self._rules = {
            layer: rules(context.training.optimizer, context.model, layer)
            for layer in context.program.layers
        }
        self._cores = Cores()
        self.scaling = Scaling(context.training)
        self.verdict: Verdict | None = None

    def begin(self, step: int) -> float:
        """Start step number `step`, the first is 1; what to multiply its loss by."""
        self._step = step
        if not self._context.graph.deferred:
            self.verdict = self.scaling.unseen(step)
        return self.scaling.scale

    def passed(self, loss: float) -> Verdict:
        """The verdict on the step that has just run, whose loss is given.

        Raises WorkerError where the loss is not finite and no norm has kept it from the weights.
        """
        assert self.verdict is not None, "no step has run"
        if not self._context.graph.deferred and not isfinite(loss):
            raise WorkerError(
                f"step {self._step}: the loss is {loss}, and without clipping nothing kept its "
                "gradients from the weights; resume from a checkpoint before it, with a lower "
                "learning rate or with clip_norm, which skips such steps"
            )
        return self.verdict

    def norm(self, action: Action) -> None:
        """Square sum of a layer's final gradients, in fp32."""
        gradients = self._context.flat(action.reads[0], action, self._context.gradient_dtype)
        parts = (gradients,) if gradients.is_cuda else torch.split(gradients, NORM_CHUNK)
        norms = torch.empty(len(parts), dtype=torch.float32, device=gradients.device)

        def measure(number: int) -> None:
            torch.linalg.vector_norm(parts[number], dtype=torch.float32, out=norms[number])

        if gradients.is_cuda:
            measure(0)
        else:
            self._cores.run(partial(measure, number) for number in range(len(parts)))
        self._squares[action.layer] = norms.double().square().sum()

    def clip(self) -> None:
        """All square sums to the verdict on the step's gradients."""
        # Layer by layer: they came in the order in which the lanes happened to end.
        norm = sum(float(self._squares[layer]) for layer in sorted(self._squares)) ** 0.5
        self._squares.clear()
        self.verdict = self.scaling.judge(self._step, norm)

    def update(self, action: Action) -> None:
        """One piece, or one chunk of an NVMe piece."""
        context, layer = self._context, action.layer
        boxes, state = self._boxes_and_state(action)
        if not boxes:
            return
        gradients = context.flat(find(action.reads, f"g{layer}"), action, context.gradient_dtype)
        weights = context.flat(find(action.writes, f"w{layer}"), action, context.parameter_dtype)
        assert self.verdict is not None, "begin() or CLIP comes first"
        if not self.verdict.skipped:
            self._apply(layer, boxes, weights, gradients, state)
        elif context.graph.sizes.master:  # staged weights hold nothing yet
            for box in merged(boxes):
                weights[box.in_layer].copy_(state[-1][box.in_piece])

    def _boxes_and_state(self, action: Action) -> tuple[tuple[Box, ...], list[Tensor]]:
        """The rows of an UPDATE and the views of their state."""
        context, rows = self._context, self._context.rows[action.layer]
        assert action.piece is not None
        if not context.graph.sizes.state:  # then the program counts the CPU's rows as one piece
            return rows.cpu_boxes if action.lane is Lane.CPU else rows.pieces[action.piece], []
        if action.piece is Tier.NVME:
            ref = next(ref for ref in action.reads if ref.buffer == "stage.o")
            boxes = rows.chunks[ref.entry]
        else:
            ref = find(action.reads, f"o{action.layer}.{action.piece}")
            boxes = rows.pieces[action.piece]
        return boxes, state_views(context, context.bytes_of(ref, action), boxes)

    def _apply(
        self,
        layer: int,
        boxes: Sequence[Box],
        weights: Tensor,
        gradients: Tensor,
        state: list[Tensor],
    ) -> None:
        verdict, optimizer = self.verdict, self._context.training.optimizer
        assert verdict is not None
        moments, master = state[: optimizer.moments], self._context.graph.sizes.master
        for rule, group in _by_rule(boxes, self._rules[layer]).items():
            pieces = [
                Piece(
                    state[-1][box.in_piece] if master else weights[box.in_layer],
                    gradients[box.in_layer],
                    tuple(moment[box.in_piece] for moment in moments),
                    weights[box.in_layer] if master else None,
                )
                for box in merged(group)
            ]
            fused_step(pieces, _kernel(optimizer, verdict, rule), verdict.divisor, self._cores)

    def close(self) -> None:
        """Join the threads of the CPU's updates."""
        self._cores.close()

    def accumulate(self, action: Action) -> None:
        """Add a unit's gradients to their sum in host memory."""
        assert action.lane is Lane.CPU, "sharded gradients are not executed"
        part, total = (
            self._context.flat(ref, action, self._context.gradient_dtype)
            for ref in action.reads[:2]
        )
        total.add_(part)


def state_views(context: Context, buffer: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The moments and, where kept, fp32 parameters of a piece, in this order."""
    parts, elements = context.graph.sizes.state // 4, sum(box.count for box in boxes)
    flat = buffer[: 4 * parts * elements].view(torch.float32)
    return list(flat.view(parts, elements).unbind())


def merged(boxes: Sequence[Box]) -> Iterator[Box]:
    """The boxes, those that follow each other in layer and piece as one."""
    last: Box | None = None
    for box in boxes:
        if last is not None and _follows(last, box):
            last = replace(last, count=last.count + box.count)
            continue
        if last is not None:
            yield last
        last = box
    if last is not None:
        yield last


def _follows(last: Box, box: Box) -> bool:
    return (last.in_layer.stop, last.in_piece.stop) == (box.start, box.place)


def _by_rule(boxes: Sequence[Box], rules: Mapping[str, Rule]) -> dict[Rule, list[Box]]:
    groups: dict[Rule, list[Box]] = {}
    for box in boxes:
        groups.setdefault(rules[box.tensor], []).append(box)
    return groups


def _kernel(optimizer: Optimizer, verdict: Verdict, rule: Rule) -> Kernel:
    rate = verdict.learning_rate * rule.learning_rate_factor
    if optimizer.name == "sgd":
        return sgd_kernel(optimizer, rate, rule.weight_decay)
    return adamw_kernel(optimizer, verdict.number, rate, rule.weight_decay)
