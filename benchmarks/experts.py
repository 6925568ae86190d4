"""Experts of a block on one GPU: products, routes and steps, beside what the cost model says.

    python -m benchmarks.experts OUT [PART ...]

Parts: `operators` (milliseconds of each operator of one block's experts, forward and backward, at
the shapes of Mixtral 8x7B and of Qwen3 30B-A3B), `memory` (what a backward of them needs at its
peak), `steps` (`bigplan launch` of two models of these shapes that fit the GPU, a few steps each,
with the plan's promises beside) and `beside` (the same of a model like GLM-4.5-Air, of 5.2 B
parameters: a block without experts, then two with 128 and a shared one), and `gpt-oss` (operators,
memory and steps of four blocks like GPT-OSS-20B's, of 3.4 B parameters, with sinks, biases and
every other block a window of 128). OUT gets cluster.yaml, experts.json, and the runs. About four
minutes on an H100 by estimate, `beside` two on an H200. Without a GPU: small shapes, to see that
everything runs; its figures mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parts import CUDA, Asked, beside_promises, bigplan, gpu, milliseconds, newest
from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph.build import graph_of_shape
from bigplan.graph.experts import inner_bytes
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime import generated
from bigplan.runtime.add_product import add_product
from bigplan.runtime.experts import biases as expert_biases
from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts import mlp as expert_mlp
from bigplan.runtime.experts.mixture import EXPERTS, Mixture
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.parallel.tensor_parallel import ONE
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

WHERE: Any = {"device": "cuda" if CUDA else "cpu", "dtype": torch.bfloat16}
TOKENS = 8192 if CUDA else 64  # of a micro-batch
STEPS = 8 if CUDA else 2
COMMON = {"max_sequence_length": 4096, "vocab": 32000, "source": "made up for this measurement"}
WIDE = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "experts": 8}
NARROW = {"hidden": 2048, "ffn": 768, "heads": 32, "kv_heads": 4, "head_dim": 128, "qk_norm": True}
SMALL = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab": 256}


def _model(name: str, **fields: Any) -> ModelSpec:
    small = {} if CUDA else SMALL | {"head_dim": 16, "experts": min(8, fields["experts"])}
    small |= {key: 96 for key in ("shared_ffn", "dense_ffn") if key in fields and not CUDA}
    return ModelSpec.model_validate({"name": name} | COMMON | fields | small)


SHAPES = (
    _model("mixtral", layers=1, experts_per_token=2, **WIDE),
    _model("qwen3-a3b", layers=1, experts=128, experts_per_token=8, **NARROW),
)
# 3.2 B and 2.2 B parameters, of which a token passes 1.1 B and 0.8 B: 18 bytes each fit 80 GB.
MODELS = (
    _model("mixtral-like-3b", layers=2, experts_per_token=2, router_loss=0.001, **WIDE),
    _model(
        "qwen3-like-2b", layers=12, experts=32, experts_per_token=8, router_loss=0.001, **NARROW
    ),
)
BESIDE = (
    _model(
        "glm-like-5b",
        layers=3,
        hidden=4096,
        ffn=1408,
        experts=128,
        experts_per_token=8,
        routing={"scores": "sigmoid", "bias": True},
        shared_ffn=1408,
        dense_blocks=1,
        dense_ffn=10944,
        heads=96,
        kv_heads=8,
        head_dim=128,
        qkv_bias=True,
        rotary_fraction=0.5,
    ),
)
GPT_OSS = (
    _model(
        "gpt-oss-like-3b",
        layers=4,
        hidden=2880,
        ffn=2880,
        experts=32,
        experts_per_token=4,
        routing={"score_bias": True},
        mlp="clamped_swiglu",
        mlp_bias=True,
        heads=64,
        kv_heads=8,
        head_dim=64,
        qkv_bias=True,
        attention_output_bias=True,
        attention_sinks=True,
        sliding_window=128,
        attention_pattern=["1 local", "1 global"],
    ),
)
PARTS = {
    "operators": SHAPES,
    "memory": SHAPES,
    "steps": MODELS,
    "beside": BESIDE,
    "gpt-oss": GPT_OSS,
}


def _make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device=WHERE["device"]) * 0.1).to(dtype)


def _rows() -> experts.RowOperators:
    """What passes over rows in a run: generated kernels where there is a GPU."""
    training = Training(sequence_length=TOKENS, global_batch=1, precision="bf16")
    return generated.rows_of(generated.library_for(training, torch.device(WHERE["device"])))


def _works(model: ModelSpec) -> Mapping[str, Mapping[str, Callable[[], object]]]:
    """The operators of a block's experts, as the graph calls them, forward and backward."""
    count, each = model.experts, model.experts_per_token
    x, router = _make(TOKENS, model.hidden), _make(count, model.hidden)
    scores = x @ router.T
    weights, places = experts.route(scores, each, normalised=True)
    by = _rows()
    activation = by.activation(model.mlp, model.routed_by.weighs)
    rows, ends = by.sent(x, places), places.ends(count)
    up = _make(model.ffn * count, model.hidden)
    total = torch.zeros(up.shape, device=up.device)
    entering, leaving = experts.entering(up, count), experts.leaving(up, count)
    gate, inner = (_make(len(rows), model.ffn) for _ in range(2))
    rises = partial(experts.grouped, rows, entering, ends)
    falls = partial(experts.grouped, inner, leaving, ends)
    add = partial(experts.add_grouped, total, (inner, rows), ends, fresh=False, by=by.put)
    routed = partial(experts.by_scores, scores, places, weights, None, normalised=True)
    works: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {
            "router": lambda: x @ router.T,
            "route": lambda: experts.route(scores, each, normalised=True)[1].ends(count),
            "sent": lambda: by.sent(x, places),
            "mlp up": lambda: (rises(), rises()),
            "activation": lambda: activation.forward(gate, inner, weights),
            "mlp down": falls,
            "combine": lambda: by.combined(rows, places, None),
        },
        "backward": {
            "combine": lambda: by.sent(x, places),
            "mlp down by input": rises,
            "activation": lambda: activation.backward(gate, gate, weights, inner),
            "mlp down by weight": add,
            "mlp up by input": lambda: (falls(), falls()),
            "sent": lambda: (by.combined(rows, places, rows), by.sent(x, places)),
            "route": routed,
            "mlp up by weight": lambda: (add(), add()),
        },
    }
    if model.mlp_bias:
        _with_biases(works, model, (weights, places), (x, gate))
    return works


def _with_biases(
    works: dict[str, dict[str, Callable[[], object]]],
    model: ModelSpec,
    routed: tuple[Tensor, experts.Places],
    tensors: tuple[Tensor, Tensor],
) -> None:
    """Those of the experts' biases besides; `tensors`: of tokens [., h], and of rows [., f]."""
    (weights, places), (x, gate), count = routed, tensors, model.experts
    first, last = _make(model.ffn, count), _make(model.hidden, count)
    sums = [torch.zeros(one.shape, device=one.device) for one in (first, last)]

    def vectors() -> Tensor:
        return expert_biases.unit_vectors(places, count, x.dtype)

    def shares() -> Tensor:
        return expert_biases.weights_of_all(places, weights, x.dtype, ONE, last)

    def add_first() -> Tensor:
        return expert_biases.add_biases_(gate, vectors(), first)

    def back_first() -> None:
        made = vectors()
        for _ in range(2):
            add_product(sums[0], gate, made, fresh=False)

    def back_last() -> None:
        expert_biases.by_row(places, x @ last, ONE)
        add_product(sums[1], x, shares(), fresh=False)

    works["forward"]["biases of mlp up"] = lambda: (add_first(), add_first())
    works["forward"]["biases of mlp down"] = lambda: x.addmm_(shares(), last.T)
    works["backward"]["biases of mlp up"] = back_first
    works["backward"]["biases of mlp down"] = back_last


def _shape(model: ModelSpec, cluster: Cluster) -> RankShape:
    training = Training(sequence_length=TOKENS, global_batch=1, precision="bf16")
    return RankShape.on(cluster.group.gpu, model, training, Strategy(dp=1))


def operators(model: ModelSpec, cluster: Cluster) -> dict[str, Any]:
    """Milliseconds of every operator, measured and priced.

    A weight's gradient is measured with its addition to the sum, which is priced apart: its bytes,
    those of the gradients read, and of the sums read and written.
    """
    block = graph_of_shape(_shape(model, cluster), None).kinds["block"]
    device = Device(cluster.group.gpu, "bf16")
    found: dict[str, Any] = {}
    for direction, works in _works(model).items():
        priced = {one.name: one for one in getattr(block, direction)}
        for name, work in works.items():
            biases = name.startswith("biases")
            own = [one for n, one in priced.items() if n == name or (biases and name in n)]
            ours, theirs = milliseconds(work), 1e3 * sum(operator_seconds(o, device) for o in own)
            if name.endswith("by weight"):
                matrices = 1 if name.startswith("mlp down") else 2
                elements = matrices * model.ffn * model.experts * model.hidden
                theirs += 1e3 * 10 * elements / device.stream_rate
            flops = sum(getattr(one, "flops", 0.0) for one in own)
            rate = flops / ours / 1e9 if ours else 0.0
            found[f"{direction} {name}"] = {"ms": ours, "priced": theirs, "tflops": rate}
            told = f"{rate:6.0f} TFLOP/s" if rate else ""
            print(f"  {direction:9}{name:20}{ours:9.3f} ({theirs:8.3f}) {told}", flush=True)
    return found


def memory(model: ModelSpec, cluster: Cluster) -> dict[str, Any]:
    """A forward and a backward of experts alone: milliseconds, and GiB at the backward's peak.

    The promise is for the block's whole backward, and for its activation, which is not kept here.
    """
    shapes = {p.name: p.shape for p in model.kinds()["block"]}
    p = {name: _make(*shapes[name]) for name in EXPERTS if name in shapes}
    sums = Sums()
    sums.open({n: torch.zeros(t.shape, device=t.device) for n, t in p.items()}, fresh=False)
    x, normed = (_make(1, TOKENS, model.hidden).requires_grad_() for _ in range(2))
    how = Mixture(sums=sums, gated=True, rows=_rows())
    gradient = _make(1, TOKENS, model.hidden)

    def forward() -> Tensor:
        return expert_mlp.mlp(p, x, normed, model, how)

    def backward(output: Tensor) -> None:
        torch.autograd.grad(output, [x, normed], gradient, retain_graph=True)

    output = forward()
    found = {
        "forward ms": milliseconds(forward),
        "backward ms": milliseconds(partial(backward, output)),
    }
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward(output)
        torch.cuda.synchronize()
        found["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    shape = _shape(model, cluster)
    block = graph_of_shape(shape, None).kinds["block"]
    found["promised GiB"] = (block.backward_workspace + inner_bytes(shape)) / 2**30
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
    return found


def steps(model: ModelSpec, out: Path) -> dict[str, Any]:
    """A launch's seconds a step and bytes, beside its promises."""
    path = out / f"{model.name}.yaml"
    path.write_text(to_yaml(model))
    length, batch, precision = (2048, 16, "bf16") if CUDA else (64, 4, "fp32")
    bigplan(
        *("launch", "--model", str(path), "--cluster", str(out / "cluster.yaml")),
        *("--seq-len", str(length), "--global-batch", str(batch), "--precision", precision),
        *("--engine", "native", "--steps", str(STEPS), "--checkpoint-keep", "0"),
        *("--run-dir", str(out / "runs")),
    )
    record = newest((out / "runs").glob(f"{model.name}-*"))
    found = beside_promises(record) | {"captured": record.plan.placement.captured}
    print(f"  {json.dumps(found)}", flush=True)
    return found


def main() -> None:
    """All parts, or those that are named; what was found before stays in the file."""
    asked = Asked.of(__doc__, "experts", PARTS)
    cluster, out = asked.cluster(), asked.out
    print(f"torch {torch.__version__}, {gpu()}, {TOKENS} tokens; ms (priced)", flush=True)
    for part in asked.parts:
        for model in PARTS[part]:
            print(f"{part} of {model.name}", flush=True)
            if part == "gpt-oss":
                one = operators(model, cluster) | memory(model, cluster) | steps(model, out)
            elif part in ("steps", "beside"):
                one = steps(model, out)
            else:
                one = {"operators": operators, "memory": memory}[part](model, cluster)
            asked.keep(f"{part} {model.name}", one)


if __name__ == "__main__":
    main()
