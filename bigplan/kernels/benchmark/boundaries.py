"""Whether to fuse: every boundary of a cover that could be the other way, measured both ways.

A boundary lies between two groups that could be one kernel and are not, or inside a kernel that
could be two. Both ways run as generated kernels with the model's picks, on tensors of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from rich.table import Table
from torch import Tensor

from bigplan.kernels.benchmark import cases
from bigplan.kernels.benchmark.measuring import KernelBench, in_us
from bigplan.kernels.benchmark.sweep import compile_tiles
from bigplan.kernels.fusion.cover import CoverSearch, Members
from bigplan.kernels.fusion.families import block_graph
from bigplan.kernels.fusion.graph import KernelGraph, KernelValue
from bigplan.kernels.fusion.keep import best_plan
from bigplan.kernels.fusion.price import Fused, Pricer
from bigplan.kernels.launch import DTYPES, LaunchedKernel
from bigplan.kernels.optimised import optimise
from bigplan.spec.catalog import find_model

# Layer norms and a GELU; RMSNorms and gates; norms of heads; partial rotary; parallel residuals.
MODELS = ("gpt2-xl", "llama-3-8b", "qwen3-0.6b", "stablelm-2-1.6b", "falcon-40b")
LENGTH, TOKENS = 2048, 16384
MOST = 14  # boundaries of a graph, evenly out of all
TIE = 0.01  # of the time apart: nearer ones are right either way


@dataclass(frozen=True)
class Choice:
    """Two groups that can be one kernel, and whether the cover has them so."""

    first: Members
    second: Members
    fused: bool


class Choices(CoverSearch):
    """The choices of a graph's best cover."""

    def __init__(self, graph: KernelGraph, pricer: Pricer) -> None:
        super().__init__(graph, pricer)
        self.settle()

    def kernel(self, members: Members) -> Fused | None:
        """These as a generated kernel, if they can be one and write something."""
        nodes = tuple(self.nodes[i] for i in sorted(members))
        if not self.convex(members) or not all(self.fusable[i] for i in members):
            return None
        found = self.pricer.fused(self.graph, nodes, self.wanted(members))
        return found if isinstance(found, Fused) and found.body.outputs else None

    def all(self) -> Iterator[Choice]:
        """In the order of the graph."""
        for group in sorted(dict.fromkeys(self.owner.values()), key=min):
            yield from self._inside(group)
            for other in self.neighbours(group):
                if min(group) < min(other) and self._possible(group, other):
                    yield Choice(group, other, fused=False)

    def _inside(self, group: Members) -> Iterator[Choice]:
        order = sorted(group)
        for cut in range(1, len(order)):
            first, second = frozenset(order[:cut]), frozenset(order[cut:])
            if self._possible(first, second):
                yield Choice(first, second, fused=True)

    def _possible(self, first: Members, second: Members) -> bool:
        return all(self.kernel(one) is not None for one in (first, second, first | second))


def boundaries(bench: KernelBench) -> None:
    """Measure them; a table of those that were wrong, and a record each."""
    table = Table(title="fused or not: choices that are slower than the other way, microseconds")
    for column in ("graph", "kernels", "taken", "as one", "predicted", "as two", "predicted"):
        table.add_column(column, justify="left" if column in ("graph", "kernels") else "right")
    right = ties = counted = 0
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for name, search, choice, compiled in list(_drawn(bench, pool)):
            label = " | ".join(_name(search, part) for part in (choice.first, choice.second))
            if bench.late(f"{name} {label}"):
                for future in compiled:
                    future.cancel()
                continue
            for future in compiled:
                future.result()
            row = _measured(bench, search, choice)
            tie = abs(row["one"] - row["two"]) < TIE * row["two"]
            good = tie or (row["one"] < row["two"]) == choice.fused
            counted, ties, right = counted + 1, ties + tie, right + good
            bench.record(
                "boundary", graph=name, kernels=label, fused=choice.fused, right=good, **row
            )
            if not good:
                figures = (row[key] for key in ("one", "one_predicted", "two", "two_predicted"))
                table.add_row(name, label, "one" if choice.fused else "two", *map(in_us, figures))
    bench.console.print(table)
    share = f"{right / counted:.0%}" if counted else "none"
    bench.console.print(f"{right} of {counted} right ({share}), {ties} of them within {TIE:.0%}")


def _drawn(
    bench: KernelBench, pool: ProcessPoolExecutor
) -> Iterator[tuple[str, Choices, Choice, list[Future[None]]]]:
    """Some choices of every graph, evenly, while all cores compile their kernels."""
    for name, graph in _graphs(bench):
        search = Choices(graph, bench.optimiser.pricer)
        every = list(search.all())
        for choice in every[:: max(1, -(-len(every) // (2 if bench.small else MOST)))]:
            groups = choice.first | choice.second, choice.first, choice.second
            fused = [one for group in groups if (one := search.kernel(group)) is not None]
            compiled = [
                pool.submit(compile_tiles, one.body, [one.tile]) for one in fused if bench.cuda
            ]
            yield name, search, choice, compiled


def _graphs(bench: KernelBench) -> Iterator[tuple[str, KernelGraph]]:
    pricer, small = bench.optimiser.pricer, bench.small
    length = 16 if small else LENGTH
    for name in MODELS[: 1 if small else None]:
        kind = next(name for name, dtype in DTYPES.items() if dtype == bench.dtype)
        block = block_graph(find_model(name), 1 if small else TOKENS // length, length, kind)
        yield name, best_plan(block, pricer).graph
    for workload in cases.workloads(small=small):
        if "residual" in workload.name and not small:
            module = workload.module.to(bench.device, bench.dtype)
            x = torch.empty(workload.shape, device=bench.device, dtype=bench.dtype)
            x = cases.as_weights(x, module).requires_grad_()
            plan = optimise(module, [x], gpu=bench.optimiser.gpu).kernels.plans[0]
            yield workload.name, plan.graph


def _measured(bench: KernelBench, search: Choices, choice: Choice) -> dict[str, float]:
    """Seconds as one kernel and as two, measured and predicted."""
    found = {}
    parts = {"one": (choice.first | choice.second,), "two": (choice.first, choice.second)}
    for key, groups in parts.items():
        fused = [one for group in groups if (one := search.kernel(group)) is not None]
        kernels = [LaunchedKernel(one.body, one.choices) for one in fused]
        given = [[_filled(v, bench.device) for v in one.body.inputs] for one in fused]

        def run(
            kernels: Sequence[LaunchedKernel] = kernels, given: list[list[Tensor]] = given
        ) -> None:
            for kernel, inputs in zip(kernels, given, strict=True):
                kernel(*inputs)

        found[key] = bench.seconds(run)
        found[f"{key}_predicted"] = sum(one.seconds for one in fused)
    return found


def _filled(value: KernelValue, device: str) -> Tensor:
    """Random values; whole numbers are 0."""
    reach = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True))
    flat = torch.zeros(reach, dtype=DTYPES[value.dtype], device=device)
    if flat.is_floating_point():
        flat.normal_()
    return flat.as_strided(value.shape, value.strides)


def _name(search: Choices, members: Members) -> str:
    names = [search.nodes[i].op for i in sorted(members)]
    return " + ".join(dict.fromkeys(names))
