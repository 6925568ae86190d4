"""What tensor-parallel ranks exchange within a layer.

Matrices that read the residual stream are split by rows, those that lead back to it by columns, so
a pair of them needs one sum (Shoeybi et al., arXiv 1909.08053). With sequence parallelism a rank
has only a part of the residual stream. The parts are gathered before the first matrix of the pair,
and the sum is scattered after the second (Korthikanti et al., arXiv 2205.05198, section 4.2.2). The
backward of a gather is a scatter of sums, and the reverse.

Parts are of a micro-batch's tokens, whichever sequence they are of: [tokens / ranks, hidden]. So
they lie one behind the other in the whole, and no collective has to copy them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.parallel.group import ALONE, Begun, RankGroup
from bigplan.spec.step import LayerStep


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank among those that split layers; alone it has all of them."""

    group: RankGroup = ALONE
    sequence_parallel: bool = False

    @property
    def alone(self) -> bool:
        """Whether nothing is split."""
        return self.group.size == 1

    @property
    def parts(self) -> int:
        """Equal parts of a micro-batch's tokens that the residual stream is cut into."""
        return self.group.size if self.sequence_parallel else 1

    @property
    def first(self) -> bool:
        """Whether this rank adds what is added once, before ranks are summed: biases, places."""
        return self.group.place == 0

    def hidden(self, batch: int, length: int, width: int) -> tuple[int, ...]:
        """The shape of a hidden state on a rank, of `batch` sequences."""
        if self.parts == 1:
            return batch, length, width
        return batch * length // self.parts, width

    def counted_elsewhere(self, steps: Iterable[LayerStep]) -> frozenset[str]:
        """Parameters of a layer whose whole gradients another rank counts."""
        if self.first or self.parts > 1:
            return frozenset()
        return frozenset(p.name for step in steps for p in step.beside_all)

    def gather(self, x: Tensor) -> Begun:
        """Begin to bring together all tokens [tokens, h] of a hidden state."""
        return self.group.gathered(x) if self.parts > 1 else lambda: x

    def sum(self, x: Tensor) -> Begun:
        """Begin to sum [..., h] over the ranks, to a hidden state; `x` must not be used after."""
        return self.group.scattered(x.flatten(0, -2)) if self.parts > 1 else self.group.reduced(x)

    def all_tokens(self, x: Tensor) -> Tensor:
        """All tokens of a hidden state, [tokens, h]."""
        return self.gather(x)()

    def own(self, values: Tensor) -> Tensor:
        """This rank's tokens' part of values of all tokens [tokens, ...]."""
        return self.group.own(values) if self.parts > 1 else values

    def gathered(self, x: Tensor) -> Tensor:
        """All tokens of a hidden state for all ranks to read; gradients by them are summed."""
        return x if self.alone else _Gathered.apply(x, self)  # type: ignore[no-untyped-call]


ONE = TensorParallel()


class _Gathered(Function):
    """All tokens of a hidden state; this rank gets the sum of gradients by its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks, ctx.shape = ranks, x.shape
        return x.view_as(x) if ranks.parts == 1 else ranks.gather(x)()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradients[0])().view(ctx.shape), None
