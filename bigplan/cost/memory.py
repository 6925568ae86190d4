"""Peak GPU memory of a step as a named framework runs it, part by part.

On stage s of p, with n micro-batches in flight at most (1F1B: min(M, p - s)):

    states       parameters, gradients and optimizer state, each over the ranks ZeRO splits it over
    activations  what the layers keep, n times, and chains of plain kernels beyond
    temporaries  one layer's activations while it is recomputed and its backward's temporaries, or
                 on the last stage the loss's
    buffers      buckets of collectives; under ZeRO-3 the layers that are gathered at once
    base         CUDA context and libraries, where the tool counts them

ZeRO-3's update on the GPU copies its gradients into one piece, and again in the master's precision
(DeepSpeed's stage3.py). If these copies are more than activations, temporaries and buffers, they
count in their place. So do gradients and temporaries of other updates (`update_tensors`), and what
a later micro-batch's backward ends with where sums over zero groups stay (`keeps_sums`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bigplan.cost.framework import Framework
from bigplan.cost.step import Execution, stage_counts
from bigplan.graph.graph import ElementSizes, Graph, LayerKind, Recompute
from bigplan.graph.operators import Gemm
from bigplan.spec.layers import BLOCKS

GIB = 1 << 30

# What a tool reports beyond tensors: nvidia-smi shows the CUDA context and NCCL's buffers, torch's
# counters do not. For nvidia-smi, base and fragments are the pair that meets the BLOOM and the 1.3B
# tables best, on a grid of 0.25 GiB and 2%. For reserved memory they are the constant term, to 0.25
# GiB, and the factor of published peaks in torch's counters (docs/cost-model.md).
BASE_BYTES = {"nvidia-smi": 2.25 * GIB, "reserved": 2.25 * GIB, "allocated": 0.0}
# Those tables are of many GPUs. One GPU has no NCCL: CUDA context and cuBLAS workspaces of one
# process, as in hardware/rtx-4090.yaml.
ALONE_BYTES = 700 * (1 << 20)


# nvidia-smi also counts what the caching allocator holds in fragments: blocks of other sizes than
# those asked for, 22% over tensors in Megatron-DeepSpeed's runs (docs/cost-model.md).
FRAGMENTS = {"nvidia-smi": 1.22, "reserved": 1.01, "allocated": 1.0}


def framework_memory(
    graph: Graph, run: Execution, framework: Framework, kind: str
) -> dict[str, float]:
    """Bytes by part as `kind` of tool reports them.

    nvidia-smi shows the GPUs of the node that it runs on; that node is taken as the first stage's.
    If a table prints the largest of all nodes, that stage is the fullest, the loss apart. torch's
    counters are printed as the maximum over ranks.
    """
    shown = range(1) if kind == "nvidia-smi" else range(graph.strategy.pp)
    stages = [stage_memory(graph, run, framework, stage) for stage in shown]
    fullest = max(stages, key=lambda parts: sum(parts.values()))
    tensors = {name: FRAGMENTS[kind] * nbytes for name, nbytes in fullest.items()}
    alone = kind == "nvidia-smi" and graph.strategy.ranks == 1
    return tensors | {"base": ALONE_BYTES if alone else BASE_BYTES[kind]}


def stage_memory(
    graph: Graph, run: Execution, framework: Framework, stage: int
) -> dict[str, float]:
    """Bytes of a stage's tensors by part, without the base."""
    strategy, sizes = graph.strategy, graph.sizes
    counts = stage_counts(graph, stage, weighed=framework.weighs_stages)
    block, zero, held = graph.kinds["block"], strategy.zero, partial(_held, graph, counts)
    loss = _loss(graph, framework) if "head" in counts else 0.0
    blocks = {name: number for name, number in counts.items() if name in BLOCKS}
    kept = _in_flight(graph, run, stage) * sum(
        number * _kept(graph.kinds[name], run, framework) for name, number in blocks.items()
    )
    # A CPU update takes gradients away as they are made.
    leaves = run.cpu_update and not framework.gradients_stay
    backward = {
        "gradients": 0.0 if leaves else held(2, trained=True) * sizes.gradient,
        "activations": 2.0 * block.boundary if run.boundaries_on_host else kept,
        "temporaries": max(
            *(_working_set(graph.kinds[name], run, framework) for name in blocks), loss
        ),
        # Parameters that are on the host are gathered layer by layer, be it on one GPU.
        "buffers": _buffers(graph, framework, counts, 3 if run.parameters_on_host else zero),
    }
    owned = held(1, trained=True)
    copies, summed = 0.0, backward["gradients"]
    if zero == 3 and not run.cpu_update:
        copies = min(framework.updated_elements, owned) * _copied_by_update(sizes)
    if framework.update_tensors and not run.cpu_update:
        copies, summed = owned * framework.update_tensors, 0.0
    update = {"gradients": summed, "activations": 0.0, "temporaries": copies, "buffers": 0.0}
    ended = dict(update)
    if framework.keeps_sums and strategy.zero_group and graph.micro_batches > 1:
        ended = backward | {
            "gradients": 2.0 * backward["gradients"],
            "activations": 0.0,
            "temporaries": _working_set(block, run, framework),
        }
    as_masters = framework.shards_masters and sizes.master and zero == 3 and strategy.pp == 1
    cast = 0.0 if run.parameters_on_host or as_masters else held(3) * sizes.parameter
    return {
        "parameters": cast,
        "optimizer": (1.0 - run.on_cpu * run.cpu_update)
        * owned
        * (sizes.stored - run.passing_bytes),
        **max(backward, update, ended, key=lambda parts: sum(parts.values())),
    }


def _held(
    graph: Graph, counts: Mapping[str, int], from_zero: int, *, trained: bool = False
) -> float:
    """Elements of a stage's layers on a rank, of what ZeRO splits from that stage on.

    `trained`: of these layers' trained elements; else of all, adapters among them.
    """
    strategy = graph.strategy
    elements = sum(n * graph.kinds[name].trained for name, n in counts.items())
    parameters = elements
    if not trained:
        parameters = sum(n * graph.kinds[name].parameters for name, n in counts.items())
        parameters += elements if graph.frozen else 0
    # Between the micro-batches of a pipeline, gathered parameters and whole gradients stay.
    if strategy.zero < from_zero or (strategy.pp > 1 and from_zero > 1):
        return parameters
    experts = sum(n * graph.kinds[name].whole_experts for name, n in counts.items())
    alike = strategy.expert_shards(folded=True)
    return (parameters - experts) / strategy.zero_ranks + experts / alike


def _in_flight(graph: Graph, run: Execution, stage: int) -> float:
    """Micro-batches that a stage keeps activations of at most."""
    strategy = graph.strategy
    number = float(min(graph.micro_batches, strategy.pp - stage))
    if run.virtual_stages > 1:  # interleaving holds (p - 1) / (p v) more (arXiv 2104.04473)
        number *= 1 + (strategy.pp - 1) / (strategy.pp * run.virtual_stages)
    return number


def _loss(graph: Graph, framework: Framework) -> float:
    """Bytes of the loss's temporaries.

    Compiled apart from the head's product, it reads the logits and writes their gradient, both in
    the compute dtype. Eager torch holds more (`_head` in graph/build.py).
    """
    head, element = graph.kinds["head"], graph.sizes.parameter
    product = next((op for op in head.backward if isinstance(op, Gemm)), None)
    if product is None or not framework.compiled_loss or framework.in_place:
        return float(head.backward_workspace)
    logits, gradient = product.m * product.n, product.n * product.k * element
    eager = max(logits * (element + 8) + gradient, 12 * logits)
    return float(head.backward_workspace - eager + 2 * element * logits + gradient)


def _buffers(graph: Graph, framework: Framework, counts: Mapping[str, int], zero: int) -> float:
    """Communication buckets, and under ZeRO-3 the layers that are gathered."""
    strategy, sizes = graph.strategy, graph.sizes
    parameters = sum(n * graph.kinds[name].parameters for name, n in counts.items())
    trained = sum(n * graph.kinds[name].trained for name, n in counts.items())
    buffers = 0.0
    if framework.bucket_copies and zero == 0 and strategy.dp > 1:
        buffers += trained * sizes.gradient
    if zero:
        buffers += min(framework.bucket_elements, trained) * sizes.gradient
    if zero == 3 and strategy.pp == 1:
        live = max(3 * graph.kinds["block"].parameters, framework.live_elements)
        ends = graph.kinds["embedding"].parameters + graph.kinds["head"].parameters
        buffers += (min(live, parameters) + ends) * sizes.parameter
    return buffers


def _copied_by_update(sizes: ElementSizes) -> int:
    """Bytes of a gradient's copies: flattened, and cast to the master's precision."""
    master = sizes.state // 3 if sizes.master else sizes.parameter  # beside two moments like it
    return sizes.gradient + (master if master != sizes.gradient else 0)


def _kept(block: LayerKind, run: Execution, framework: Framework) -> float:
    """Bytes of a block between forward and backward; what runs again keeps nothing of a chain."""
    share, whole = run.recomputed, _saved(block, framework)
    again = block.kept(run.recompute) if run.recompute in block.reruns else whole
    return share * again + (1 - share) * whole


def _saved(block: LayerKind, framework: Framework) -> int:
    """Bytes that autograd keeps of a block, with those of its chains of plain kernels."""
    return block.saved + sum(block.chained.get(step, 0) for step in framework.chains)


def _working_set(block: LayerKind, run: Execution, framework: Framework) -> float:
    again = _saved(block, framework) if run.recompute is Recompute.FULL else 0
    return float(again + block.backward_workspace)
