"""The runtime's layers do what the steps of bigplan/spec/layers.py say.

Of each layer: the parameters that it reads and gives gradients of, the products that it computes,
and every tensor that autograd saves. Operators and bytes of the planner are made of those steps, so
this is where the two halves of the project agree on what a layer is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bigplan.capabilities import native_refusal
from bigplan.graph.activations import BlockShape, saved_values
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.operators import Gemm, Operator
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import repeats_heads
from bigplan.runtime import blocks
from bigplan.runtime.kept import Kept
from bigplan.runtime.layers import Block
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.model import ModelSpec
from tests.examples import examples
from tests.runtime.plans import models, tiny_training

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LENGTH = 288  # tokens: every saved tensor is large enough to be moved (kept.SMALL)
# Flash attention on CUDA saves its random state (dropout is off): at most four 8-byte numbers.
RANDOM_STATE = {"cpu": 0, "cuda": 32}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def small(name: str) -> ModelSpec:
    """A shipped model, all its switches and groups of heads as they are, in small sizes."""
    model = find_model(name)
    kv_heads = min(2, model.kv_heads)
    heads = kv_heads * (model.heads // model.kv_heads)
    sizes: dict[str, object] = {
        "layers": 1,
        "hidden": 48,
        "ffn": 80,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 8,
        "vocab": 96,
        "max_sequence_length": 1024,
    }
    return ModelSpec.model_validate(model.model_dump() | sizes)


def runnable(name: str) -> bool:
    strategy = Strategy(dp=1)
    return native_refusal(small(name), tiny_training(1, sequence_length=LENGTH), strategy) is None


SHIPPED = [name for name in list_models() if runnable(name)]
shipped_and_random = st.sampled_from(SHIPPED).map(small) | models(kv_heads=(1, 2, 4))


def test_most_shipped_models_are_executed() -> None:
    assert set(list_models()) - set(SHIPPED) == {
        "bloom-176b",  # alibi
        "mpt-7b",
        "mpt-30b",
        "mpt-70b",
    }


class _Read(dict[str, Tensor]):
    """Parameters by name that know which of them were read."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__(parameters)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        if name in self:
            self.names.add(name)
        return super().get(name, default)


class _Layer:
    """Random parameters of one kind of layer, and inputs."""

    def __init__(
        self, model: ModelSpec, length: int, dtype: torch.dtype, device: str, batch: int = 1
    ) -> None:
        self.model = model
        self._where: dict[str, Any] = {"dtype": dtype, "device": device}
        self.rope = blocks.rope_table(model, length, device, dtype)
        self.x = self.make(batch, length, model.hidden).requires_grad_()
        self.tokens = torch.randint(model.vocab, (batch, length), device=device)

    def make(self, *shape: int) -> Tensor:
        return torch.randn(*shape, **self._where) * 0.1

    def parameters(self, kind: str) -> _Read:
        steps = self.model.steps(kind)
        named = {p.name: p.shape for step in steps for p in step.parameters}
        table = {p.name: p.shape for p in self.model.kinds()["embedding"]}
        named |= {step.shared: table[step.shared] for step in steps if step.shared}
        return _Read({n: self.make(*shape).requires_grad_() for n, shape in named.items()})

    def run(self, kind: str, p: _Read) -> Tensor:
        match kind:
            case "embedding":
                return blocks.embedding(p, self.tokens, self.model)
            case "block":
                return blocks.block(p, self.x, self.model, self.rope)
            case _:
                return blocks.head_loss(p, self.x, self.tokens, self.model)


@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
@given(shipped_and_random)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_a_layer_reads_its_parameters_and_no_others(kind: str, model: ModelSpec) -> None:
    layer = _Layer(model, 8, torch.float32, "cpu")
    p = layer.parameters(kind)
    torch.autograd.backward(layer.run(kind, p).sum())
    assert p.names == set(p)
    for name, parameter in p.items():
        assert parameter.grad is not None, name


def _gemms(operators: tuple[Operator, ...]) -> float:
    """FLOP of products with weights; the gradient of a table is none."""
    gemms = (op for op in operators if isinstance(op, Gemm))
    return sum(op.flops for op in gemms)


def _counted(counter: FlopCounterMode) -> int:
    """FLOP of products that torch ran, attention apart: the counter takes its whole square."""
    counts = counter.get_flop_counts()["Global"]
    return sum(n for operator, n in counts.items() if "attention" not in str(operator))


def _graph(model: ModelSpec, dtype: torch.dtype, length: int) -> Graph:
    training = tiny_training(1, sequence_length=length, precision=DTYPES[dtype])
    return build_graph(model, training, Strategy(dp=1), loss_chunk=None, fused=True)


@pytest.mark.parametrize("kind", ["block", "head"])
@given(shipped_and_random)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_a_layer_computes_the_products_of_its_operators(kind: str, model: ModelSpec) -> None:
    layer, described = _Layer(model, 8, torch.float32, "cpu"), _graph(model, torch.float32, 8)
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        output = layer.run(kind, layer.parameters(kind))
    with backward:
        torch.autograd.backward(output.sum())
    operators = described.kinds[kind]
    # The head does all its work in its backward.
    assert _counted(forward) + _counted(backward) == _gemms(operators.forward + operators.backward)
    assert kind == "head" or _counted(forward) == _gemms(operators.forward)


def _saved(layer: _Layer) -> Counter[int]:
    """Bytes of each storage that a block's graph holds on to, parameters and rope tables apart."""
    p = layer.parameters("block")
    shared = {t.untyped_storage().data_ptr() for t in (*p.values(), *layer.rope)}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer.run("block", p)
    torch.autograd.backward(output.sum())  # the graph, and so every storage, lived until here
    return Counter(s.nbytes() for address, s in saved.items() if address not in shared)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@given(shipped_and_random, st.sampled_from(((1, 1), (2, 17), (3, 64), (1, 520))))
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_every_saved_value_is_described(
    device: str, dtype: torch.dtype, model: ModelSpec, sizes: tuple[int, int]
) -> None:
    """Value by value, so that no two errors make up for each other."""
    batch, length = sizes
    if device == "cuda":
        length = 64  # whose kernels pad statistics to 32 positions
    model = model.model_copy(update={"max_sequence_length": 1024})
    expanded = repeats_heads(dtype.itemsize, model.heads, model.kv_heads)
    shape = BlockShape(batch * length, length, dtype.itemsize, expanded_kv=expanded)
    described = Counter(saved_values(model, shape).values())
    found = _saved(_Layer(model, length, dtype, device, batch))
    assert not described - found
    assert sum((found - described).elements()) <= RANDOM_STATE[device]


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@given(shipped_and_random, st.booleans())
@settings(max_examples=examples(20), derandomize=True, deadline=None)
def test_a_layer_keeps_what_the_planner_counted(
    dtype: torch.dtype, model: ModelSpec, in_product: bool
) -> None:
    model = model.model_copy(update={"max_sequence_length": LENGTH})
    layer, kind = _Layer(model, LENGTH, dtype, "cpu"), _graph(model, dtype, LENGTH).kinds["block"]
    flat = layer.make(kind.parameters)
    sizes = [tensor.elements for tensor in kind.tensors]
    parts = torch.split(flat, sizes)
    views = {
        p.name: part.view(p.shape) for p, part in zip(model.kinds()["block"], parts, strict=True)
    }
    block, x = Block(model, layer.rope, in_product=in_product), layer.x.detach()
    for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.MLP):
        kept = Kept(weights=flat.view(torch.uint8))
        block.record(views, x, kept, recompute)
        assert kept.nbytes == kind.kept(recompute)
    boundary = Kept()
    boundary.keep_input(x)
    assert boundary.nbytes == kind.kept(Recompute.FULL)
