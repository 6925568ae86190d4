"""One seed, one loss curve, on any layout: every layout's losses beside those of one process.

    python -m benchmarks.layouts [--steps 100] [--only NAME ...] [--device cuda]

A tiny llama-style model in fp32 learns the bundled book, 8 sequences of 64 bytes a step at a rate
of 1e-3 with clipping, once in one process with all on its device, and once on every layout of
`courses`. Prints how far each layout's losses are from those of the one process, and ends with 1
where one is off by more than BOUND. AdamW and clipping hide a factor that all gradients share, so
norms of gradients are compared, too. A course may change its layout on the way: the next processes
go on from the checkpoint of those before. The last line is no layout: the one process with a rate
larger by 0.1%, to show what the bound sees.

Layouts sum gradients and norms in other orders, so every step adds roundings of fp32, some 1e-7 of
a gradient, and training carries them on: losses cannot be the same bits after the first update.
`spread` layouts keep parameters, gradients, activations and optimizer state on all three tiers, as
far as their ZeRO stage lets them leave the device; tiers change no bits.

On CPU devices ranks meet over gloo. With --device cuda each rank has a GPU of its own, over NCCL,
and courses with more ranks than GPUs are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing.spawn import spawn

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training
from tests.runtime.harness import take_gpu
from tests.runtime.plans import CHUNK, plan_of

BOUND = 1e-5  # relative, of any step's loss
NORM_BOUND = 1e-4  # of its gradients' norm, which moves more from step to step
STEPS = 100
TRAINING = Training(
    sequence_length=64,
    global_batch=8,
    precision="fp32",
    optimizer=Optimizer(learning_rate=1e-3),
    steps=STEPS,
)


def model_of(layers: int) -> ModelSpec:
    """What is trained, so many layers of it."""
    return find_model("tiny-llama-test").model_copy(update={"layers": layers})


class Layout(NamedTuple):
    """How a training is laid out over processes and tiers."""

    strategy: Strategy
    spread: bool = False
    layers: int = 4  # of the model: enough for the strategy


class Course(NamedTuple):
    """Layouts that train one after the other, for equal numbers of steps."""

    name: str
    legs: tuple[Layout, ...]

    @property
    def ranks(self) -> int:
        """The most that train at once."""
        return max(layout.strategy.ranks for layout in self.legs)

    @property
    def layers(self) -> int:
        """Of the model that they train."""
        (layers,) = {layout.layers for layout in self.legs}
        return layers


class Curve(NamedTuple):
    """What a training reports of every step."""

    losses: list[float]
    norms: list[float]
    """of gradients, before clipping"""


ONE = Layout(Strategy(dp=1, micro_batch=2))
LAYOUTS = {
    "one process, spread": Layout(ONE.strategy, spread=True),
    "dp2": Layout(Strategy(dp=2, micro_batch=2)),
    "dp2, spread": Layout(Strategy(dp=2, accumulation_group=2), spread=True),
    "z1": Layout(Strategy(dp=2, zero=1, micro_batch=2)),
    "z1, spread": Layout(Strategy(dp=2, zero=1, accumulation_group=2), spread=True),
    "z2": Layout(Strategy(dp=2, zero=2, micro_batch=2)),
    "z2, spread": Layout(Strategy(dp=2, zero=2, accumulation_group=2), spread=True),
    "z3": Layout(Strategy(dp=2, zero=3, micro_batch=2)),
    "z3, spread": Layout(Strategy(dp=2, zero=3, accumulation_group=2), spread=True),
    "z3 over 4": Layout(Strategy(dp=4, zero=3, micro_batch=2)),
    "z3 over 4, spread": Layout(Strategy(dp=4, zero=3, accumulation_group=2), spread=True),
    "pp2": Layout(Strategy(dp=1, pp=2, micro_batch=2)),
    "pp2, spread": Layout(Strategy(dp=1, pp=2, accumulation_group=2), spread=True),
    "pp2, interleaved": Layout(Strategy(dp=1, pp=2, vpp=2)),
    "pp2 x z1": Layout(Strategy(dp=2, pp=2, zero=1)),
    "pp2 x z3": Layout(Strategy(dp=2, pp=2, zero=3)),
    "pp4, uneven": Layout(Strategy(dp=1, pp=4, first_blocks=2, micro_batch=2), layers=5),
    "tp2": Layout(Strategy(dp=1, tp=2, micro_batch=2)),
    "tp2, spread": Layout(Strategy(dp=1, tp=2, accumulation_group=2), spread=True),
    "tp2, whole sequences": Layout(Strategy(dp=1, tp=2, micro_batch=2, sequence_parallel=False)),
    "tp4": Layout(Strategy(dp=1, tp=4, micro_batch=2)),
    "tp2 x z3": Layout(Strategy(dp=2, tp=2, zero=3, micro_batch=2)),
    "tp2 x z3, spread": Layout(Strategy(dp=2, tp=2, zero=3, accumulation_group=2), spread=True),
    "tp2 x pp2": Layout(Strategy(dp=1, tp=2, pp=2, micro_batch=2)),
    "tp2 x pp2, interleaved": Layout(Strategy(dp=1, tp=2, pp=2, vpp=2)),
    "tp2 x pp2 x dp2": Layout(Strategy(dp=2, tp=2, pp=2)),
    "tp2 x pp2 x z3": Layout(Strategy(dp=2, tp=2, pp=2, zero=3)),
}
CHANGES = (
    ("z3, spread", "dp2"),
    ("tp2, spread", "pp2, spread", "z3, spread", "one process, spread"),
    ("dp2, spread", "z3 over 4"),
    ("pp2, spread", "z3, spread", "pp2 x z3"),
    ("z3 over 4, spread", "one process, spread", "z1", "z2, spread"),
    ("tp2, spread", "z3, spread", "tp2 x pp2", "one process, spread"),
)


def courses() -> list[Course]:
    """Every layout from first to last, then those that change."""
    whole = [Course(name, (layout,)) for name, layout in LAYOUTS.items()]
    return whole + [Course(" > ".join(c), tuple(LAYOUTS[n] for n in c)) for c in CHANGES]


def over_tiers(layers: int) -> dict[Tier, int]:
    """So many layers in turn in host memory, on the drive and on the device."""
    order = (Tier.HOST, Tier.NVME, Tier.GPU)
    return {tier: len(range(first, layers, 3)) for first, tier in enumerate(order)}


def spread_kind(graph: Graph, name: str, layers: int) -> KindPlacement:
    """Layers of a kind with whatever may leave the device on all tiers."""
    kind, zero, here = graph.kinds[name], graph.strategy.zero, {Tier.GPU: layers}
    free = not kind.pinned and graph.strategy.vpp == 1
    # What ZeRO 1 and 2 gather at a step's end stays, and so do the sums that ZeRO 1 keeps whole.
    parameters = over_tiers(layers) if free and zero in (0, 3) else here
    gradients = over_tiers(layers) if free and zero != 1 else here
    activations: dict[Recompute, dict[Tier, int]] = {Recompute.NONE: here}
    if free and kind.stores_activations:
        activations = {Recompute.FULL: {Tier.HOST: 1}, Recompute.NONE: over_tiers(layers - 1)}
    gpu = 0.25 * min(parameters.get(Tier.GPU, 0), gradients.get(Tier.GPU, 0))
    host = 0.5 * layers
    in_memory = layers - max(parameters.get(Tier.NVME, 0), gradients.get(Tier.NVME, 0))
    return KindPlacement(
        layers=layers,
        parameters=parameters,
        gradients=gradients,
        activations=activations,
        optimizer={Tier.GPU: gpu, Tier.HOST: host, Tier.NVME: layers - host - gpu},
        streamed=0.5 * min(host, in_memory - gpu),
    )


def plan_for(layout: Layout, training: Training, device: str) -> Plan:
    """The layout's plan; chunks are small enough that a layer's state comes in several."""
    model = model_of(layout.layers)
    graph = build_graph(model, training, layout.strategy)
    stages = []
    for stage in range(layout.strategy.pp):
        names = [graph.layers[layer] for layer in graph.stage_layers(stage)]
        counts = {name: names.count(name) for name in names}
        kinds = {
            name: spread_kind(graph, name, n) if layout.spread else KindPlacement.on_gpu(n)
            for name, n in counts.items()
        }
        stages.append(StagePlacement(kinds=kinds))
    chunk = 100_000 if layout.spread else CHUNK
    placement = Placement(stages=tuple(stages), slots=2, chunk=chunk)
    return plan_of(model, training, layout.strategy, placement, device)


def run_rank(rank: int, folder: Path, leg: int, plan: Plan, until: int) -> None:
    """One process of a leg: its steps, a checkpoint after the last, and its curve as a file."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if plan.strategy.ranks > 1 and plan.cluster.group.gpu.device == "cuda":
        take_gpu(rank)
    checkpoints = folder / "checkpoints"
    with tempfile.TemporaryDirectory() as scratch:
        worker = NativeWorker(plan, rank, Path(scratch))
        began = time.time()
        try:
            worker.preflight()
            first = worker.start(folder / f"{leg}.meeting", checkpoints if leg else None)
            started = time.time()
            results = [worker.step() for _ in range(first, until)]
            trained = time.time()
            worker.save(checkpoints)
        finally:
            worker.close()
    if rank == 0:
        took = started - began, trained - started, time.time() - trained
        (folder / f"{leg}.seconds").write_text(json.dumps([began, *took]))
    found = Curve([one.loss for one in results], [one.gradient_norm or 0.0 for one in results])
    (folder / f"{leg}.{rank}.json").write_text(json.dumps(found))


def curve(course: Course, steps: int, device: str, training: Training = TRAINING) -> Curve:
    """The curve of a course, which all its ranks agree on."""
    found = Curve([], [])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for leg, layout in enumerate(course.legs):
            until = steps * (leg + 1) // len(course.legs)
            given = (folder, leg, plan_for(layout, training, device), until)
            spawned = time.time()
            spawn(run_rank, given, nprocs=layout.strategy.ranks)  # type: ignore[no-untyped-call]
            began, *took = json.loads((folder / f"{leg}.seconds").read_text())
            start, steps_took, end = (f"{seconds:.1f}" for seconds in took)
            print(
                f"  {layout.strategy.ranks} ranks: {began - spawned:.1f} s for processes, "
                f"{start} to start, {steps_took} for steps, {end} to end",
                file=sys.stderr,
                flush=True,
            )
            first, *others = (json.loads(path.read_text()) for path in folder.glob(f"{leg}.*.json"))
            assert all(other == first for other in others), "ranks report different curves"
            for mine, more in zip(found, first, strict=True):
                mine.extend(more)
    assert len(found.losses) == steps, (len(found.losses), steps)
    return found


def differences(ours: Sequence[float], base: Sequence[float]) -> list[float]:
    """Relative, of every step."""
    return [abs(mine - one) / abs(one) for mine, one in zip(ours, base, strict=True)]


def tell(name: str, ranks: int, found: Curve, base: Curve) -> bool:
    """One line of the table; whether the course kept within the bounds."""
    off, norms = (differences(*both) for both in zip(found, base, strict=True))
    worst = max(range(len(off)), key=off.__getitem__)
    within = off[worst] <= BOUND and max(norms) <= NORM_BOUND  # not so where one is no number
    print(
        f"{name:60s} {ranks:5d} {off[worst]:9.2e} {worst + 1:5d} {max(norms):9.2e} "
        f"{found.losses[-1]:10.7f}  {'' if within else 'PASSED THE BOUND'}".rstrip(),
        flush=True,
    )
    return within


def main() -> None:
    """Read the command line, train, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="*", default=[], help="courses by name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--curves", type=Path, help="a JSON file for every loss")
    args = parser.parse_args()
    most = torch.cuda.device_count() if args.device == "cuda" else sys.maxsize
    wanted = [c for c in courses() if c.ranks <= most and (not args.only or c.name in args.only)]
    print(f"python {platform.python_version()}, torch {torch.__version__}, {args.device}")
    print(f"{TRAINING.tokens_per_step} tokens a step")
    bounds = f"bounds {BOUND:g} and {NORM_BOUND:g}"
    print(f"{'layout':60s} ranks   largest  step     norms  last loss  ({bounds})")
    bases, found, within = dict[int, Curve](), dict[str, Curve](), list[bool]()
    for course in sorted(wanted, key=lambda course: course.layers):
        if course.layers not in bases:
            model = model_of(course.layers)
            name = f"one process, {course.layers} layers, {model.parameter_count:,} parameters"
            alone = Course(name, (ONE._replace(layers=course.layers),))
            bases[course.layers] = found[name] = curve(alone, args.steps, args.device)
            within.append(tell(name, 1, found[name], found[name]))
        found[course.name] = curve(course, args.steps, args.device)
        within.append(tell(course.name, course.ranks, found[course.name], bases[course.layers]))
    faster = TRAINING.optimizer.model_copy(update={"learning_rate": 1.001e-3})
    other = TRAINING.model_copy(update={"optimizer": faster})
    if ONE.layers in bases:
        control = curve(Course("", (ONE,)), args.steps, args.device, other)
        tell("no layout: a rate larger by 0.1%", 1, control, bases[ONE.layers])
    if args.curves:
        args.curves.write_text(json.dumps(found))
    print(f"{sum(within)} of {len(within)} within {BOUND:g}")
    sys.exit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
