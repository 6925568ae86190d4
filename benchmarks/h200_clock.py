"""What a GPU's clock does to a block: micro-batches of several sizes, alone and beside copies.

    python -m benchmarks.h200_clock [CLUSTER.yaml]

In training, forwards and backwards took 1 to 5% longer than predicted, at clocks of 1.45 to 1.57
GHz where products were profiled at 1.51. This runs llama-like-5.5b's block as h200_block.py does,
once the clock has settled, and prints what a forward and a backward take beside what the cost model
says with the cluster's rates, with the clock and power meanwhile. Without CUDA a tiny model runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.h200_block import Model, beside
from benchmarks.native_block import (
    CUDA,
    DEVICE,
    LENGTH,
    MODEL,
    Block,
    Layer,
    Passes,
    heat,
    run,
    seconds_of,
    wait,
    walls,
)
from bigplan.cost.framework import NATIVE
from bigplan.cost.price import device_of
from bigplan.graph.build import build_graph
from bigplan.graph.graph import LayerKind
from bigplan.graph.strategy import Strategy
from bigplan.profile.bench import Bench
from bigplan.profile.copies import copiers_of, copying
from bigplan.profile.sensors import watching
from bigplan.runtime.layers import kinds as layers
from bigplan.runtime.mixers import positions
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

# Of a micro-batch, LENGTH tokens each: up and down again, as a GPU gets warmer meanwhile.
SEQUENCES = (1, 4, 16, 4, 1) if CUDA else (1, 2, 1)
COPIED = (512 if CUDA else 4) << 20  # bytes, again and again, each way


@contextmanager
def copies(wanted: bool) -> Iterator[None]:
    """Copies between page-locked memory and the GPU, both ways; their rate at the end."""
    if not wanted:
        yield
        return
    bench = Bench((DEVICE,), 1, 1)
    with copiers_of(bench, COPIED) as copiers:
        with copying(copiers, time.perf_counter) as reached:
            yield
        print(f"    {reached.total / 1e9:.1f} GB/s copied meanwhile")


def passes_of(spec: ModelSpec, sequences: int) -> Passes:
    """Forward and backward of a block that keeps its activations."""
    x = torch.randn(sequences, LENGTH, spec.hidden, device=DEVICE).bfloat16()
    rope = positions.position_tables(spec, LENGTH, DEVICE, torch.bfloat16)
    native = layers.Block(spec, rope, in_product=True)
    block = Block(native, Layer(spec, "block"), x, torch.randn_like(x))
    return {"forward": block.forward, "backward": block.backward}


def predicted(spec: ModelSpec, nodes: NodeGroup, sequences: int) -> dict[str, float]:
    """Milliseconds of each pass by the cost model."""
    training = Training(sequence_length=LENGTH, global_batch=sequences)
    strategy = Strategy(dp=1, micro_batch=sequences)
    kind: LayerKind = build_graph(spec, training, strategy, fused=True).kinds["block"]
    model = Model(device_of(nodes, training, NATIVE), nodes, strategy)
    passes = {"forward": kind.forward, "backward": kind.backward}
    return {
        name: sum(milliseconds for _, _, milliseconds, _ in model.rows(operators))
        for name, operators in passes.items()
    }


def main() -> None:
    """Every size, alone and beside copies."""
    spec = find_model(MODEL)
    nodes = find_cluster(sys.argv[1] if len(sys.argv) > 1 else "h200-1x").group
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{name}, torch {torch.__version__}, {spec.name}, sequences of {LENGTH} tokens")
    for sequences in SEQUENCES:
        passes, told = passes_of(spec, sequences), predicted(spec, nodes, sequences)
        run(passes, 2)  # kernels are compiled
        wait()
        if CUDA:
            heat(nodes)
        once = seconds_of(passes)
        for with_copies in (False, True):
            print(f"{sequences} sequences{', copies both ways' if with_copies else ''}")
            with copies(with_copies), watching(DEVICE, 0.1) as watch:
                took = walls(passes, once)
            print(f"    {watch}" if watch.readings else "    clock not known")
            for which, milliseconds in took.items():
                print(f"    {which:9s} {beside(milliseconds, told[which])}", flush=True)


if __name__ == "__main__":
    main()
