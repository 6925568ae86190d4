"""Muon: updates of whole matrices by their momentum, made about orthogonal.

As torch.optim.Muon has it (torch 2.13, after Jordan et al. 2024): Nesterov's momentum, an iteration
in bf16 with its coefficients, decoupled weight decay. What scales a matrix's rate is the user's
choice (spec/optimizer.py).

Where ZeRO shards a layer, each rank moves the momentum of its own elements. All gather what is to
be orthogonalised, in bf16, and each orthogonalises the matrices that its elements are part of. Of a
matrix that tensor-parallel ranks split, these gather their parts likewise; each orthogonalises the
whole matrix, and takes its own part of the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.graph.graph import Tensor as Stored
from bigplan.graph.muon import at_once, shape_of
from bigplan.graph.shape import local_tensor
from bigplan.mechanics import WIDENED_ELEMENTS
from bigplan.rectangle import held
from bigplan.runtime.context import Context
from bigplan.runtime.memory.moments import StoredState
from bigplan.runtime.memory.pieces import Box
from bigplan.runtime.optimizer.scaling import Verdict
from bigplan.spec.optimizer import Optimizer, ParameterRule
from bigplan.spec.step import Parameter

# Of a X + (b A + c A A) X with A = X X^T, and the least norm (torch.optim._muon).
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPSILON = 1e-7
TURNED = "experts.down_proj.weight"  # stored [in, out] of each expert (spec/step.py, Parameter)


class Rows(NamedTuple):
    """Rows of a layer with their state, as an update works on them."""

    boxes: Sequence[Box]
    state: StoredState
    gradients: Callable[[Box], Tensor]
    weights: Callable[[Box], Tensor]


class MuonUpdates:
    """The updates of one rank's matrices."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @classmethod
    def of(cls, context: Context) -> MuonUpdates | None:
        """What updates matrices, if Muon does."""
        return cls(context) if context.training.optimizer.name == "muon" else None

    def gathers(self, layer: int) -> bool:
        """Whether ranks bring a layer's directions together, those with padding alone, too."""
        sharers = self._context.entries.sharers(layer)
        return sharers > 1 and bool(self._context.kind(layer).orthogonalised)

    def run(
        self, layer: int, rows: Rows, verdict: Verdict, rules: Mapping[str, ParameterRule]
    ) -> tuple[Box, ...]:
        """Update a rank's part of a layer; what of it is AdamW's to update."""
        optimizer, master = self._context.training.optimizer, rows.state.master
        names = {tensor.name for tensor in self._context.kind(layer).orthogonalised}
        parameters = {one.name: one for one in self._context.parameters(layer)}
        mine = [box for box in rows.boxes if box.tensor in names]
        inputs = ((box, _moved(rows, box, optimizer.momentum, verdict.divisor)) for box in mine)
        whole = self._gathered(layer, inputs) if self.gathers(layer) else inputs
        for box, flat in whole:
            rule, parameter = rules[box.tensor], parameters[box.tensor]
            tensor = local_tensor(parameter, 1)
            matrix = self._whole(flat, parameter)
            direction = self._own(orthogonalised(matrix, tensor, optimizer.ns_steps), parameter)
            first = box.start - self._context.rows[layer].offsets[box.tensor][0]
            rate = verdict.learning_rate * rule.learning_rate_factor
            weights = rows.weights(box) if master is None else master[box.in_piece]
            weights.mul_(1 - rate * rule.weight_decay)
            weights.add_(
                direction[first : first + box.count], alpha=-rate * adjusted(optimizer, tensor)
            )
            if master is not None:
                rows.weights(box).copy_(weights)
        return tuple(box for box in rows.boxes if box.tensor not in names)

    def _whole(self, flat: Tensor, parameter: Parameter) -> Tensor:
        """What tensor-parallel ranks have of a parameter together, bf16 [elements], of each `flat`.

        It is `flat` where each has all of it. All these ranks call this.
        """
        group = self._context.groups.tensor
        if parameter.holders(group.size) == group.size:
            return flat
        each = group.gathered(flat)().view(group.size, -1)
        whole = flat.new_empty(parameter.matrix)
        for rank in range(0, group.size, parameter.holders(group.size)):
            part = held(parameter, group.size, rank)
            assert part is not None, parameter
            whole[part.in_matrix] = each[rank].view(part.rows, part.columns)
        return whole.flatten()

    def _own(self, whole: Tensor, parameter: Parameter) -> Tensor:
        """This rank's part of a parameter [elements], flat."""
        group = self._context.groups.tensor
        if parameter.holders(group.size) == group.size:
            return whole
        part = held(parameter, group.size, group.place)
        assert part is not None, parameter
        return whole.view(parameter.matrix)[part.in_matrix].flatten()

    def _gathered(
        self, layer: int, inputs: Iterable[tuple[Box, Tensor]]
    ) -> Iterator[tuple[Box, Tensor]]:
        """Each box with all of its tensor's input, of which ranks have parts."""
        context, rows = self._context, self._context.rows[layer]
        own = torch.zeros(rows.part.elements, dtype=torch.bfloat16, device=context.device)
        boxes = []
        for box, values in inputs:
            own[box.in_part] = values
            boxes.append(box)
        layer_of_all = own.new_empty(context.kind(layer).padded(context.entries.sharers(layer)))
        context.groups.update.all_gather(layer_of_all, own)
        for box in boxes:
            start, high, wide = rows.offsets[box.tensor]
            yield box, layer_of_all[start : start + high * wide]


def _moved(rows: Rows, box: Box, momentum: float, divisor: float) -> Tensor:
    """Move the momentum by a box's gradients; what is to be orthogonalised of it, bf16 [count]."""
    gradients, kept = rows.gradients(box), rows.state.moments[0][box.in_piece]
    found = torch.empty(box.count, dtype=torch.bfloat16, device=kept.device)
    for start in range(0, box.count, WIDENED_ELEMENTS):
        some = slice(start, start + WIDENED_ELEMENTS)
        gradient = gradients[some].float()
        if divisor != 1.0:
            gradient = gradient / divisor
        kept[some].lerp_(gradient, 1 - momentum)
        found[some] = gradient.lerp(kept[some], momentum)
    return found


def adjusted(optimizer: Optimizer, tensor: Stored) -> float:
    """The rate of a tensor's matrices over the learning rate."""
    _, out, inner = shape_of(tensor)
    if tensor.name == TURNED:
        out, inner = inner, out
    if optimizer.adjust_lr_fn == "original":
        return sqrt(max(1.0, out / inner))
    return 0.2 * sqrt(max(out, inner))


def orthogonalised(flat: Tensor, tensor: Stored, steps: int) -> Tensor:
    """A tensor's matrices made about orthogonal, each for itself: bf16 [elements], as it is stored.

    `flat`, bf16 [elements], is nobody's afterwards.
    """
    number, rows, columns = shape_of(tensor)
    if number == 1:
        return newton_schulz(flat.view(rows, columns), steps).flatten()
    each = flat.view(rows, number, columns).transpose(0, 1)  # experts take turns in rows
    found = torch.empty_like(flat).view(rows, number, columns).transpose(0, 1)
    together = at_once(tensor)
    for start in range(0, number, together):
        some = slice(start, start + together)
        found[some] = newton_schulz(each[some].contiguous(), steps)
    return found.transpose(0, 1).reshape(-1)


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """So many steps of a X + (b A + c A A) X, A = X X^T, from X of norm 1: bf16 [(n,) m, k].

    Singular values come to lie within about 0.7 and 1.2. Of a matrix with more rows than columns X
    is the transpose. `matrices` are nobody's afterwards.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    each = matrices.mT if tall else matrices
    added = torch.addmm if each.dim() == 2 else torch.baddbmm
    norm = each.norm() if each.dim() == 2 else each.norm(dim=(-2, -1), keepdim=True)
    each.div_(norm.clamp(min=EPSILON))
    for _ in range(steps):
        gram = each @ each.mT
        by = added(gram, gram, gram, beta=b, alpha=c)
        each = added(each, by, each, beta=a)
    return each.mT if tall else each
