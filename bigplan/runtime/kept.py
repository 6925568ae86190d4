"""What a layer keeps of a micro-batch between forward and backward, wherever it lives meanwhile.

Two forms: the layer's input (to be recomputed), or the autograd graph of its forward. The graph is
recorded so that nothing in it holds memory of its own accord: parameters are saved as places within
the layer's flat buffer and looked up again at backward, in whatever slot the layer is by then;
activations are saved as positions in a list, which can be moved to host memory and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

ALIGNMENT = 16  # bytes: the widest load of a kernel; only sizes that divide by it are loaded so
SMALL = 1024  # bytes: random-number states and the like stay where they are


class _Enter(Function):
    """Identity whose node stands for a layer's input without keeping the input alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor]:
        return None, gradients[0]


@dataclass(slots=True)
class _Place:
    """A saved tensor as bytes at an offset of a buffer."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor within `buffer` (uint8)."""
        typed = buffer[self.offset :]
        whole = typed[: typed.numel() // self.dtype.itemsize * self.dtype.itemsize]
        return whole.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(slots=True)
class Kept:
    """One layer's state for one micro-batch."""

    saved: list[Tensor | _Place | None] = field(default_factory=list)
    weights: Tensor | None = None  # the layer's flat parameters (uint8), where they are now
    buffer: Tensor | None = None  # what `_Place`s point into once fetched
    output: GradientEdge | None = None
    input: GradientEdge | None = None
    parameters: list[Tensor] = field(default_factory=list)
    nbytes: int = 0  # on the device, unique storages

    def record(
        self, function: Callable[[Tensor], Tensor], x: Tensor, constants: frozenset[int]
    ) -> Tensor:
        """Run a layer's forward and keep its graph; `constants` are storages not to be moved."""
        anchor = torch.empty(0, requires_grad=True)
        entered = _Enter.apply(anchor, x)  # type: ignore[no-untyped-call]
        self.input = get_gradient_edge(entered)

        def pack(tensor: Tensor) -> Any:
            return self._pack(tensor, constants)

        with torch.enable_grad(), saved_tensors_hooks(pack, self._unpack):
            output = function(entered)
        self.output = get_gradient_edge(output)
        self.nbytes = sum(storage.numel() for storage in self._storages())
        return output.detach()

    def keep_input(self, x: Tensor) -> None:
        """Keep only the layer's input."""
        self.saved = [x]
        self.nbytes = x.numel() * x.element_size()

    def kept_input(self) -> Tensor:
        """The input, fetched back if it was moved."""
        return self._saved(0)

    def gradients(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Gradients by the input and the parameters, in that order."""
        assert self.output is not None and self.input is not None
        self._use_on_current_stream()
        inputs: list[Any] = [self.input, *self.parameters]  # torch's stubs forbid the mixture
        return torch.autograd.grad([self.output], inputs, grad_outputs=[gradient])

    def _pack(self, tensor: Tensor, constants: frozenset[int]) -> Any:
        assert self.weights is not None
        start, nbytes = self.weights.data_ptr(), self.weights.numel()
        if start <= tensor.data_ptr() < start + nbytes and tensor.numel():
            return _Place(tensor.data_ptr() - start, tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.untyped_storage().data_ptr() in constants:
            return tensor
        self.saved.append(tensor.detach())
        return len(self.saved) - 1

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Place):
            assert self.weights is not None
            return packed.view(self.weights)
        if isinstance(packed, Tensor):
            return packed
        tensor = self._saved(packed)
        # Autograd asks once; letting go here frees activations while the backward goes on.
        self.saved[packed] = None
        return tensor

    def _saved(self, index: int) -> Tensor:
        tensor = self.saved[index]
        if isinstance(tensor, Tensor):
            return tensor
        assert tensor is not None, "an activation is used twice"
        assert self.buffer is not None, "activations are read before they are fetched"
        return tensor.view(self.buffer)

    def _storages(self) -> Iterator[Tensor]:
        """Each storage of the saved tensors once, as bytes."""
        seen = set[int]()
        for tensor in self.saved:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes() >= SMALL:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

    def move_out(self, target: Tensor) -> None:
        """Copy the activations to `target` (uint8, host) and let go of them.

        The plan reserves their bytes and no more. Most aligned first, every storage starts at a
        multiple of its own alignment without padding.
        """
        offsets, end = dict[int, int](), 0
        for storage in sorted(self._storages(), key=_alignment, reverse=True):
            assert end + storage.numel() <= target.numel(), (
                f"activations need more than the {target.numel()} bytes that the plan reserved"
            )
            target[end : end + storage.numel()].copy_(storage, non_blocking=True)
            if storage.is_cuda:
                storage.record_stream(torch.cuda.current_stream())
            offsets[storage.data_ptr()] = end
            end += storage.numel()
        for i, tensor in enumerate(self.saved):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in offsets:
                start = offsets[tensor.untyped_storage().data_ptr()]
                start += int(tensor.storage_offset()) * tensor.element_size()
                self.saved[i] = _Place(start, tensor.shape, tensor.stride(), tensor.dtype)

    def fetch(self, source: Tensor, device: torch.device) -> None:
        """Copy the activations back from `source` (uint8, host)."""
        if device.type == "cpu":
            self.buffer = source.clone()
        else:
            self.buffer = source.to(device, non_blocking=True)

    def _use_on_current_stream(self) -> None:
        if self.buffer is not None and self.buffer.is_cuda:
            self.buffer.record_stream(torch.cuda.current_stream())

    def fetched_input(self) -> Tensor:
        """The kept input on the compute stream."""
        self._use_on_current_stream()
        return self.kept_input()


def _alignment(storage: Tensor) -> int:
    """The largest power of two, at most ALIGNMENT, that divides the storage's bytes."""
    return min(ALIGNMENT, storage.numel() & -storage.numel())
