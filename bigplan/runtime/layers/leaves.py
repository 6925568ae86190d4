"""A layer's parameters as what autograd differentiates by, and the gradients that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor


def without(gradients: Mapping[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    """The gradients but those of these names."""
    return {name: gradient for name, gradient in gradients.items() if name not in names}


def leaves_of(views: Mapping[str, Tensor], *, in_product: bool) -> dict[str, Tensor]:
    """Parameters for autograd to differentiate by, but for matrices that products add up."""
    return {
        name: view if in_product and view.dim() == 2 else leaf_of(view)
        for name, view in views.items()
    }


def leaf_of(tensor: Tensor) -> Tensor:
    """The same memory, for autograd to differentiate by."""
    return tensor.detach().requires_grad_()


def differentiated(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that autograd gives gradients of."""
    return {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
