"""A state space (Mamba-2) on one GPU at granite-4.0-h-micro's sizes, by kernels and plain torch.

    python -m benchmarks.state_space OUT [PART ...]

Parts: `errors` (of the result and of each gradient, relative to fp64), `times` (of one sequence of
8,192 tokens, forward and backward: milliseconds of GPU kernels and of the host's clock, with the
priced ones in brackets; the most memory, with the promised one; the slowest kernels) and `launches`
(each kernel with other warps, stages and parts of a state than it is launched with; two minutes,
not run unless named). Without a GPU: small shapes by plain torch, to see that everything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts import CUDA, Asked, gpu, milliseconds
from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph import state_space as priced
from bigplan.graph.operators import Operator
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime.generated import library_for
from bigplan.runtime.mixers.made_again import made_again
from bigplan.runtime.mixers.state_space import Norm, gated
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training

PARTS = ("errors", "times")
WHERE = torch.device("cuda" if CUDA else "cpu")
LENGTH, SHORT = (8192, 1024) if CUDA else (128, 128)
MODEL = find_model("granite-4.0-h-micro").seen_by("state_space")
WAYS = {
    way: Training(sequence_length=LENGTH, global_batch=1, precision="bf16", kernels=way)
    for way in (("generated", "torch") if CUDA else ("torch",))
}
WALKS = ("walked", "walked_back")


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


def _run(inputs: list[Tensor], training: Training) -> Tensor:
    space = MODEL.state_space
    assert space is not None
    norm = Norm(MODEL.norm_epsilon, kernels=library_for(training, WHERE))
    return made_again(partial(gated, space, norm), *inputs)


def _with_gradients(dtype: torch.dtype, training: Training) -> list[Tensor]:
    inputs = _inputs(SHORT, dtype)
    output = _run(inputs, training)
    by = torch.arange(output.numel(), device=WHERE).remainder(7).sub(3).to(dtype)
    return [output, *torch.autograd.grad(output, inputs, by.view_as(output))]


def errors() -> dict[str, Any]:
    """Relative errors in bf16, of the result, then of the gradient by each input."""
    exact = _with_gradients(torch.float64, WAYS["torch"])
    found = {}
    for way, training in WAYS.items():
        pairs = zip(_with_gradients(torch.bfloat16, training), exact, strict=True)
        apart = [float(((x.double() - y).norm() / y.norm()).detach()) for x, y in pairs]
        print(f"  {way}: " + " ".join(f"{error:.1e}" for error in apart), flush=True)
        found[way] = apart
    return found


def _priced(operators: tuple[Operator, ...]) -> float:
    """Milliseconds."""
    device = Device(find_cluster("h200-1x").group.gpu, "bf16")
    return 1e3 * sum(operator_seconds(operator, device) for operator in operators)


def _kernels(work: Callable[[], object], runs: int = 3) -> dict[str, float]:
    """The mean of each kernel's milliseconds in one run of it, the slowest first."""
    work()
    if not CUDA:
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    every = {one.key: one.self_device_time_total / runs / 1e3 for one in found.key_averages()}
    return dict(sorted(every.items(), key=lambda one: -one[1]))


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
    """Forward and backward of each way beside their prices."""
    found = {}
    for way, training in WAYS.items():
        shape = RankShape.on(find_cluster("h200-1x").group.gpu, MODEL, training, Strategy(dp=1))
        inputs = _inputs(LENGTH, torch.bfloat16)
        output = _run(inputs, training)
        by = output.detach().clone()
        back = partial(torch.autograd.grad, output, inputs, by, retain_graph=True)
        promised = priced.forward_bytes(shape) / 1e9, priced.backward_bytes(shape) / 1e9
        for name, work, operators, held in zip(
            (f"{way} forward", f"{way} backward"),
            (partial(_run, inputs, training), back),
            priced.state_space(shape),
            promised,
            strict=True,
        ):
            host, most, kernels = milliseconds(work), _most(work), _kernels(work)
            ms, expected = sum(kernels.values()), _priced(operators)
            print(
                f"  {name}: {ms:.2f} ms ({expected:.2f}), host {host:.2f} ms;"
                f" {most:.2f} GB ({held:.2f})",
                flush=True,
            )
            for key, one in list(kernels.items())[:16]:
                print(f"    {1e3 * one:6.0f} us {key[:90]}", flush=True)
            found[name] = {"ms": [ms, expected], "host": host, "GB": [most, held]}
    return found


def launches() -> dict[str, Any]:
    """Microseconds of each kernel, by how it is launched."""
    from triton.errors import TritonError

    from bigplan.kernels.handwritten.state_space import LAUNCHES, Launch

    found: dict[str, Any] = {}
    inputs, training = _inputs(LENGTH, torch.bfloat16), WAYS["generated"]

    def work() -> None:
        output = _run(inputs, training)
        torch.autograd.grad(output, inputs, output.detach())

    for name, today in list(LAUNCHES.items()):
        parts = ((64, 64), (32, 64), (64, 32), (128, 64)) if name in WALKS else ((64, 64),)
        for how in (Launch(*one) for one in product((4, 8), (1, 2, 3, 4), parts)):
            LAUNCHES[name] = how
            try:
                us = 1e3 * _kernels(work, runs=1).get(name, 0.0)
            except (RuntimeError, TritonError) as error:  # such as too much shared memory
                print(f"  {name} {tuple(how)}: {str(error)[:100]}", flush=True)
                continue
            found[f"{name} {tuple(how)}"] = us
            print(f"  {name} {tuple(how)}: {us:.0f} us", flush=True)
        LAUNCHES[name] = today
    return found


if __name__ == "__main__":
    asked = Asked.of(__doc__, "state_space", PARTS)
    print(f"torch {torch.__version__}, {gpu()}", flush=True)
    for part in asked.parts:
        print(part, flush=True)
        asked.keep(part, {"errors": errors, "times": times, "launches": launches}[part]())
