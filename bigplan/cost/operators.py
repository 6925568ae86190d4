"""Operators one by one: what each takes and what it is bound by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bigplan.cost.collective import LayerGroups, dispatched_seconds, exposed_seconds
from bigplan.cost.compute import (
    Device,
    alignment,
    chained,
    launches,
    operator_seconds,
    tile_waste,
    tiled_seconds,
)
from bigplan.cost.framework import Framework
from bigplan.graph.operators import Attention, Collective, Gemm, Operator


class Bound(StrEnum):
    """What an operator waits for."""

    COMPUTE = "compute"
    POWER = "power"  # its tiles would be faster, but for the GPU's power limit
    MEMORY = "memory"
    LATENCY = "latency"  # its kernels take less time than launching them
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One operator: GPU seconds without launches, work, and why it takes so long."""

    name: str
    seconds: float
    flops: float
    nbytes: float
    launches: int
    bound: Bound
    tile_waste: float = 1.0  # work of whole tiles and waves over useful work
    alignment: float = 1.0  # rate beside that of dimensions that are multiples of 8
    power_lost: float = 0.0  # share of the seconds that the GPU's power limit adds

    @property
    def intensity(self) -> float:
        """FLOPs per byte of device memory traffic."""
        return self.flops / self.nbytes if self.nbytes else 0.0


def operator_costs(
    operators: Sequence[Operator], device: Device, groups: LayerGroups, framework: Framework
) -> Iterator[OperatorCost]:
    """The costs of a layer's operators, in order."""
    gemms = {
        operator.name: operator_seconds(operator, device)
        for operator in operators
        if isinstance(operator, Gemm)
    }
    for operator in operators:
        if isinstance(operator, Collective):
            seconds = _waited(operator, device, groups, framework, gemms)
            moved = float(operator.nbytes * operator.count)
            yield OperatorCost(operator.name, seconds, 0.0, moved, 0, Bound.COMMUNICATION)
        else:
            yield _kernel_cost(operator, device, framework)


def _waited(
    operator: Collective,
    device: Device,
    groups: LayerGroups,
    framework: Framework,
    gemms: Mapping[str, float],
) -> float:
    """Seconds that a rank waits for a collective within a layer."""
    gpu = device.gpu
    if operator.rows:
        return dispatched_seconds((operator,), groups, framework, 0.0, gpu.multiprocessors)
    return exposed_seconds(operator, groups, framework, gemms, beside=gpu.runs_kernels)


def _kernel_cost(operator: Operator, device: Device, framework: Framework) -> OperatorCost:
    seconds = operator_seconds(operator, device)
    number = launches(operator, device.eager)
    flops = operator.flops if isinstance(operator, Gemm | Attention) else 0.0
    nbytes = traffic(operator, device)
    if number * device.gpu.launch_overhead * (framework.host or 1.0) > seconds:
        bound = Bound.LATENCY
    elif nbytes / device.stream_rate >= seconds * (1 - 1e-9):
        bound = Bound.MEMORY
    else:
        bound = Bound.COMPUTE
    cost = OperatorCost(operator.name, seconds, flops, nbytes, number, bound)
    return _product(cost, operator, device) if isinstance(operator, Gemm) else cost


def _product(cost: OperatorCost, gemm: Gemm, device: Device) -> OperatorCost:
    """The product's cost with what slows it."""
    lost = 1 - tiled_seconds(gemm, device) / cost.seconds
    return replace(
        cost,
        bound=Bound.POWER if lost else cost.bound,
        tile_waste=tile_waste(gemm, device.gpu),
        alignment=alignment(gemm, device.gpu, device.precision_of(gemm)),
        power_lost=lost,
    )


def traffic(operator: Operator, device: Device) -> float:
    """Bytes of device memory that an operator reads and writes."""
    if isinstance(operator, Gemm):
        return float(operator.elements * (4 if device.precision_of(operator) == "fp32" else 2))
    assert not isinstance(operator, Collective)
    chain = 1.0 if isinstance(operator, Attention) else chained(operator, device.eager)
    return operator.nbytes * chain
