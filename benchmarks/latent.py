"""Latent attention on one GPU at DeepSeek-V3's widths, beside what the cost model says.

    python -m benchmarks.latent OUT [PART ...]

Parts: `attention` (milliseconds of attention of 128 heads, keys of 192 columns and values of 128,
forward and backward at 4,096 and 16,384 tokens, by each of torch's kernels that takes them: as the
runtime chooses, and padded), `turning` (queries turned in place, and keys put together), `memory`
(what a backward of attention needs at its peak) and `steps` (`bigplan launch` of four blocks with a
dense MLP, a few steps, with the plan's promises beside). OUT gets cluster.yaml, latent.json, and
the run. Two minutes on an H200 by estimate. Without a GPU: small shapes, to see that everything
runs; its figures mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.experts import WHERE, steps
from benchmarks.parts import CUDA, Asked, gpu, milliseconds
from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph.build import graph_of_shape
from bigplan.graph.operators import Attention
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime.attention import latent, narrow_values
from bigplan.runtime.mixers import positions
from bigplan.spec.cluster import Cluster
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

LENGTHS = (4096, 16384) if CUDA else (64,)
PARTS = ("attention", "turning", "memory", "steps")
HEADS = 128 if CUDA else 4
WIDTHS = {"kv_rank": 512, "plain_dim": 128, "rope_dim": 64, "value_dim": 128}
MODEL = ModelSpec.model_validate(
    {
        "name": "v3-like-dense",
        "layers": 4,
        "hidden": 7168 if CUDA else 64,
        "ffn": 18432 if CUDA else 96,
        "heads": HEADS,
        "latent_attention": WIDTHS | {"query_rank": 1536},
        "vocab": 32000 if CUDA else 256,
        "max_sequence_length": 16384,
        "norm_epsilon": 1e-6,
        "source": "DeepSeek-V3's block with its dense MLP, made up for this measurement",
    }
)
Heads = tuple[Tensor, Tensor, Tensor]


def _heads(length: int) -> Heads:
    """Random queries, keys and values of one sequence."""
    keys, values = MODEL.head_dim, MODEL.value_width
    shapes = [(1, length, HEADS, columns) for columns in (keys, keys, values)]
    q, k, v = (torch.randn(shape, **WHERE).requires_grad_() for shape in shapes)
    return q, k, v


def _padded(heads: Heads) -> Tensor:
    """By FlashAttention-2, as where the same bits are wanted."""
    torch.use_deterministic_algorithms(True)
    try:
        return narrow_values.attention(*heads, MODEL.scale_of_scores)
    finally:
        torch.use_deterministic_algorithms(False)


def _sdpa(heads: Heads, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in heads)
        scale = MODEL.scale_of_scores
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(1, 2)


def _kernels(heads: Heads) -> dict[str, Callable[[], Tensor]]:
    found: dict[str, Callable[[], Tensor]] = {
        "chosen": partial(narrow_values.attention, *heads, MODEL.scale_of_scores),
        "padded": partial(_padded, heads),
    }
    if CUDA:
        found |= {
            "sdpa cudnn": partial(_sdpa, heads, SDPBackend.CUDNN_ATTENTION),
            "sdpa efficient": partial(_sdpa, heads, SDPBackend.EFFICIENT_ATTENTION),
        }
    return found


def _shape(length: int, cluster: Cluster, *, same_bits: bool = False) -> RankShape:
    training = Training(
        sequence_length=length, global_batch=1, precision="bf16", deterministic=same_bits
    )
    return RankShape.on(cluster.group.gpu, MODEL, training, Strategy(dp=1))


def _priced(shape: RankShape, cluster: Cluster, name: str) -> list[float]:
    """Milliseconds of a block's operators of this name, forward and backward."""
    block = graph_of_shape(shape, None).kinds["block"]
    device = Device(cluster.group.gpu, "bf16")
    return [
        1e3 * sum(operator_seconds(op, device) for op in operators if op.name == name)
        for operators in (block.forward, block.backward)
    ]


def attention(cluster: Cluster) -> dict[str, Any]:
    """Milliseconds forward and backward by each kernel, with those priced of the runtime's."""
    found: dict[str, Any] = {}
    for length in LENGTHS:
        heads = _heads(length)
        by_out = torch.randn_like(heads[2])
        same = narrow_values.takes_as_they_are([x.transpose(1, 2) for x in heads])
        print(f"  {length} tokens; heads are taken as they are: {same}", flush=True)
        for name, run in _kernels(heads).items():
            try:
                out = run()
                back = partial(torch.autograd.grad, out, heads, by_out, retain_graph=True)
                times = [milliseconds(run), milliseconds(back)]
            except RuntimeError as error:
                print(f"    {name:16} {str(error).splitlines()[0]}", flush=True)
                continue
            shape = _shape(length, cluster, same_bits=name == "padded")
            priced = _priced(shape, cluster, "attention")
            if name == "padded":
                copies = _priced(shape, cluster, "padded values")
                priced = [sum(each) for each in zip(priced, copies, strict=True)]
            flops = [op.flops for op in _cores(_shape(length, cluster))]
            rates = [f / t / 1e9 if t else 0.0 for f, t in zip(flops, times, strict=True)]
            found[f"{name} {length}"] = {"ms": times, "priced": priced, "useful tflops": rates}
            told = ", ".join(
                f"{t:8.3f} ({p:8.3f}) {r:4.0f} TFLOP/s"
                for t, p, r in zip(times, priced, rates, strict=True)
            )
            print(f"    {name:16}{told}", flush=True)
    return found


def _cores(shape: RankShape) -> list[Attention]:
    block = graph_of_shape(shape, None).kinds["block"]
    both = (*block.forward, *block.backward)
    return [op for op in both if isinstance(op, Attention)]


def turning(cluster: Cluster) -> dict[str, Any]:
    """Milliseconds of what turns queries and puts keys together, forward and backward.

    By the kernels, and by plain torch's. Of the longer sequence: kernels of the shorter one run
    faster than Python launches them.
    """
    length, widths = LENGTHS[-1], MODEL.latent_attention
    assert widths is not None
    cos, sin = positions.rope_table(MODEL, length, WHERE["device"], WHERE["dtype"])
    q, *_ = _heads(length)
    plain = torch.randn(1, length, HEADS, widths.plain_dim, **WHERE).requires_grad_()
    shared = torch.randn(1, length, widths.rope_dim, **WHERE).requires_grad_()
    by_q, scratch = torch.randn_like(q), q.detach().clone()
    found: dict[str, Any] = {}
    grad = partial(torch.autograd.grad, retain_graph=True)
    for name, by_kernel in {"": CUDA, " in plain torch": False}.items():
        angles = latent.Angles(cos, sin, interleaved=True, by_kernel=by_kernel)
        turned, keys = latent.turned(q * 1.0, angles), latent.keys(plain, shared, angles)
        by_keys = torch.randn_like(keys)
        found[f"queries{name}"] = [
            milliseconds(partial(latent.turned, scratch, angles)),
            milliseconds(partial(grad, turned, q, by_q)),
        ]
        found[f"keys{name}"] = [
            milliseconds(partial(latent.keys, plain.detach(), shared.detach(), angles)),
            milliseconds(partial(grad, keys, (plain, shared), by_keys)),
        ]
    shape = _shape(length, cluster)
    for name, operator in (("queries", "rotary embedding"), ("keys", "keys")):
        found[f"{name}, priced"] = _priced(shape, cluster, operator)
    print("  " + json.dumps(found), flush=True)
    return found


def memory(cluster: Cluster) -> dict[str, Any]:
    """GiB that attention's backward needs at its peak, and what is promised of a block's."""
    length = LENGTHS[-1]
    heads = _heads(length)
    by_out, found = torch.randn_like(heads[2]), {}
    for name in ("chosen", "padded"):
        out = _kernels(heads)[name]()
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(out, heads, by_out)
            torch.cuda.synchronize()
            found[f"{name}, peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        block = graph_of_shape(_shape(length, cluster, same_bits=name == "padded"), None)
        promised = block.kinds["block"].backward_workspace / 2**30
        found[f"{name}, promised of the block"] = promised
    print("  " + json.dumps(found), flush=True)
    return found


def main() -> None:
    """All parts, or those that are named; what was found before stays in the file."""
    asked, cudnn = Asked.of(__doc__, "latent", PARTS), torch.backends.cudnn.version()
    cluster = asked.cluster()
    print(f"torch {torch.__version__}, cuDNN {cudnn}, {gpu()}; ms (priced)", flush=True)
    works = {"attention": attention, "turning": turning, "memory": memory}
    for part in asked.parts:
        print(part, flush=True)
        one = steps(MODEL, asked.out) if part == "steps" else works[part](cluster)
        asked.keep(part, one, cudnn=cudnn)


if __name__ == "__main__":
    main()
