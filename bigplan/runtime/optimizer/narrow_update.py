"""Updates of elements whose moments are stored together in bf16 or 8 bits, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from bigplan.kernels.numbers import to_gpu
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.native import native
from bigplan.runtime.generated import library_for
from bigplan.runtime.memory.pieces import Box
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.narrow_adamw import NarrowPiece, Run, reference, step_on_cpu
from bigplan.runtime.optimizer.scaling import Verdict
from bigplan.spec.optimizer import Optimizer, ParameterRule
from bigplan.spec.training import Training

Factors = Callable[[ParameterRule], Tensor]
# Of kernels/handwritten/moments.py: parameter and gradient, moments, scales, copy, runs and their
# factors.
Kernel = Callable[
    [
        tuple[Tensor, Tensor],
        tuple[Tensor, ...],
        tuple[Tensor, ...],
        Tensor | None,
        tuple[Tensor, Tensor],
    ],
    None,
]


class NarrowUpdates:
    """`kernel`: the GPU's; None: plain torch. `cores`: the CPU's."""

    def __init__(
        self, optimizer: Optimizer, device: torch.device, kernel: Kernel | None, cores: Cores
    ) -> None:
        self.kernel = kernel
        self._optimizer, self._device, self._cores = optimizer, device, cores
        self._starts: dict[tuple[int, ...], Tensor] = {}  # as the device has them

    @classmethod
    def of(cls, training: Training, device: torch.device, cores: Cores) -> NarrowUpdates | None:
        """What updates a training's moments, unless they are in fp32."""
        if training.optimizer.moments == "fp32":
            return None
        if library_for(training, device) is None:
            return cls(training.optimizer, device, None, cores)
        from bigplan.kernels.handwritten.moments import step

        return cls(training.optimizer, device, step, cores)

    def factors(self, verdict: Verdict, rule: ParameterRule) -> Tensor:
        """What the kernel multiplies by, fp32 on the device, in its order.

        fp32 counts exactly to 16.7 M updates.
        """
        constants = self.constants(verdict, rule)
        return to_gpu([*constants, float(verdict.number), verdict.divisor], self._device)

    def constants(self, verdict: Verdict, rule: ParameterRule) -> tuple[float, ...]:
        """A rule's, in adamw.py's order."""
        rate = verdict.learning_rate * rule.learning_rate_factor
        kernel = adamw_kernel(self._optimizer, verdict.number, rate, rule.weight_decay)
        return kernel.native.constants

    def run(
        self,
        piece: NarrowPiece,
        rules: Sequence[tuple[int, ParameterRule]],
        verdict: Verdict,
        factors: Factors,
    ) -> None:
        """Update a piece; `rules`: the first elements of the runs that have them."""
        if self.kernel is not None and piece.parameter.is_cuda:
            pair = piece.parameter, piece.gradient
            starts = self._on_device(tuple(start for start, _ in rules))
            each = torch.stack([factors(rule) for _, rule in rules])
            self.kernel(pair, piece.moments, piece.scales, piece.copy, (starts, each))
            return
        runs = [Run(start, self.constants(verdict, rule)) for start, rule in rules]
        by = verdict.divisor, verdict.number
        if piece.parameter.device.type == "cpu":
            step_on_cpu(native(), piece, runs, by, self._cores.count)
        else:
            reference(piece, runs, by)

    def _on_device(self, starts: tuple[int, ...]) -> Tensor:
        if starts not in self._starts:
            self._starts[starts] = torch.tensor(starts, device=self._device)
        return self._starts[starts]


def runs_of(
    boxes: Sequence[Box], rules: Mapping[str, ParameterRule]
) -> Iterator[tuple[int, ParameterRule]]:
    """First elements within their piece of neighbours with one rule, and the rule."""
    for rule, alike in groupby(boxes, key=lambda box: rules[box.tensor]):
        yield next(alike).place, rule
