"""Seconds in which the host launches what a GPU runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bigplan.cost.compute import Device, launches
from bigplan.cost.framework import Framework
from bigplan.graph.graph import Tensor
from bigplan.graph.operators import Attention, Collective, Operator, Stream
from bigplan.spec.gpu import Gpu
from bigplan.spec.training import Training

FUSED = 1.5  # times the bytes of a fused kernel: torch's own norms move 1.3 times as many


def host_seconds(
    operators: tuple[Operator, ...],
    device: Device,
    framework: Framework,
    hooks: float = 0.0,
    *,
    again: bool = False,
) -> float:
    """Seconds in which the host launches a pass over a layer's operators, collectives apart.

    The native runtime's Python takes about as long for every operator, and more if the operator is
    a fused kernel or several of torch's. Operators that run `again` before a backward have no
    separate action and no autograd graph, so only their launches count. `hooks`: additional work,
    in launches. Of captured passes the host launches a graph, which also runs what runs `again`.
    """
    gpu = device.gpu
    if framework.captured:
        return 0.0 if again else gpu.action_overhead + gpu.launch_overhead
    kernels = [one for one in operators if not isinstance(one, Collective)]
    numbers = [launches(one, device.eager) for one in kernels]
    if framework.host is not None:
        return (sum(numbers) + hooks) * gpu.launch_overhead * framework.host
    hooked = hooks * gpu.launch_overhead
    if again or not numbers:
        return hooked + sum(numbers) * gpu.launch_overhead
    several = sum(number - 1 for number in numbers if number > 1)
    python = gpu.action_overhead + len(numbers) * gpu.operator_overhead
    if not device.eager:
        python += sum(map(is_kernel, kernels)) * gpu.kernel_overhead
    return hooked + python + several * gpu.launch_overhead


class UpdateLaunch(NamedTuple):
    """Seconds in which the host launches a layer's update on the GPU, a kernel for each tensor."""

    start: float = 0.0
    element: float = 0.0  # an element updated: a rank's part has as large a part of the kernels

    def seconds(self, elements: int) -> float:
        """Of so many elements."""
        return self.start + self.element * elements


def update_launch(
    tensors: Sequence[Tensor], gpu: Gpu, framework: Framework, training: Training
) -> UpdateLaunch:
    """The native runtime's: of generated kernels a CUDA graph. Other frameworks launch it at once.

    Launched by Python, a tensor is priced as an operator of a pass: 0.5 ms for half a block of
    Qwen3 0.6B on two H200s, where 0.8 to 1.2 were measured
    (benchmarks/results/2026-11-25-h200-x2-one-machine), and 0.75 on two H100s, where 1.45 were
    (2026-11-25-h100-x2-offload).
    """
    if framework.host is not None or not gpu.runs_kernels:
        return UpdateLaunch()
    if training.kernels == "generated" and training.optimizer.name == "adamw":
        return UpdateLaunch(gpu.action_overhead + gpu.launch_overhead)
    each = len(tensors) * gpu.operator_overhead
    elements = sum(tensor.elements for tensor in tensors)
    return UpdateLaunch(gpu.action_overhead, each / elements)


def is_kernel(operator: Operator) -> bool:
    """Whether the operator is a fused kernel; as chains plain torch moves far more bytes."""
    if isinstance(operator, Attention):
        return operator.kernel == "alibi"
    if not isinstance(operator, Stream) or not operator.launches:
        return False
    return operator.generated or operator.eager > FUSED
