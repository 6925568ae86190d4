"""A native block and the loss on one GPU, kernel by kernel, beside the cost model's operators.

Usage: h200_block.py. Prints GPU time by kind of kernel (torch.profiler), then the prediction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from bigplan.cost.collective import tensor_group
from bigplan.cost.framework import NATIVE
from bigplan.cost.operators import operator_costs
from bigplan.cost.price import device_of
from bigplan.graph.build import build_graph
from bigplan.graph.strategy import Strategy
from bigplan.runtime import blocks
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

BATCH, LENGTH, CHUNK = 8, 4096, 1024


def kernels_of(work: Callable[[], object], repeats: int = 5) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches of one call by kernel name."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += event.device_time / 1e3 / repeats
            found[event.name][1] += 1
    return {name: (total, count // repeats) for name, (total, count) in found.items()}


def show(title: str, found: dict[str, tuple[float, int]]) -> None:
    """Kernels, longest first."""
    print(f"{title}: {sum(t for t, _ in found.values()):.2f} ms")
    for name, (total, count) in sorted(found.items(), key=lambda item: -item[1][0])[:28]:
        print(f"  {total:8.3f} ms {count:4d} x {name[:110]}")


def leaves(model: ModelSpec, kind: str) -> dict[str, torch.Tensor]:
    """A layer's parameters on the GPU."""
    made = {}
    for parameter in model.kinds()[kind]:
        first = blocks.initial_values(kind, 0, parameter, 0)
        made[parameter.name] = first.cuda().bfloat16().requires_grad_()
    return made


def main() -> None:
    """Profile the block and a chunk of the loss."""
    model = find_model("llama-like-3.3b")
    rope = blocks.rope_table(model, LENGTH, "cuda", torch.bfloat16)
    p, head = leaves(model, "block"), leaves(model, "head")
    x = torch.randn(BATCH, LENGTH, model.hidden, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    show("block forward", kernels_of(lambda: blocks.block(p, x, model, rope)))
    gradient = torch.randn_like(x)
    out = blocks.block(p, x, model, rope)
    inputs = [x, *p.values()]
    show(
        "block backward",
        kernels_of(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)),
    )
    piece = x.detach().flatten(0, 1)[None, :CHUNK].requires_grad_()
    targets = torch.randint(model.vocab, (1, CHUNK), device="cuda")

    def loss() -> object:
        found = blocks.head_loss(head, piece, targets, model)
        return torch.autograd.grad(found, [piece, *head.values()])

    show("loss of a chunk", kernels_of(loss))
    training = Training(sequence_length=LENGTH, global_batch=BATCH)
    strategy, nodes = Strategy(dp=1, micro_batch=BATCH), find_cluster("h200-1x").group
    graph = build_graph(model, training, strategy)
    device, group = device_of(nodes, training, NATIVE), tensor_group(strategy, nodes)
    for kind in ("block", "head"):
        for way in ("forward", "backward"):
            rows = list(operator_costs(getattr(graph.kinds[kind], way), device, group, NATIVE))
            print(f"predicted {kind} {way}: {1e3 * sum(row.seconds for row in rows):.2f} ms")
            for row in rows:
                print(f"  {1e3 * row.seconds:8.3f} ms {row.launches:4d} x {row.name}")


if __name__ == "__main__":
    main()
