"""NORM, CLIP and UPDATE: the optimizer on rows wherever their state lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.content import ADAPTERS, Holds
from bigplan.mechanics import CORES_BESIDE_COPIES
from bigplan.placement import Share
from bigplan.program import STAGED_ROWS, Action, Lane
from bigplan.runtime.context import Context, find
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.gradient_sums import add, square_sum
from bigplan.runtime.cpu.native import Piece, native
from bigplan.runtime.execution.repeated import Factors, RepeatedUpdates
from bigplan.runtime.execution.streaming import StreamedChunk
from bigplan.runtime.generated import adamw_for, adamw_step
from bigplan.runtime.layers.lookup import add_up
from bigplan.runtime.memory.adapter_rows import adapter_rules
from bigplan.runtime.memory.moments import StoredState
from bigplan.runtime.memory.pieces import Box, merged, packed
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.fused import Kernel, fused_step
from bigplan.runtime.optimizer.muon import MuonUpdates, Rows
from bigplan.runtime.optimizer.narrow_adamw import NarrowPiece
from bigplan.runtime.optimizer.narrow_update import NarrowUpdates, runs_of
from bigplan.runtime.optimizer.scaling import Scaling, Verdict
from bigplan.runtime.optimizer.sgd import sgd_kernel
from bigplan.spec.moments import BLOCK
from bigplan.spec.optimizer import Optimizer, ParameterRule, rules


class Update:
    """The optimizer on the pieces of a rank's layers.

    A state buffer holds the moments and, in mixed precision, fp32 parameters of the elements that a
    piece has (spec/moments.py). Updates that wait for the norm obey the verdict that CLIP passed at
    the end of the step before; others the one that `begin` passes.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # By layer: its square sum, or norms of its parts that are on the GPU, fp32 [].
        self._norms: dict[int, float | list[Tensor]] = {}
        self._step = 0  # counted from 1
        self._rules = _rules(context)
        self._cores = Cores(CORES_BESIDE_COPIES) if context.device.type == "cuda" else Cores()
        self._adamw = adamw_for(context.training, context.device)
        self._narrow = NarrowUpdates.of(context.training, context.device, self._cores)
        self._repeated: RepeatedUpdates | None = None
        self._muon = MuonUpdates.of(context)
        generated = self._adamw is not None or (self._narrow is not None and self._narrow.kernel)
        if generated and self._muon is None:
            self._repeated = RepeatedUpdates(self._factors)
        native()  # compiled here, not in the first step
        self.scaling = Scaling(context.training)
        self.verdict: Verdict | None = None
        self.not_finite: tuple[int, ...] = ()  # layers of the last step that was clipped

    def begin(self, step: int) -> float:
        """Start step number `step`, the first is 1; what to multiply its loss by."""
        self._step = step
        if not self._context.graph.deferred:
            self.verdict = self.scaling.unseen(step)
        return self.scaling.scale

    def norm(self, action: Action) -> None:
        """Square sum of what this rank counts of a layer's final gradients, in fp32.

        On the GPU one kernel a part, and CLIP does the rest: each kernel waits until a block of a
        product beside it ends, for up to 2 ms.
        """
        context = self._context
        owned = context.entries.owned(action.reads[0], action, context.gradient_dtype)
        both = zip(owned, context.rows[action.layer].part.ranges, strict=True)
        every = [gradients[: own.counted] for gradients, own in both]
        if every[0].is_cuda:  # adds in a tree, which loses nothing to length
            norms = [torch.linalg.vector_norm(one, dtype=torch.float32) for one in every]
            self._norms[action.layer] = norms
        else:
            squares = (square_sum(gradients, self._cores) for gradients in every)
            self._norms[action.layer] = sum(squares)

    def clip(self) -> None:
        """All square sums to the verdict on the step's gradients."""
        # In the order of layers, because lanes end in any order.
        every = self._of_all(self._squares()).tolist()
        if not self._context.graph.frozen:  # adapters have one sum for all layers of a stage
            self.not_finite = tuple(i for i, square in enumerate(every) if not isfinite(square))
        norm = sum(every) ** 0.5
        self.verdict = self.scaling.judge(self._step, norm)

    def _squares(self) -> dict[int, float]:
        """Every layer's square sum, in fp64; the next step's begin anew."""
        found, self._norms = self._norms, {}
        # From the GPU all at once: one by one they take 0.5 ms each, while all lanes wait.
        there = [norm for norms in found.values() if isinstance(norms, list) for norm in norms]
        values = iter(torch.stack(there).tolist() if there else ())
        return {
            layer: one if isinstance(one, float) else sum(next(values) ** 2 for _ in one)
            for layer, one in found.items()
        }

    def _of_all(self, found: Mapping[int, float]) -> Tensor:
        """Every layer's square sum, fp64, in the order of layers: of all stages and their parts.

        If several ranks have the same gradients, those of the first rank or zero group count.
        """
        context, squares = self._context, torch.zeros(len(self._context.graph.layers)).double()
        for layer, square in found.items():
            sharers = context.entries.sharers(layer)
            # Of experts that nobody shares out each rank counts what it has first.
            spread = sharers == 1 and context.kind(layer).ep > 1
            if spread or context.groups.at.data < sharers:
                # The adapters of a stage count in the place of its first layer.
                squares[min(context.program.layers) if layer == ADAPTERS else layer] = square
        return context.groups.sum_of_all(squares)

    def update(self, action: Action) -> None:
        """One share of a layer, or one chunk of it."""
        operands = self._operands(action)
        # By Muon a rank joins the others also where all that it owns is padding.
        if not operands.boxes and not (self._muon and self._muon.gathers(action.layer)):
            return
        assert self.verdict is not None, "begin() or CLIP comes first"
        if not self.verdict.skipped:
            update = partial(self._apply, action.layer, operands, self.verdict)
            if self._repeated is not None and action.share is Share.GPU:
                self._repeated.run(action, self.verdict, update)
            else:
                update()
        elif (master := operands.state.master) is not None:  # staged weights hold nothing yet
            for box in merged(operands.boxes):
                operands.weights(box).copy_(master[box.in_piece])

    def _operands(self, action: Action) -> _Operands:
        """What an UPDATE works on: in the layer's flat buffers, or in an entry of the ring."""
        context, layer, share = self._context, action.layer, action.share
        assert share is not None
        visit = StreamedChunk.of(context, action) if share is Share.STREAMED else None
        gradients, weights = Holds.GRADIENTS, Holds.PARAMETERS
        sides = {gradients: context.gradient_dtype, weights: context.parameter_dtype}
        rows: dict[Holds, Callable[[Box], Tensor]] = {}
        if visit:
            rows = {gradients: _in_piece(visit.gradients), weights: _in_piece(visit.weights)}
        for ref in (*action.reads, *action.writes):
            if (side := ref.content.kind) in sides:
                rows[side] = context.entries.boxed(ref, action, sides[side])
        if not context.graph.sizes.state:
            boxes = context.rows[layer].chunks[share][0]
            state = StoredState((), (), None)
            return _Operands(boxes, state, rows[gradients], rows[weights])
        ref = find(action.reads, Holds.STATE)
        boxes = context.rows[layer].boxes(ref.content)
        view = partial(context.memory.view, context.entries.key(ref, action))
        state = context.state_of(layer, view, sum(box.count for box in boxes))
        return _Operands(boxes, state, rows[gradients], rows[weights])

    def _factors(self, verdict: Verdict, rule: ParameterRule) -> Tensor:
        """What the generated AdamW multiplies by, on the GPU."""
        if self._narrow is not None:
            return self._narrow.factors(verdict, rule)
        assert self._adamw is not None
        kernel = _kernel(self._context.training.optimizer, verdict, rule)
        return self._adamw.factors(kernel.native.constants, verdict.divisor, self._context.device)

    def _apply(
        self,
        layer: int,
        operands: _Operands,
        verdict: Verdict,
        factors: Factors | None = None,
    ) -> None:
        """Update rows. `factors`: of the GPU's generated kernel, where they are kept."""
        factors = factors or partial(self._factors, verdict)
        optimizer, state = self._context.training.optimizer, operands.state
        master = state.master
        if self._narrow is not None:
            for boxes, piece in operands.together:
                runs = tuple(runs_of(boxes, self._rules[layer]))
                self._narrow.run(piece, runs, verdict, factors)
            return
        boxes, seconds = operands.boxes, {}
        if self._muon is not None:
            rows = Rows(boxes, state, operands.gradients, operands.weights)
            boxes = self._muon.run(layer, rows, verdict, self._rules[layer])
            seconds = {box.place: one for box, one in zip(boxes, packed(boxes), strict=True)}
        for rule, group in _by_rule(boxes, self._rules[layer]).items():
            pieces = [
                Piece(
                    operands.weights(box) if master is None else master[box.in_piece],
                    operands.gradients(box),
                    _moments(state, box, seconds),
                    None if master is None else operands.weights(box),
                )
                for box in merged(group)
            ]
            if self._adamw is not None and pieces[0].parameter.is_cuda:
                adamw_step(self._adamw, factors(rule), pieces)
            else:
                kernel = _kernel(optimizer, verdict, rule)
                fused_step(pieces, kernel, verdict.divisor, self._cores)

    def close(self) -> None:
        """Join the threads of the CPU's updates."""
        self._cores.close()

    def accumulate(self, action: Action) -> None:
        """Add a unit's gradients to their sum, or a micro-batch's of rows, where the sum is."""
        if action.reads[0].buffer == STAGED_ROWS:
            add_up(self._context, action, self._cores.count)
            return
        context, refs = self._context, (action.reads[0], action.writes[0])
        # The gradient of a lent table comes back whole, and so is the sum that it is added to.
        whole = all(context.program.buffers[ref.buffer].whole for ref in refs)
        if whole:
            both = [[context.entries.flat(ref, action, context.gradient_dtype)] for ref in refs]
        else:
            both = [context.entries.owned(ref, action, context.gradient_dtype) for ref in refs]
        for part, total in zip(*both, strict=True):
            if len(action.reads) == 1:  # the first of a step
                total.copy_(part)
            elif action.lane is Lane.CPU:
                add(total, part, self._cores)
            else:
                total.add_(part)


class _Operands(NamedTuple):
    """Rows of a layer, their state, their gradients and their parameters."""

    boxes: tuple[Box, ...]
    state: StoredState
    gradients: Callable[[Box], Tensor]
    weights: Callable[[Box], Tensor]

    @property
    def together(self) -> Iterator[tuple[tuple[Box, ...], NarrowPiece]]:
        """Rows that follow each other wherever they are, as boxes of a piece of their own.

        Those are all, but where experts are spread over ranks: between a rank's of the experts and
        its own of the rest lies what others own. Either begins with a block of moments.
        """
        state = self.state
        for whole in merged(self.boxes):
            weights, moved = self.weights(whole), whole.place
            master = None if state.master is None else state.master[whole.in_piece]
            assert moved % BLOCK == 0 or not state.scales, whole
            blocks = slice(moved // BLOCK, -(-whole.in_piece.stop // BLOCK))
            yield (
                tuple(
                    replace(box, place=box.place - moved)
                    for box in self.boxes
                    if whole.place <= box.place < whole.in_piece.stop
                ),
                NarrowPiece(
                    weights if master is None else master,
                    self.gradients(whole),
                    tuple(moment[whole.in_piece] for moment in state.moments),
                    tuple(scales[blocks] for scales in state.scales),
                    None if master is None else weights,
                ),
            )


def _rules(context: Context) -> dict[int, Mapping[str, ParameterRule]]:
    """The constants of every trained layer's tensors."""
    optimizer, model, layers = context.training.optimizer, context.model, context.program.layers
    if context.graph.frozen:
        return {ADAPTERS: adapter_rules(model, context.training, layers)}
    return {layer: rules(optimizer, model, layer) for layer in layers}


def _in_piece(rows: Tensor) -> Callable[[Box], Tensor]:
    return lambda box: rows[box.in_piece]


def _moments(state: StoredState, box: Box, seconds: Mapping[int, Box]) -> tuple[Tensor, ...]:
    """A box's moments; `seconds`: where second ones are, by place, if fewer elements have some."""
    own = (box, replace(box, place=seconds[box.place].place) if seconds else box)
    return tuple(moment[one.in_piece] for moment, one in zip(state.moments, own, strict=False))


def _by_rule(
    boxes: Sequence[Box], rules: Mapping[str, ParameterRule]
) -> dict[ParameterRule, list[Box]]:
    groups: dict[ParameterRule, list[Box]] = {}
    for box in boxes:
        groups.setdefault(rules[box.tensor], []).append(box)
    return groups


def _kernel(optimizer: Optimizer, verdict: Verdict, rule: ParameterRule) -> Kernel:
    rate = verdict.learning_rate * rule.learning_rate_factor
    if optimizer.name == "sgd":
        return sgd_kernel(optimizer, rate, rule.weight_decay)
    return adamw_kernel(optimizer, verdict.number, rate, rule.weight_decay)
