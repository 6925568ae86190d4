"""The seconds that the host's Python takes for layers, measured on narrow ones.

The runtime trains two models of a few layers, so narrow that the device always waits for the host:
their actions take as long as launching them takes. The GPT-2 style model consists of torch's own
operators. The llama-style model takes longer by what its fused kernels cost, which are launched
from Python.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from bigplan.cost.compute import launches
from bigplan.cost.host import is_kernel
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph
from bigplan.graph.operators import Collective, Operator
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower_stage
from bigplan.placement import KindPlacement, Placement, StagePlacement
from bigplan.profile.bench import Bench, source, threads
from bigplan.program import Op
from bigplan.runtime.context import Context, layer_rows
from bigplan.runtime.data import BatchSource, Prefetcher, data_path
from bigplan.runtime.execution.compute import Compute
from bigplan.runtime.execution.executor import Executor
from bigplan.runtime.execution.update import Update
from bigplan.runtime.memory.buffers import Memory
from bigplan.runtime.parallel.groups import Groups
from bigplan.runtime.weights.first_values import first_values
from bigplan.runtime.weights.homes import fill_first
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline
from bigplan.units import rounded

LAYERS, MICRO_BATCHES = 4, 4
LENGTH = 32  # tokens: at most 2 MFLOP an operator
_COMMON = {
    "layers": LAYERS,
    "hidden": 64,
    "heads": 2,
    "ffn": 128,
    "vocab": 256,
    "max_sequence_length": LENGTH,
    "source": "made for measuring",
}
LLAMA = ModelSpec.model_validate(_COMMON | {"name": "narrow-llama"})
GPT2 = ModelSpec.model_validate(
    _COMMON
    | {
        "name": "narrow-gpt2",
        "norm": "layernorm",
        "mlp": "gelu_tanh",
        "positions": "learned",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }
)
WARM = 2  # first steps, in which kernels are compiled and memory is allocated


def measure_narrow(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """Measure operator_overhead, action_overhead and, on CUDA, kernel_overhead.

    The launch_overhead that `group` already has is taken off first.
    """
    precision = bench.precisions(group.gpu)[0]
    training = Training.model_validate(
        {"sequence_length": LENGTH, "global_batch": MICRO_BATCHES, "precision": precision}
    )
    took, counted, between = {}, {}, []
    for model in (GPT2, LLAMA):
        graph = build_graph(model, training, Strategy(dp=1), fused=bench.cuda)
        with threads(1), _player(model, training, graph, bench.device) as step:
            timelines = _played(step, bench, seconds / 2)
        del step
        _forget(bench.device)
        between.append(statistics.median(map(_between, timelines)))
        block = graph.kinds["block"]
        counted[model] = _counted((*block.forward, *block.backward), fused=bench.cuda)
        passes = (_median_of(timelines, op) for op in (Op.FORWARD, Op.BACKWARD))
        took[model] = sum(passes) - counted[model].several * group.gpu.launch_overhead
    operator = max(0.0, took[GPT2]) / counted[GPT2].operators
    more = max(0.0, took[LLAMA] - counted[LLAMA].operators * operator)
    values = {
        "operator_overhead": rounded(operator),
        "action_overhead": rounded(statistics.mean(between)),
    }
    if bench.cuda:
        values["kernel_overhead"] = rounded(more / counted[LLAMA].kernels)
    how = source(f"{LAYERS} narrow layers, GPT-2 style and llama-style, trained by the runtime")
    gpu = group.gpu.replaced(values, dict.fromkeys(values, how))
    return group.model_copy(update={"gpu": gpu})


class _Counted(NamedTuple):
    """Operators of a layer, kernels that they launch beyond one each, and how many are fused."""

    operators: int
    several: int
    kernels: int


def _counted(operators: tuple[Operator, ...], *, fused: bool) -> _Counted:
    alone = [one for one in operators if not isinstance(one, Collective)]
    numbers = [launches(one, float(not fused)) for one in alone]
    several = sum(number - 1 for number in numbers if number > 1)
    return _Counted(len(alone), several, sum(map(is_kernel, alone)))


@contextmanager
def _player(
    model: ModelSpec, training: Training, graph: Graph, device: torch.device
) -> Iterator[Callable[[], Timeline]]:
    """A function that plays a step of the model, all of it on the device."""
    kinds = {name: KindPlacement.on_gpu(graph.layers.count(name)) for name in graph.kinds}
    placement = Placement(stages=(StagePlacement(kinds=kinds),))
    program = lower_stage(graph, placement, stage=0)
    source = BatchSource(data_path("bundled"), LENGTH, 1, 0, 1, 0, MICRO_BATCHES)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        memory = Memory(program, device, scratch / "narrow.bin")
        stack.callback(memory.close)
        alone = Groups.alone(graph.strategy)
        rows = layer_rows(model, graph, program, alone.at)
        context = Context(model, training, graph, program, memory, rows, alone)
        fill_first(context, first_values(model, training))
        batches, update = Prefetcher(source), Update(context)
        compute = Compute(context, batches)
        executor = Executor(context, compute, update)
        for part in (batches, update, executor):  # the executor stops first
            stack.callback(part.close)

        def step() -> Timeline:
            compute.losses.scale = update.begin(compute.step + 1)
            timeline = executor.play(program.step if compute.step else program.first)
            compute.losses.parts.clear()
            compute.step += 1
            return timeline

        yield step


def _forget(device: torch.device) -> None:
    """Free the runtime's parts, which refer to each other and which the executor froze on a GPU."""
    if device.type == "cuda":
        gc.unfreeze()
    gc.collect()


def _played(step: Callable[[], Timeline], bench: Bench, seconds: float) -> list[Timeline]:
    """Timelines of steps for about `seconds`, without the first WARM steps."""
    for _ in range(WARM):
        step()
    end, timelines = bench.clock() + seconds, [step()]
    while bench.clock() < end:
        timelines.append(step())
    return timelines


def _median_of(timelines: list[Timeline], op: Op) -> float:
    """Median seconds of the blocks' actions of kind `op`."""
    blocks = range(1, 1 + LAYERS)  # between embedding and loss
    events = chain.from_iterable(timeline.events for timeline in timelines)
    return statistics.median(e.seconds for e in events if e.op == op.value and e.layer in blocks)


def _between(timeline: Timeline) -> float:
    """Median seconds between successive actions of one pass, which share a lane."""
    passes = (Op.FORWARD.value, Op.BACKWARD.value)
    events = [event for event in timeline.events if event.op in passes]
    events.sort(key=lambda event: event.start)
    pairs = [pair for pair in pairwise(events) if pair[0].op == pair[1].op]
    return statistics.median(after.start - before.end for before, after in pairs)
