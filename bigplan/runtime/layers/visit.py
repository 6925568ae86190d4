"""What a layer's FORWARD or BACKWARD finds in memory, and where it leaves what it makes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from bigplan.content import ADAPTERS, Holds
from bigplan.graph.graph import Recompute
from bigplan.program import ROWS, Action, Ref
from bigplan.runtime.context import Context, find
from bigplan.runtime.layers.lookup import StagedRows, send_home
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.linear.dropout import Drops
from bigplan.runtime.operators import numbers_on

SUMS = (Holds.GRADIENTS, Holds.PARTIAL_GRADIENTS)  # what a backward adds its gradients to


class Visit(NamedTuple):  # one for every action: a dataclass takes three times as long to make
    """One layer's turn on one micro-batch."""

    context: Context
    action: Action

    @property
    def recompute(self) -> Recompute:
        """What the layer does between its forward and its backward."""
        return self.context.program.layers[self.action.layer].recompute

    @property
    def keeps(self) -> bool:
        """Whether a backward follows: an evaluation's forward is alone."""
        return any(ref.content.kind is Holds.ACTIVATIONS for ref in self.action.writes)

    @property
    def by_rows(self) -> bool:
        """Whether rows come, and their gradients leave, in place of tables in host memory."""
        action = self.action
        return action.reads[0].buffer == ROWS or action.writes[0].buffer == ROWS

    @property
    def bounds(self) -> Tensor | None:
        """Of documents that are kept apart, int32 [b, 2, s] of whole sequences."""
        documents = self.context.documents
        return None if documents is None else documents.bounds(self.action.micro_batch)

    @property
    def drops(self) -> Drops | None:
        """What is dropped of what the layer's adapters read in training; None: nothing."""
        draws, action = self.context.draws, self.action
        return None if draws is None else draws.of(action.layer, action.micro_batch)

    @property
    def begins(self) -> Tensor | None:
        """Of each token where its document begins, int32 [b, s] of whole sequences."""
        bounds = self.bounds
        return None if bounds is None else bounds[:, 0]

    def weights(self) -> Tensor:
        """The layer's flat parameters as bytes (uint8), where they are now."""
        return self.context.entries.bytes_of(self.action.reads[0], self.action)

    def parameters(self, number: int = 0) -> dict[str, Tensor]:
        """The layer's tensors by name; number 1: those of the layer whose table it shares.

        Where the model is frozen, number 1 of a block are its adapters, if it has some.
        """
        source = self.action.reads[number]
        flat = self.context.entries.flat(source, self.action, self.context.parameter_dtype)
        return self._views(source, flat)

    @property
    def adapted(self) -> bool:
        """Whether the layer has adapters."""
        return bool(self.context.kind(self.action.layer).adapters)

    def _views(self, ref: Ref, flat: Tensor) -> dict[str, Tensor]:
        if ref.content.layer == ADAPTERS:
            return self.context.adapter_views(flat, self.action.layer)
        return self.context.views(flat, ref.content.layer)

    def open(self, sums: Sums) -> None:
        """Let `sums` add to those of the layer, and of the one whose table it shares.

        The first backward of a step begins the sums of all adapters of the stage.
        """
        context, action = self.context, self.action
        for total in action.writes:
            if total.content.kind in SUMS:
                flat, fresh = context.entries.flat(total, action, context.gradient_dtype), False
                if total not in action.reads and total.content.layer == ADAPTERS:
                    flat.zero_()
                elif total not in action.reads:
                    fresh = True
                sums.open(self._views(total, flat), fresh=fresh)

    def embedded_rows(self) -> Tensor:
        """The output [b, s, h] of tables in host memory, whose rows have come."""
        return StagedRows.of(self.context, self.action.reads[0], self.action).embedded()

    def send_rows_home(self, gradient: Tensor, tokens: Tensor) -> None:
        """Leave the gradients [b, s, h] of those rows for the tables' sums in host memory."""
        send_home(self.context, self.action, gradient, tokens)

    def hidden(self) -> Tensor:
        """The output of the layer before, [b, s, h]."""
        return self._dynamic(Holds.HIDDEN)

    def gradient(self) -> Tensor:
        """The gradient by the layer's output, [b, s, h]."""
        return self._dynamic(Holds.HIDDEN_GRADIENT)

    def leave(self, kind: Holds, tensor: Tensor) -> None:
        """Leave the layer's output, or the gradient by its input."""
        context, action = self.context, self.action
        context.memory.dynamic[context.entries.key(find(action.writes, kind), action)] = tensor

    def _dynamic(self, kind: Holds) -> Tensor:
        context, action = self.context, self.action
        tensor = context.memory.dynamic[context.entries.key(find(action.reads, kind), action)]
        assert isinstance(tensor, Tensor)
        return tensor


class Batches:
    """Tokens and targets of micro-batches on the device."""

    def __init__(self, *, with_targets: bool) -> None:
        """`with_targets`: the rank has the loss, too."""
        self._with_targets = with_targets
        self._arrived: dict[int, Tensor] = {}  # targets by micro-batch, ahead of the loss

    def tokens(self, visit: Visit) -> Tensor:
        """int64 [b, s], in memory of the device's; the targets come with them.

        At the loss, activations are already coming back, one copy at a time. Targets that were only
        copied then would come behind all of them.
        """
        context, action = visit
        wanted = context.batch(action.reads, action)[: 1 + self._with_targets]
        copied = numbers_on(context.device, wanted)
        if self._with_targets:
            self._arrived[action.micro_batch] = copied[1]
        return copied[0]

    def targets(self, visit: Visit) -> Tensor:
        """int64 [b * s]."""
        context, action = visit
        targets = self._arrived.pop(action.micro_batch, None)
        if targets is None:  # another rank has the first layer
            targets = numbers_on(context.device, context.batch(action.reads, action)[1])
        return targets.flatten()
