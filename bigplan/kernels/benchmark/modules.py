"""Whole modules, forward and backward: what they take, and what they keep between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bigplan.kernels.benchmark import cases
from bigplan.kernels.benchmark.blocks_of_transformers import Absent, blocks
from bigplan.kernels.benchmark.cases import Workload
from bigplan.kernels.benchmark.measuring import KernelBench, KernelRecord
from bigplan.kernels.optimised import optimise


def workloads(bench: KernelBench) -> None:
    """A GPT-2 block and a residual block, training and not, also with a price on bytes kept."""
    table = _table("workloads")
    for workload in cases.workloads(small=bench.small):
        module = workload.module.to(bench.device, bench.dtype)
        for way, ours in (*_ways(bench, module), _less_kept(bench, module)):
            for training in (True, False):
                _measured(bench, table, workload, (way, ours.train(training)), training=training)
    bench.console.print(table)


def library(bench: KernelBench) -> None:
    """Blocks of transformers in training; a line for each as soon as it is measured."""
    table = _table("library")
    for block in blocks(small=bench.small):
        if isinstance(block, Absent):
            bench.record("workload", name=block.name, failed=block.reason)
            table.add_row(*block)
            continue
        module = block.module.to(bench.device, bench.dtype)
        for way, ours in _ways(bench, module):
            _measured(bench, table, block, (way, ours.train()), training=True)
        torch._dynamo.reset()  # a later block of the same class would be one more shape of this one
    bench.console.print(table)


def _table(part: str) -> Table:
    table = Table(title=f"{part}: milliseconds forward and backward, MiB kept between them")
    for column in ("workload", "way", "forward", "both", "in a graph", "kept"):
        table.add_column(column, justify="left" if column in ("workload", "way") else "right")
    return table


def _ways(bench: KernelBench, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "eager", module
    if bench.cuda:
        compiled: Any = torch.compile(module)
        yield "compile", compiled
    yield "generated", optimise(module, gpu=bench.optimiser.gpu, tune=bench.tune)


def _less_kept(bench: KernelBench, module: nn.Module) -> tuple[str, nn.Module]:
    """As if a byte kept cost three passes over it: one more is computed again."""
    dear = 3 / bench.optimiser.pricer.device.stream_rate
    ours = optimise(module, gpu=bench.optimiser.gpu, price=dear, tune=bench.tune)
    return "generated, less kept", ours


def _measured(
    bench: KernelBench,
    table: Table,
    workload: Workload,
    way: tuple[str, nn.Module],
    *,
    training: bool,
) -> None:
    label, module = way
    if bench.late(f"{workload.name} {label}"):
        return
    row = _row(bench, workload, module, training=training)
    bench.record("workload", name=workload.name, way=label, training=training, **row)
    mode = "" if training else " (inference)"
    kept = f"{row['kept']:.0f}" if "kept" in row else row.get("failed", "")
    times = [_ms(row.get(key)) for key in ("ahead", "both", "graph")]
    table.add_row(workload.name + mode, label, *times, kept)
    bench.console.print(workload.name + mode, label, *times, kept)


def _row(
    bench: KernelBench, workload: Workload, module: nn.Module, *, training: bool
) -> KernelRecord:
    def there(value: Any) -> Any:
        moved = isinstance(value, Tensor)
        return value.to(bench.device, bench.dtype) if moved else value

    x = torch.randn(workload.shape, device=bench.device, dtype=bench.dtype)
    x = cases.as_weights(x, module).requires_grad_(training)
    further = tree_map(there, dict(workload.further))

    def ahead() -> Tensor:
        with torch.set_grad_enabled(training):
            result = module(x, **further)
        return result if isinstance(result, Tensor) else result[0]

    try:
        row: KernelRecord = {"ahead": bench.seconds(ahead)}
        if training:
            gradient = torch.randn_like(ahead())
            wanted = [x, *module.parameters()]

            def both() -> Any:
                return torch.autograd.grad(ahead(), wanted, gradient)

            row |= {"both": bench.seconds(both), "graph": bench.in_graph(both)}
            row["kept"] = _kept(bench, ahead)
        return row
    except Exception as problem:  # noqa: BLE001 -- what fails is a result
        return {"failed": f"{type(problem).__name__}: {problem}"[:300]}


def _kept(bench: KernelBench, ahead: Callable[[], Tensor]) -> float:
    """MiB that live after a forward and not before, its result aside."""
    if not bench.cuda:
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = ahead()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before - result.numel() * result.element_size()
    return float(held / 2**20)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"
