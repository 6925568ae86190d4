"""How a block runs what can be run in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.attention.latent import Whole
from bigplan.runtime.experts import mixture
from bigplan.runtime.experts.mixture import Mixture
from bigplan.runtime.operators import GateKind
from bigplan.runtime.parallel.context_parallel import WHOLE, ContextParallel
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel

if TYPE_CHECKING:
    from bigplan.kernels.library import Library

Parameters = Mapping[str, Tensor]
Forget = Callable[..., None]  # told a result, and the function and inputs that give it again
# Runs products of one tensor as plain_linears does.
Linears = Callable[[Parameters, tuple[str, ...], Tensor], tuple[Tensor, ...]]
# Adds a product to a tensor, as Ways.close does. `Gated` does so with a gated activation; without
# a tensor, it gives the product alone.
Closing = Callable[[Parameters, str, Tensor, Tensor], Tensor]
Alone = Callable[[Parameters, str, Tensor], Tensor]  # the product by itself
Gated = Callable[[Parameters, str, "Tensor | None", tuple[Tensor, ...], GateKind], Tensor]
# The sum of cross-entropies of logits [n, V] by targets; the head also takes each token's.
Loss = Callable[[Tensor, Tensor], Tensor]
# Told keys and values that later blocks read, too; gives them back.
HandOn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def keep(output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Keep `output`, which is function(*inputs)."""


def plain_linears(p: Parameters, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
    """The products of x [..., in] and each `name`.weight [out, in], plus `name`.bias."""
    return tuple(F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias")) for name in names)


class Ways(NamedTuple):
    """How a block runs what can be run in several ways; layers/products.py has others."""

    linears: Linears = plain_linears  # products with weights
    forget: Forget = keep  # told what selective recomputation runs again: norms and the activation
    widening: Linears | None = None  # the MLP's first products; None: by `linears`
    closing: Closing | None = None  # products added to the residual stream; None: by `linears`
    last: Closing | None = None  # as `closing`; nothing in the block reads this sum; None: closing
    gated: Gated | None = None  # the last product with its gated activation; None: separately
    unread: bool = False  # nothing reads the block's output: its backward alone is wanted
    kernels: Library | None = None  # generated kernels; None: torch's operators
    alone: Alone | None = None  # the product without the sum; None: by `linears`
    loss: Loss | None = None  # None: by words.cross_entropy
    context: ContextParallel = WHOLE  # ranks that have parts of the sequences
    ranks: TensorParallel = ONE  # ranks that have parts of the heads
    experts: Mixture = mixture.PLAIN  # of the MLP, where the model has them
    again: Linears | None = None  # products that are cheap to run again; None: by `linears`
    whole: Whole = Whole()  # products with matrices that no rank has a part of
    hand_on: HandOn | None = None  # keys and values that later blocks read; None: none does

    def close(self, p: Parameters, name: str, x: Tensor, inner: Tensor) -> Tensor:
        """Add to x [..., out] the product of inner [..., in] and `name`.weight [out, in]."""
        if self.closing is None:
            return x + self.linears(p, (name,), inner)[0]
        return self.closing(p, name, x, inner)

    def linears_of_whole(
        self, p: Parameters, names: tuple[str, ...], x: Tensor
    ) -> tuple[Tensor, ...]:
        """As `linears`, of matrices that every tensor-parallel rank has whole."""
        return (self.whole.linears or self.linears)(p, names, x)

    def close_whole(
        self, p: Parameters, name: str, x: Tensor | None, inner: Tensor, *, unread: bool
    ) -> Tensor:
        """As `close`, of such a matrix; without x the product alone. `unread`: nothing reads it."""
        if x is not None and self.whole.closing is not None:
            return self.whole.closing(p, name, x, inner, unread=unread)
        (output,) = self.linears_of_whole(p, (name,), inner)
        return output if x is None else x + output


PLAIN = Ways()
