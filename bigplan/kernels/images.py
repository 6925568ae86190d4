"""Convolutions in 16 bits, captured with the channels of a position side by side.

Tensor cores take images in that order alone. Between others cuDNN turns them at every convolution:
12 kernels there and 6 back in a residual block's training pass, 1.16 of 3.79 ms on an H100. So
images are turned once, before the first convolution, which the operators after it follow, and
results once more. Both are copies that a kernel may have in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

LAST: Any = torch.channels_last
FIRST: Any = torch.contiguous_format


def channels_last(tensor: Tensor) -> bool:
    """Whether images [n, c, h, w] of more than a pixel and a channel lie so, and in no other."""
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=LAST)
    return last and not tensor.is_contiguous()


class _Turned(torch.autograd.Function):
    """Images in another order; their gradient comes in their own."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, order: Any) -> Tensor:
        ctx.before = FIRST if order is LAST else LAST
        return images.contiguous(memory_format=order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].contiguous(memory_format=ctx.before), None


class ImageOrder:
    """The order of images in a function while it is captured."""

    def __init__(self) -> None:
        self.turned = False  # whether some images were
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def keep_order(self, argument: Any) -> None:
        """Let the gradient of one of the function's arguments lie as the argument does."""
        plain = isinstance(argument, Tensor) and argument.dim() == 4 and argument.is_contiguous()
        if plain and argument.requires_grad:
            argument.register_hook(lambda by: by.contiguous() if self.turned else by)

    def conv2d(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """torch.conv2d, with both turned where they lie row by row."""
        groups = kwargs.get("groups", args[4] if len(args) > 4 else 1)
        narrow = {x.dtype, weight.dtype} <= {torch.bfloat16, torch.float16}
        if narrow and groups == 1 and x.dim() == 4 and not channels_last(weight):
            self.turned = self.turned or not channels_last(x)
            x, weight = self._last(x), self._last(weight)
        return torch.conv2d(x, weight, *args, **kwargs)

    def _last(self, tensor: Tensor) -> Tensor:
        """The tensor so, turned once for all convolutions that read it."""
        if tensor.is_contiguous(memory_format=LAST):
            return tensor
        source, version, found = self._known.get(id(tensor), (None, -1, tensor))
        if source is not tensor or version != tensor._version:
            found = _turned(tensor, LAST)
            self._known[id(tensor)] = tensor, tensor._version, found
        return found

    def view(self, x: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
        """Tensor.view: images that were turned have to be copied for other shapes."""
        try:
            return x.view(*shape, **kwargs)
        except (RuntimeError, ValueError):  # the latter of fake tensors
            if not (self.turned and channels_last(x)):
                raise
            return x.contiguous().view(*shape, **kwargs)

    def as_given(self, result: Any) -> Any:
        """A result of the function, row by row if its images were."""
        plain = self.turned and isinstance(result, Tensor) and channels_last(result)
        return _turned(result, FIRST) if plain else result


def _turned(images: Tensor, order: Any) -> Tensor:
    result: Tensor = _Turned.apply(images, order)  # type: ignore[no-untyped-call]
    return result


def read_as_turned(graph: fx.Graph) -> None:
    """Let results in the order of tensor cores read images as these were turned, not as given.

    So nothing but the copy reads what was given: it need not be kept beside the copy.
    """
    turn = torch.ops.aten.clone.default
    for node in graph.find_nodes(op="call_function", target=turn):
        given = node.args[0]
        if node.kwargs.get("memory_format") is LAST and isinstance(given, fx.Node):
            for reader in [one for one in given.users if node < one and _so(one)]:
                reader.replace_input_with(given, node)


def _so(node: fx.Node) -> bool:
    made = node.meta.get("val")
    return isinstance(made, Tensor) and channels_last(made)
