"""A state space (Mamba-2) on one GPU at granite-4.0-h-micro's sizes, beside what the model says.

    python -m benchmarks.state_space OUT [PART ...]

Parts: `errors` (of the result and of each gradient, relative to fp64) and `times` (milliseconds of
its kernels forward and backward, products and the rest apart, with the priced ones in brackets; the
host's milliseconds; the most memory, with the promised one). Prints the slowest kernels. Ten
seconds on an H200. Without a GPU: small shapes, to see that everything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts import CUDA, Asked, gpu, milliseconds
from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph import state_space as priced
from bigplan.graph.operators import Gemm, Operator
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime.generated import library_for
from bigplan.runtime.made_again import made_again
from bigplan.runtime.state_space import Norm, gated
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

PARTS = ("errors", "times")
WHERE = torch.device("cuda" if CUDA else "cpu")
LENGTH, SHORT = (4096, 1024) if CUDA else (128, 128)
MODEL = find_model("granite-4.0-h-micro").seen_by("state_space")
TRAINING = Training(sequence_length=LENGTH, global_batch=1, precision="bf16")
PRODUCTS = ("gemm", "nvjet", "cutlass")  # in names of kernels


def _inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Values that bf16 holds, in fp32 or fp64, too."""
    space = MODEL.state_space
    assert space is not None
    torch.manual_seed(0)
    channels = space.width, space.keys, space.keys
    read = [(1, length, n) for n in (space.width, *channels, space.heads)]
    filters = [(n, space.taps) for n in channels]
    steps = torch.full((space.heads,), -3.0)
    found = [torch.randn(size) for size in read]
    found += [torch.rand(space.heads).mul(15).add(1).log(), steps, torch.ones(space.heads)]
    found += [torch.ones(space.width), *(0.5 * torch.randn(size) for size in filters)]
    found += [0.1 * torch.randn(n) for n in channels]
    return [x.bfloat16().to(WHERE, dtype).requires_grad_() for x in found]


def _run(inputs: list[Tensor]) -> Tensor:
    space, narrow = MODEL.state_space, inputs[0].dtype == torch.bfloat16
    assert space is not None
    kernels = library_for(TRAINING, WHERE) if narrow else None
    norm = Norm(MODEL.norm_epsilon, kernels=kernels)
    return made_again(partial(gated, space, norm), *inputs)


def errors() -> dict[str, Any]:
    """Relative errors in bf16 and fp32: the result's, then those by each input."""
    every = []
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        inputs = _inputs(SHORT, dtype)
        output = _run(inputs)
        by = torch.arange(output.numel(), device=WHERE).remainder(7).sub(3).to(dtype)
        every.append([output, *torch.autograd.grad(output, inputs, by.view_as(output))])
    exact, *others = every
    found = {}
    for name, values in zip(("bf16", "fp32"), others, strict=True):
        pairs = zip(values, exact, strict=True)
        apart = [float(((x.double() - y).norm() / y.norm()).detach()) for x, y in pairs]
        print(f"  {name}: " + " ".join(f"{error:.1e}" for error in apart), flush=True)
        found[name] = apart
    return found


def _ms(operators: tuple[Operator, ...]) -> tuple[float, float]:
    """Priced: of products, and of all else."""
    device = Device(find_cluster("h200-1x").group.gpu, "bf16")
    products, others = 0.0, 0.0
    for operator in operators:
        if isinstance(operator, Gemm):
            products += 1e3 * operator_seconds(operator, device)
        else:
            others += 1e3 * operator_seconds(operator, device)
    return products, others


def _measured(work: Callable[[], object]) -> tuple[float, float]:
    """The same of kernels that ran; prints the slowest."""
    with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as found:
        work()
        if CUDA:
            torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    for one in kernels[:12]:
        print(f"    {one.self_device_time_total / 1e3:7.3f} ms {one.count:4} x {one.key[:100]}")
    products = sum(
        one.self_device_time_total / 1e3
        for one in kernels
        if any(word in one.key for word in PRODUCTS)
    )
    return products, sum(one.self_device_time_total / 1e3 for one in kernels) - products


def _most(work: Callable[[], object]) -> float:
    """GB beyond what is there."""
    if not CUDA:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def times() -> dict[str, Any]:
    """Forward and backward beside their prices."""
    shape = RankShape.on(find_cluster("h200-1x").group.gpu, MODEL, TRAINING, Strategy(dp=1))
    inputs = _inputs(LENGTH, torch.bfloat16)
    output = _run(inputs)
    by = output.detach().clone()
    back = partial(torch.autograd.grad, output, inputs, by, retain_graph=True)
    works: dict[str, Callable[[], object]] = {"forward": partial(_run, inputs), "backward": back}
    promised = priced.forward_bytes(shape) / 1e9, priced.backward_bytes(shape) / 1e9
    found = {}
    for (name, work), operators, held in zip(
        works.items(), priced.state_space(shape), promised, strict=True
    ):
        work()
        host, most = milliseconds(work), _most(work)
        measured, expected = _measured(work), _ms(operators)
        told = ", ".join(
            f"{of} {ms:.2f} ({by_model:.2f})"
            for of, ms, by_model in zip(("products", "others"), measured, expected, strict=True)
        )
        print(f"  {name}: {told}, host {host:.2f} ms; {most:.2f} GB ({held:.2f})", flush=True)
        found[name] = [*measured, *expected, host, most, held]
    return found


if __name__ == "__main__":
    asked = Asked.of(__doc__, "state_space", PARTS)
    print(f"torch {torch.__version__}, {gpu()}", flush=True)
    for part in asked.parts:
        print(part, flush=True)
        asked.keep(part, {"errors": errors, "times": times}[part]())
