"""A gated delta rule on one GPU: kernels beside plain torch, at Qwen3-Next's widths.

    python -m benchmarks.delta_rule OUT [PART ...]

Parts: `rule` (of one sequence of 8,192 tokens, forward and backward: milliseconds, GiB at the
peak, errors beside fp64; of `fla`'s rule as well where it is installed), `documents` (the same of
some that are kept apart), `olmo` (of OLMo Hybrid's widths and rates), `kernels` (microseconds of
each kernel of a forward and a backward) and `launches` (each kernel with other warps, stages,
columns and registers than it is launched with; two minutes). OUT gets delta_rule.json. Without a
GPU: a short sequence, to see that everything runs; its figures mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.parts import CUDA, Asked, gpu, milliseconds

if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

from triton.errors import TritonError

from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph import delta_rule as priced
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.kernels.handwritten import delta_rule as kernels
from bigplan.kernels.handwritten.delta_rule import LAUNCHES, How, Launch
from bigplan.runtime.mixers.delta_rule import InKernels, in_torch
from bigplan.spec.catalog import find_cluster
from bigplan.spec.mixers import GatedDeltaRule
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

QWEN3_NEXT = GatedDeltaRule(key_heads=16, value_heads=32)
OLMO_HYBRID = GatedDeltaRule(
    key_heads=30, value_heads=30, key_dim=96, value_dim=192, rate_scale=2.0
)
TINY = GatedDeltaRule(key_heads=1, value_heads=1, key_dim=16, value_dim=64)
RULE = QWEN3_NEXT if CUDA else TINY
LENGTH, DTYPE = (8192, torch.bfloat16) if CUDA else (70, torch.float32)
EPSILON = 1e-6
PARTS = ("rule", "documents", "olmo", "kernels")
WALKS = ("walked", "walked_back")
DOCUMENT = 700 if CUDA else 20  # tokens, but for the last


def _inputs(rule: GatedDeltaRule = RULE) -> list[Tensor]:
    """As a block's first product gives them; decays as Qwen3-Next's first values have them."""
    torch.manual_seed(0)
    size = (1, LENGTH)
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    heads = (keys, keys, values, values, rule.value_heads, rule.value_heads)
    shapes: list[tuple[int, ...]] = [(*size, n) for n in heads]
    made = [torch.randn(shape) for shape in shapes]
    made += [torch.randn(n, rule.taps) / 2 for n in (keys, keys, values)]
    made += [torch.rand(rule.value_heads).mul_(16).log_(), torch.ones(rule.value_heads)]
    made += [torch.ones(rule.value_dim)]
    return [x.to("cuda" if CUDA else "cpu", DTYPE) for x in made]


def _begins() -> Tensor:
    token = torch.arange(LENGTH, device="cuda" if CUDA else "cpu", dtype=torch.int32)
    return (token // DOCUMENT * DOCUMENT)[None]


Work = Callable[[list[Tensor]], Tensor]


def _ways(rule: GatedDeltaRule, begins: Tensor | None) -> dict[str, Work]:
    def in_kernels(inputs: list[Tensor]) -> Tensor:
        return InKernels.apply(rule, EPSILON, begins, *inputs)  # type: ignore[no-any-return, no-untyped-call]

    return {"kernels": in_kernels, "plain": lambda inputs: in_torch(rule, EPSILON, begins, *inputs)}


def _fla() -> Work | None:
    """The rule alone of flash-linear-attention, with its own norm of queries and keys, if any."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None

    def run(inputs: list[Tensor]) -> Tensor:
        q, k, v = (
            torch.unflatten(x, -1, (-1, width)).repeat_interleave(times, 2)
            for x, width, times in zip(
                inputs[:3], (RULE.key_dim, RULE.key_dim, RULE.value_dim), (2, 2, 1), strict=True
            )
        )
        fade = -inputs[9].float().exp() * torch.nn.functional.softplus(inputs[5].float())
        out, _ = chunk_gated_delta_rule(
            q, k, v, g=fade, beta=inputs[4].sigmoid(), use_qk_l2norm_in_kernel=True
        )
        return out.flatten(2)  # type: ignore[no-any-return]

    return run


def _priced(rule: GatedDeltaRule, kernels: str) -> list[float]:
    """Milliseconds that an H200's plan promises, forward and backward."""
    model = ModelSpec.model_validate(
        {
            "name": "rule",
            "layers": 1,
            "hidden": 2048,
            "ffn": 512,
            "heads": 16,
            "vocab": 256,
            "max_sequence_length": LENGTH,
            "delta_rule": rule,
            "source": "a rule alone, made up for this measurement",
        }
    )
    training = Training.model_validate(
        {"sequence_length": LENGTH, "global_batch": 1, "precision": "bf16", "kernels": kernels}
    )
    group = find_cluster("h200-1x").group
    shape = RankShape.on(group.gpu, model, training, Strategy(dp=1))
    device = Device(group.gpu, "bf16")
    passes = priced.delta_rule(shape)
    return [1e3 * sum(operator_seconds(one, device) for one in operators) for operators in passes]


def _peak(work: Callable[[], object]) -> float:
    """GiB that it takes beyond what there is."""
    if not CUDA:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = work()
    torch.cuda.synchronize()
    del made
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((x.double() - right).norm() / right.norm()) for x, right in pairs]


def rule(of: GatedDeltaRule = RULE, begins: Tensor | None = None) -> dict[str, Any]:
    """Kernels, plain torch, and fla's."""
    given, ways = _inputs(of), _ways(of, begins)
    gradient = torch.randn_like(given[3])
    leaves = [x.double().requires_grad_() for x in given]
    out = ways["plain"](leaves)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, gradient.double())]
    del out, leaves
    if of == RULE and begins is None and (other := _fla()):
        ways["fla, without convolution, norm and gate"] = other
    found: dict[str, Any] = {"priced": {name: _priced(of, name) for name in ("generated", "torch")}}
    print(f"  priced on an H200: {found['priced']}", flush=True)
    for name, run in ways.items():
        leaves = [x.clone().requires_grad_() for x in given]
        out = run(leaves)

        def back(out: Tensor = out, leaves: list[Tensor] = leaves) -> Any:
            return torch.autograd.grad(out, leaves, gradient, retain_graph=True, allow_unused=True)

        gradients = list(back())
        one: dict[str, Any] = {
            "ms": [milliseconds(lambda run=run, x=leaves: run(x)), milliseconds(back)],
            "GiB": [_peak(lambda run=run, x=leaves: run(x)), _peak(back)],
        }
        if "fla" not in name:
            one["errors"] = _errors([out.detach(), *gradients], exact)
        found[name] = one
        told = " ".join(f"{x:.1e}" for x in one.get("errors", ()))
        print(f"  {name}: ms {one['ms']}, GiB {one['GiB']}\n    errors {told}", flush=True)
    return found


def _microseconds(work: Callable[[], object], runs: int = 3) -> dict[str, float]:
    """The mean of each kernel's time in one run of it."""
    work()
    if not CUDA:
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / runs for event in profile.key_averages()}


def every_kernel() -> dict[str, Any]:
    """Of a forward, and of a backward, which runs most of the forward again."""
    given = _inputs()
    gradient, asked, how = torch.randn_like(given[3]), (True,) * len(given), How(RULE, EPSILON)
    found = {
        "forward": _microseconds(lambda: kernels.forward(how, *given)),
        "backward": _microseconds(lambda: kernels.backward(how, gradient, asked, *given)),
    }
    for name, times in found.items():
        told = ", ".join(f"{key[:40]} {us:.0f}" for key, us in times.items())
        print(f"  {name}, {sum(times.values()):.0f} us: {told}", flush=True)
    return found


def launches() -> dict[str, Any]:
    """Microseconds of each kernel, by how it is launched."""
    given = _inputs()
    gradient, asked, how = torch.randn_like(given[3]), (True,) * len(given), How(RULE, EPSILON)
    found: dict[str, Any] = {}
    for name, today in list(LAUNCHES.items()):
        columns, stages = (32, (3, 4)) if name in WALKS else (64, (1, 2))
        registers = ((4, None), (8, None), (4, 128), (4, 168), (8, 128))
        for stage, (warps, most) in product(stages, registers[: 2 if name in WALKS else None]):
            launch = Launch(warps, stage, columns, most)
            LAUNCHES[name] = launch
            try:
                times = _microseconds(
                    (lambda: kernels.forward(how, *given))
                    if name in ("walked", "read", "solved")
                    else lambda: kernels.backward(how, gradient, asked, *given),
                    runs=1,
                )
            except (
                RuntimeError,
                TritonError,
            ) as error:  # too much shared memory, or what Triton refuses
                print(f"  {name} {tuple(launch)}: {str(error)[:100]}", flush=True)
                continue
            us = times.get(name, 0.0)
            found[f"{name} {tuple(launch)}"] = us
            print(f"  {name} {tuple(launch)}: {us:.0f} us", flush=True)
        LAUNCHES[name] = today
    return found


def main() -> None:
    """All parts, or those that are named."""
    asked = Asked.of(__doc__, "delta_rule", PARTS)
    print(f"torch {torch.__version__}, {gpu()}", flush=True)
    works = {
        "rule": rule,
        "documents": lambda: rule(begins=_begins()),
        "olmo": lambda: rule(OLMO_HYBRID if CUDA else TINY),
        "kernels": every_kernel,
        "launches": launches,
    }
    for part in asked.parts:
        print(part, flush=True)
        asked.keep(part, works[part]())


if __name__ == "__main__":
    main()
