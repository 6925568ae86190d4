"""Updates of state that stays on the GPU, repeated from CUDA graphs.

A layer has a kernel for each of its tensors, which Python takes 0.1 ms to launch. What changes from
step to step is a few factors, which kernels read from memory of fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bigplan.program import Action
from bigplan.runtime.graphs import capturing
from bigplan.runtime.scaling import Verdict
from bigplan.spec.optimizer import ParameterRule

if TYPE_CHECKING:
    from bigplan.kernels.update import AdamW

Factors = Callable[[ParameterRule], Tensor]  # on the device, as AdamW.step takes them
Constants = Callable[[Verdict, ParameterRule], Sequence[float]]  # as AdamW.factors takes them


class RepeatedUpdates:
    """The updates of one lane, whose actions come in the same order in every step."""

    def __init__(self, kernel: AdamW, constants: Constants, device: torch.device) -> None:
        self._kernel, self._constants, self._device = kernel, constants, device
        self._factors: dict[ParameterRule, Tensor] = {}
        self._graphs: dict[Action, torch.cuda.CUDAGraph | None] = {}  # None: it ran once
        self._verdict: Verdict | None = None

    def run(self, action: Action, verdict: Verdict, apply: Callable[[Factors], None]) -> None:
        """`apply` with the verdict's factors, from a graph after the first time."""
        if verdict is not self._verdict:
            self._verdict = verdict
            for rule, factors in self._factors.items():
                factors.copy_(self._of(rule, verdict))
        if action not in self._graphs:
            apply(self._kept)
            self._graphs[action] = None  # its kernels are compiled and loaded
            return
        graph = self._graphs[action]
        if graph is None:
            graph = self._graphs[action] = torch.cuda.CUDAGraph()
            with capturing(graph):
                apply(self._kept)
        graph.replay()

    def _kept(self, rule: ParameterRule) -> Tensor:
        if rule not in self._factors:
            assert self._verdict is not None
            self._factors[rule] = self._of(rule, self._verdict)
        return self._factors[rule]

    def _of(self, rule: ParameterRule, verdict: Verdict) -> Tensor:
        return self._kernel.factors(self._constants(verdict, rule), verdict.divisor, self._device)
