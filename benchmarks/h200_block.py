"""A native block and its loss on one GPU under sustained load, operator by operator, beside the
cost model.

    python -m benchmarks.h200_block [CLUSTER.yaml] [--loss-chunk TOKENS]

Runs llama-like-5.5b's block, and its loss in chunks, as the runtime does (runtime/layers/kinds.py:
saved tensors packed, weights' gradients added to fp32 sums in the products), again and again, once
the GPU's clock has settled. Prints what each pass takes with and without the gaps between its
kernels; then torch.profiler's kernels by class of operator and one by one, beside what the cost
model says with the cluster's rates (default: h200-1x). Without CUDA a tiny model runs, to try the
script: then milliseconds are the CPU's.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from benchmarks.native_block import (
    BATCH,
    CUDA,
    DEVICE,
    LENGTH,
    MODEL,
    WARM,
    Block,
    Head,
    Layer,
    Passes,
    heat,
    run,
    seconds_of,
    wait,
    walls,
)
from bigplan.cost.collective import LayerGroups
from bigplan.cost.compute import Device, gemm_seconds
from bigplan.cost.framework import NATIVE
from bigplan.cost.operators import operator_costs
from bigplan.cost.price import device_of
from bigplan.graph.build import build_graph
from bigplan.graph.graph import LOSS_CHUNK_TOKENS, LayerKind
from bigplan.graph.operators import Attention, Gemm, Operator
from bigplan.graph.strategy import Strategy
from bigplan.profile.sensors import watching
from bigplan.runtime.layers import kinds as layers
from bigplan.runtime.mixers import positions
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.training import Training

PROFILED = 0.4 if CUDA else 0.02  # seconds of rounds that the profiler sees
SHOWN = 24  # rows of the list of operators

# What an operator of torch belongs to, by words in its name or in that of one that it is part of;
# the first that fits.
CLASSES = {
    "norm": ("_RmsNorm",),
    "rotary": ("_Rotary",),
    "activation": ("_SwiGlu",),
    "loss": ("_CrossEntropy", "cross_entropy", "log_softmax", "nll_loss"),
    "attention": ("attention",),
    "products": ("aten::mm", "aten::addmm"),
    "additions": ("aten::add",),
}
OTHER = "copies, other"
# The cost model's operators by words in their names. Sums of gradients are added in the products.
PREDICTED = {
    "norm": "norm", "rotary": "rotary", "activation": "activation", "residual": "additions",
    "gradient sum": "products", "loss": "loss",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """One operator of torch: milliseconds of its kernels, or of the CPU's own work, in a pass."""

    name: str
    shapes: str
    kind: str
    milliseconds: float
    kernels: tuple[tuple[str, float], ...]  # names and milliseconds


def recorded(passes: Passes, once: float) -> dict[str, list[list[Ran]]]:
    """What torch.profiler sees of each pass, one list a round.

    The GPU waits while the profiler starts: rounds that it doesn't record bring the clock back, and
    the first that it does is left out.
    """
    rounds = 1 + max(2, round(PROFILED / once))
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=1),
    ) as profiler:
        run(passes, round(WARM / once))
        wait()
        profiler.step()
        run(passes, rounds, lambda name, number: record_function(f"{name} #{number}"))
        wait()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    if CUDA:
        say_what_is_missing(events)
    on_host = [event for event in events if event.device_type.name == "CPU"]
    spans = {f"{name} #{number}": name for name in passes for number in range(1, rounds)}
    found: dict[str, list[list[Ran]]] = defaultdict(list)
    end = 0.0
    for event in on_host:  # autograd's thread works while the pass waits for it
        if event.name in spans:
            inside: list[Ran] = []
            found[spans[event.name]].append(inside)
            end = event.time_range.end
        elif event.time_range.start < end and (ran := ran_of(event)) is not None:
            inside.append(ran)
    return found


def ran_of(event: Any) -> Ran | None:
    """An operator by itself, without those that it calls; None where it ran nothing."""
    if CUDA:
        microseconds = sum(kernel.duration for kernel in event.kernels)
    else:
        microseconds = event.self_cpu_time_total
    if not microseconds:
        return None
    shapes = " ".join(str(list(shape)) for shape in event.input_shapes or () if shape)
    kernels = tuple((kernel.name, kernel.duration / 1e3) for kernel in event.kernels)
    return Ran(event.name, shapes, class_of(event), microseconds / 1e3, kernels)


def class_of(event: Any) -> str:
    """One of CLASSES, or OTHER."""
    names = []
    while event is not None:
        # The engine adds up gradients in the name of the function whose gradients they are.
        if not event.name.startswith("autograd::engine"):
            names.append(event.name)
        event = event.cpu_parent
    for kind, words in CLASSES.items():
        if any(word in name for name in names for word in words):
            return kind
    return OTHER


def say_what_is_missing(events: Iterable[Any]) -> None:
    """Kernels that the profiler could not give to an operator would be in no row."""
    seen = given = 0.0
    for event in events:
        if " #" in event.name or event.name.startswith("ProfilerStep"):
            continue  # annotations, which the profiler shows on the GPU as well
        if event.device_type.name == "CPU":
            given += sum(kernel.duration for kernel in event.kernels)
        else:
            seen += event.time_range.elapsed_us()
    if not 0.999 < given / max(seen, 1e-9) < 1.001:
        print(f"note: of the kernels' {seen / 1e3:.1f} ms operators have {given / 1e3:.1f}")


def predicted_class(operator: Operator) -> str:
    """The class that the cost model's operator belongs to."""
    if isinstance(operator, Gemm | Attention):
        return "products" if isinstance(operator, Gemm) else "attention"
    return next((kind for word, kind in PREDICTED.items() if word in operator.name), OTHER)


@dataclass(frozen=True, slots=True)
class Model:
    """The cost model's word on a pass."""

    device: Device
    nodes: NodeGroup
    strategy: Strategy

    def rows(self, operators: Sequence[Operator]) -> Iterator[tuple[str, str, float, int]]:
        """Class, name, milliseconds and launches of each operator."""
        groups = LayerGroups.of(self.strategy, self.nodes)
        costs = operator_costs(operators, self.device, groups, NATIVE)
        for operator, cost in zip(operators, costs, strict=True):
            yield predicted_class(operator), cost.name, 1e3 * cost.seconds, cost.launches


def beside(measured: float, predicted: float) -> str:
    """Both, and by how much more was measured."""
    more = f"{measured / predicted - 1:+7.1%}" if predicted else "      -"
    return f"{measured:9.3f} ms  predicted {predicted:9.3f} ms {more}"


def report(
    name: str, rounds: Sequence[Sequence[Ran]], wall: float, model: Model, kind: Sequence[Operator]
) -> None:
    """A pass: as a whole, by class, and operator by operator."""
    operators = list(model.rows(kind))
    whole = sum(row[2] for row in operators)
    total = sum(ran.milliseconds for ran in all_of(rounds)) / len(rounds)
    print(f"\n== {name}, {len(rounds)} rounds")
    print(f"with gaps              {beside(wall, whole)}")
    print(f"kernels                {beside(total, whole)}")
    for group in (*CLASSES, OTHER):
        mine = [ran for ran in all_of(rounds) if ran.kind == group]
        theirs = [row for row in operators if row[0] == group]
        if mine or theirs:
            took = sum(ran.milliseconds for ran in mine) / len(rounds)
            launched = sum(max(1, len(ran.kernels)) for ran in mine) / len(rounds)
            told = ", ".join(f"{row[1]} {row[2]:.3f} ({row[3]} x)" for row in theirs)
            price = sum(row[2] for row in theirs)
            print(f"  {group:14s} {launched:4.0f} x {beside(took, price)}  {told}")
    print_operators(rounds, model.device)


def print_operators(rounds: Sequence[Sequence[Ran]], device: Device) -> None:
    """Operators of one name and shape, longest first; products beside the model's of that shape."""
    found: dict[tuple[str, str, str], list[Ran]] = defaultdict(list)
    for ran in all_of(rounds):
        found[ran.kind, ran.name, ran.shapes].append(ran)
    longest = sorted(found.items(), key=lambda item: -sum(r.milliseconds for r in item[1]))
    print("        ms   calls  operator, shapes, kernels")
    for (kind, name, shapes), some in longest[:SHOWN]:
        took, calls = sum(r.milliseconds for r in some) / len(rounds), len(some) / len(rounds)
        print(f"  {took:8.3f} {calls:5.0f} x {name} {shapes} [{kind}]")
        if kind == "products" and (gemm := gemm_of(shapes)):
            rate = gemm.flops * calls / took / 1e9
            price = beside(took, 1e3 * gemm_seconds(gemm, device) * calls)
            print(f"{'':19s}{price}, {rate:.0f} TFLOP/s")
        for kernel, count, milliseconds in by_kernel(some):
            per_round = f"{milliseconds / len(rounds):9.3f} ms {count / len(rounds):4.0f} x"
            print(f"{'':19s}{per_round} {kernel[:100]}")


def all_of(rounds: Sequence[Sequence[Ran]]) -> list[Ran]:
    """Of all rounds."""
    return [ran for one in rounds for ran in one]


def by_kernel(some: Sequence[Ran]) -> list[tuple[str, int, float]]:
    """Kernels, how often they ran and their milliseconds, longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for ran in some:
        for kernel, milliseconds in ran.kernels:
            found[kernel].append(milliseconds)
    rows = [(kernel, len(times), sum(times)) for kernel, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def gemm_of(shapes: str) -> Gemm | None:
    """The product of an operator whose last two shapes of two dimensions are [m, k] and [k, n]."""
    parts = [part.strip("[ ").split(", ") for part in shapes.split("]") if part.strip()]
    matrices = [[int(size) for size in part] for part in parts if len(part) == 2]
    for (m, k), (inner, n) in zip(matrices[-2::-1], matrices[:0:-1], strict=True):
        if k == inner:
            return Gemm("product", m, n, k)
    return None


def measured(passes: Passes, kind: LayerKind, model: Model) -> None:
    """Run and print passes, named 'forward' and 'backward'."""
    once = seconds_of(passes)
    with watching(DEVICE, 0.1) as watch:
        took = walls(passes, once)
    print(f"\n{kind.name}: {watch}" if watch.readings else f"\n{kind.name}")
    for name, rounds in recorded(passes, once).items():
        operators = kind.forward if name == "forward" else kind.backward
        report(f"{kind.name} {name}", rounds, took[name], model, operators)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cluster", nargs="?", default="h200-1x")
    parser.add_argument("--loss-chunk", type=int, default=LOSS_CHUNK_TOKENS)
    return parser.parse_args()


def main() -> None:
    """The block's passes, then the loss."""
    given = arguments()
    spec, nodes = find_model(MODEL), find_cluster(given.cluster).group
    training = Training(sequence_length=LENGTH, global_batch=BATCH)
    strategy = Strategy(dp=1, micro_batch=BATCH)
    graph = build_graph(spec, training, strategy, given.loss_chunk, fused=True)
    model = Model(device_of(nodes, training, NATIVE), nodes, strategy)
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{name}, torch {torch.__version__}, {spec.name}, {BATCH} x {LENGTH} tokens")
    x = torch.randn(BATCH, LENGTH, spec.hidden, device=DEVICE).bfloat16()
    rope = positions.position_tables(spec, LENGTH, DEVICE, torch.bfloat16)
    native = layers.Block(spec, rope, in_product=True)
    block = Block(native, Layer(spec, "block"), x, torch.randn_like(x))
    targets = torch.randint(spec.vocab, (BATCH * LENGTH,), device=DEVICE)
    head = Head(spec, Layer(spec, "head"), x.flatten(0, 1), targets, graph.loss_chunk)
    of_block = {"forward": block.forward, "backward": block.backward}
    of_head = {"backward": head.backward}
    for passes in (of_block, of_head):
        run(passes, 2)  # before the GPU is heated: while kernels are compiled it waits
    wait()
    if CUDA:
        heat(nodes)
    measured(of_block, graph.kinds["block"], model)
    print(f"\nthe loss takes {graph.loss_chunk} tokens at a time")
    measured(of_head, graph.kinds["head"], model)


if __name__ == "__main__":
    main()
