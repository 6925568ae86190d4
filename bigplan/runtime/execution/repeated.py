"""Updates of state that stays on the GPU, repeated from CUDA graphs.

A layer has a kernel for each of its tensors, which Python takes 0.1 ms to launch. What changes from
step to step is a few factors, which kernels read from memory of fixed addresses. So updates have
graphs whether passes can have them or not: a layer of Qwen3 0.6B took 1.34 ms of Python on an H100
without, and 0.16 with one (benchmarks/results/2026-11-25-h100-launched).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bigplan.program import Action
from bigplan.runtime.execution.graphs import capturing
from bigplan.runtime.optimizer.scaling import Verdict
from bigplan.spec.optimizer import ParameterRule

Factors = Callable[[ParameterRule], Tensor]  # on the device, as AdamW.step takes them


class RepeatedUpdates:
    """The updates that one stream runs; `factors` gives those of a verdict, in new memory."""

    def __init__(self, factors: Callable[[Verdict, ParameterRule], Tensor]) -> None:
        self._new = factors
        self._kept: dict[ParameterRule, Tensor] = {}  # what graphs read
        self._graphs: dict[Action, torch.cuda.CUDAGraph | None] = {}  # None: it ran once
        self._verdict: Verdict | None = None

    def run(self, action: Action, verdict: Verdict, apply: Callable[[Factors], None]) -> None:
        """`apply` with the verdict's factors, from a graph after the first time."""
        if verdict is not self._verdict:
            self._verdict = verdict
            for rule, factors in self._kept.items():
                factors.copy_(self._new(verdict, rule))
        if action not in self._graphs:
            apply(self._factors)
            self._graphs[action] = None  # its kernels are compiled and loaded
            return
        graph = self._graphs[action]
        if graph is None:
            graph = self._graphs[action] = torch.cuda.CUDAGraph()
            with capturing(graph):
                apply(self._factors)
        graph.replay()

    def _factors(self, rule: ParameterRule) -> Tensor:
        if rule not in self._kept:
            assert self._verdict is not None
            self._kept[rule] = self._new(self._verdict, rule)
        return self._kept[rule]
