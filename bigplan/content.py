"""What an entry of a buffer holds."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from bigplan.placement import Share

# In place of a layer's number: the adapters of all of a stage's layers. No model has so many
# layers, so that code which takes it for one fails.
ADAPTERS = 10**6


class Holds(StrEnum):
    """The kinds of content, as error messages name them."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"  # the sum over the units of the step so far
    PARTIAL_GRADIENTS = "partial gradients"  # of one unit, on their way to that sum
    STATE = "optimizer state"
    ACTIVATIONS = "activations"  # what a layer keeps between its forward and its backward
    HIDDEN = "hidden states"  # a layer's output
    HIDDEN_GRADIENT = "hidden-state gradients"  # the gradient by a layer's output
    ROWS = "looked-up rows"  # of the first layer's tables
    ROW_GRADIENTS = "row gradients"  # of those rows
    SQUARES = "square sum"  # of a layer's final gradients
    CLIP = "clip factor"
    BATCH = "batch"  # tokens and targets
    CHECKPOINT = "checkpoint"  # a part of a layer's file


class Content(NamedTuple):
    """What is in an entry. `layer` is -1 for content of no layer, or ADAPTERS.

    Optimizer state is cut into shares, and some shares into chunks. `chunk` numbers the chunks of a
    share.
    """

    kind: Holds
    layer: int = -1
    share: Share | None = None
    chunk: int = 0

    def __str__(self) -> str:
        """Text for error messages: 'optimizer state of layer 3 (nvme, chunk 0)'."""
        of_layer = f" of layer {self.layer}" if self.layer >= 0 else ""
        of_layer = " of adapters" if self.layer == ADAPTERS else of_layer
        part = f" ({self.share}, chunk {self.chunk})" if self.share else ""
        return f"{self.kind}{of_layer}{part}"


class HeldContent(NamedTuple):
    """A content, with its micro-batch where each micro-batch has its own."""

    content: Content
    micro_batch: int | None = None

    def __str__(self) -> str:
        """Text for error messages: 'activations of layer 1, micro-batch 0'."""
        number = self.micro_batch
        return str(self.content) if number is None else f"{self.content}, micro-batch {number}"
