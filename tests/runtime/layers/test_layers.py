"""The runtime's layers do what the steps of bigplan/spec/layers.py say.

Of each layer, whole and as tensor-parallel ranks split it: the parameters that it reads and gives
gradients of, the products that it computes, and every tensor that autograd saves. Operators and
bytes of the planner are made of those steps, so this is where the two halves of the project agree
on what a layer is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bigplan.capabilities.native import native_refusal
from bigplan.graph.activations import BlockShape, saved_values
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.operators import Gemm, Operator
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import splits_over_tensor_parallel
from bigplan.mechanics import repeats_heads
from bigplan.runtime.layers import blocks
from bigplan.runtime.layers.carried import Carried, Turn
from bigplan.runtime.layers.inputs import to_inputs
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.kinds import Block
from bigplan.runtime.layers.products import Products
from bigplan.runtime.mixers import positions
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.spec.carried import KEYS, OWN_INPUT, VALUES
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.model import ModelSpec
from tests.examples import examples
from tests.runtime.neighbours import Called, Result, side_by_side
from tests.runtime.plans import carrying, models, shape_on, tiny_model, tiny_training

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LENGTH = 288  # tokens of a rank: every saved tensor is large enough to be moved (kept.SMALL)
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
        "layers": 1
        + any((model.dense_blocks, model.mixer_pattern, model.expert_pattern, model.global_heads)),
        "mixer_pattern": (f"1 {model.mixers[0]}", "1 attention") if model.mixer_pattern else (),
        "hidden": 48,
        "ffn": 80,
        "shared_ffn": 48 * (model.shared_ffn > 0),
        "dense_blocks": int(model.dense_blocks > 0),
        "dense_ffn": 64 * (model.dense_ffn > 0),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 16,
        "vocab": 96,
        "max_sequence_length": 1024,
    }
    if model.global_heads is not None:
        far = {"head_dim": 24, "kv_heads": 1}
        sizes["global_heads"] = model.global_heads.model_dump() | far
        sizes["attention_pattern"] = ("1 local", "1 global")
    if model.delta_rule is not None:
        rule = {"key_heads": 4, "value_heads": 8, "key_dim": 8, "value_dim": 6}
        sizes["delta_rule"] = model.delta_rule.model_dump() | rule
    if model.state_space is not None:
        own = {"norm": model.state_space.norm, "scales": model.state_space.scales}
        sizes["state_space"] = {"heads": 8, "head_dim": 6, "state": 8, **own}
    if model.latent_attention is not None:
        widths = {"kv_rank": 16, "plain_dim": 8, "rope_dim": 4, "value_dim": 8}
        some = None if model.latent_attention.query_rank is None else 24
        sizes |= {"latent_attention": widths | {"query_rank": some}, "head_dim": 12}
    return ModelSpec.model_validate(model.model_dump() | sizes)


def runnable(name: str) -> bool:
    strategy = Strategy(dp=1)
    return native_refusal(small(name), tiny_training(1, sequence_length=LENGTH), strategy) is None


class Split(NamedTuple):
    """How tensor-parallel ranks split a layer."""

    tp: int = 1
    sequence_parallel: bool = True

    @property
    def strategy(self) -> Strategy:
        """Of these ranks alone."""
        return Strategy(dp=1, tp=self.tp, sequence_parallel=self.sequence_parallel)

    def on_ranks(
        self, work: Callable[[TensorParallel], Result]
    ) -> tuple[list[Result], list[Called]]:
        """What each rank makes of `work`, and the collectives that they met in."""
        if self.tp == 1:
            return [work(ONE)], []
        parts = self.sequence_parallel
        return side_by_side(self.tp, lambda group: work(TensorParallel(group, parts)))


WHOLE = Split()
splits = st.sampled_from((WHOLE, Split(2), Split(2, False), Split(4), Split(4, False)))
SHIPPED = [name for name in list_models() if runnable(name)]
# Apertus's activation has two numbers that are trained: no tensors of 16 as those of `models` are.
APERTUS = st.just(tiny_model(mlp="xielu", qk_norm=True))
mixed = st.sampled_from(SHIPPED).map(small) | models(kv_heads=(1, 2, 4)) | APERTUS | carrying()
# As each kind of block sees its model, in which all blocks are like it.
shipped_and_random = mixed.flatmap(
    lambda model: st.sampled_from(model.block_kinds).map(model.seen_by)
)


def test_all_shipped_models_are_executed() -> None:
    assert set(list_models()) == set(SHIPPED)


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
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        device: str = "cpu",
        size: tuple[int, int] = (1, 8),
        ranks: TensorParallel = ONE,
    ) -> None:
        self.model, self.ranks = model, ranks
        self._where: dict[str, Any] = {"dtype": dtype, "device": device}
        self.rope = positions.position_tables(
            model, size[1], device, dtype, positions.Sharing(ranks)
        )
        self.x = self.make(*ranks.hidden(*size, model.hidden)).requires_grad_()
        self.carried = self._carried(*size)
        # The same on every rank, which only sums what comes of it.
        self.tokens = torch.arange(size[0] * size[1], device=device).view(size) % model.vocab

    def make(self, *shape: int) -> Tensor:
        return torch.randn(*shape, **self._where) * 0.1

    def _carried(self, batch: int, length: int) -> Carried:
        """What a block finds beside the residual stream, as the first block does."""
        model, inputs = self.model, None
        if model.block_inputs is not None:
            inputs = self.make(1, batch, length, model.block_inputs.width)
        carried = Carried(torch.empty(0), inputs)
        if model.keys_given:
            heads = batch, length, model.kv_heads, model.head_dim
            carried.kept[False] = self.make(*heads), self.make(*heads)
        return carried

    @property
    def turn(self) -> Turn:
        own = (OWN_INPUT,) if self.model.block_inputs is not None else ()
        kept = (KEYS, VALUES) if self.model.keys_given else ()
        return Turn(carried=self.carried, reads=(*own, *kept))

    def parameters(self, kind: str) -> _Read:
        steps = self.model.steps(kind)
        named = {p.name: p for step in steps for p in step.parameters}
        table = {p.name: p for p in self.model.kinds()["embedding"]}
        named |= {step.shared: table[step.shared] for step in steps if step.shared}
        size = self.ranks.group.size
        shapes = {n: shape_on(p, size) for n, p in named.items()}
        return _Read({n: self.make(*shape).requires_grad_() for n, shape in shapes.items()})

    def run(self, kind: str, p: _Read) -> Tensor:
        match kind:
            case "embedding":
                rows = blocks.embedding(p, self.tokens, self.model, self.ranks)
                if self.model.block_inputs is not None:
                    return rows.sum() + to_inputs(p, rows, self.model).square().sum()
                return blocks.embedding_norm(p, rows, self.model)
            case "block":
                ways = Products(self.ranks).ways
                found = _Read(p | self.turn.leaves())
                output = blocks.block(found, self.x, self.model, self.rope, ways)
                p.names |= found.names - {*self.turn.reads}
                return output
            case _:
                return blocks.head_loss(p, self.x, self.tokens, self.model, ranks=self.ranks)


@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
@given(shipped_and_random)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_a_layer_reads_its_parameters_and_no_others(kind: str, model: ModelSpec) -> None:
    layer = _Layer(model, torch.float32)
    p = layer.parameters(kind)
    torch.autograd.backward(layer.run(kind, p).sum())
    assert p.names == set(p)
    constants = {parameter.name for parameter in model.kinds()[kind] if parameter.constant}
    for name, parameter in p.items():
        assert (parameter.grad is None) == (name in constants), name


def _gemms(operators: tuple[Operator, ...]) -> float:
    """FLOP of products with weights; the gradient of a table is none.

    Those of a delta rule or state space, in batches, are counted in tests of
    mixers/.
    """
    others = ("delta rule's", "state space's")
    gemms = (op for op in operators if isinstance(op, Gemm) and not op.name.startswith(others))
    return sum(op.flops for op in gemms)


def _counter() -> FlopCounterMode:
    """Of products, also those that are added to a tensor in place, which torch's leaves out."""

    def added(_: torch.Size, x: torch.Size, y: torch.Size, **__: object) -> int:
        return 2 * x[0] * x[1] * y[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added})


def _attends(operator: str) -> bool:
    """Products of batches are those of capped scores, which attention makes itself."""
    return "attention" in operator or "bmm" in operator


def _counted(counter: FlopCounterMode) -> int:
    """FLOP of products that torch ran, attention apart: the counter takes its whole square."""
    counts = counter.get_flop_counts()["Global"]
    return sum(n for operator, n in counts.items() if not _attends(str(operator)))


def _graph(
    model: ModelSpec, dtype: torch.dtype, split: Split = WHOLE, size: tuple[int, int] = (1, 8)
) -> Graph:
    batch, length = size
    training = tiny_training(batch, sequence_length=length, precision=DTYPES[dtype])
    strategy = split.strategy.model_copy(update={"micro_batch": batch})
    return build_graph(model, training, strategy, loss_chunk=None, fused=True)


@pytest.mark.parametrize("kind", ["block", "head"])
@given(shipped_and_random, splits)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_a_layer_computes_the_products_of_its_operators(
    kind: str, model: ModelSpec, split: Split
) -> None:
    assume(splits_over_tensor_parallel(model, split.tp))
    assume(split.tp == 1 or not model.carries)

    def counted(ranks: TensorParallel) -> tuple[int, int]:
        layer = _Layer(model, torch.float32, ranks=ranks)
        forward, backward = _counter(), _counter()
        with forward:
            output = layer.run(kind, layer.parameters(kind))
        with backward:
            torch.autograd.backward(output.sum())
        return _counted(forward), _counted(backward)

    operators = _graph(model, torch.float32, split).kinds[kind]
    for forward, backward in split.on_ranks(counted)[0]:
        # The head does all its work in its backward.
        assert forward + backward == _gemms(operators.forward + operators.backward)
        assert kind == "head" or forward == _gemms(operators.forward)


def _saved(layer: _Layer) -> Counter[int]:
    """Bytes of each storage that a block's graph holds on to, parameters and rope tables apart."""
    p = layer.parameters("block")
    shared = {t.untyped_storage().data_ptr() for t in (*p.values(), *layer.rope.tables)}
    shared |= layer.turn.storages()
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
@given(shipped_and_random, st.sampled_from(((4, 1), (2, 18), (3, 64), (1, 520))), splits)
@example(small("olmo-7b"), (2, 18), WHOLE)  # no norm has weights
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_every_saved_value_is_described(
    device: str, dtype: torch.dtype, model: ModelSpec, size: tuple[int, int], split: Split
) -> None:
    """Value by value, so that no two errors make up for each other."""
    batch, length = size
    if device == "cuda":
        length = 64  # whose kernels pad statistics to 32 positions
    assume(splits_over_tensor_parallel(model, split.tp))
    assume(split.tp == 1 or not model.carries)
    model = model.model_copy(update={"max_sequence_length": 1024})
    expanded = repeats_heads(dtype.itemsize, model.heads, model.kv_heads)
    shape = BlockShape(
        batch * length,
        length,
        dtype.itemsize,
        split.tp,
        split.tp > 1 and split.sequence_parallel,
        expanded_kv=expanded,
    )
    described = Counter(saved_values(model, shape).values())
    for found in split.on_ranks(
        lambda ranks: _saved(_Layer(model, dtype, device, (batch, length), ranks))
    )[0]:
        assert not described - found
        assert sum((found - described).elements()) <= RANDOM_STATE[device]


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@given(shipped_and_random, st.booleans(), splits)
@settings(max_examples=examples(20), derandomize=True, deadline=None)
def test_a_layer_keeps_what_the_planner_counted(
    dtype: torch.dtype, model: ModelSpec, in_product: bool, split: Split
) -> None:
    assume(splits_over_tensor_parallel(model, split.tp))
    assume(split.tp == 1 or not model.carries)
    size = 1, LENGTH * split.tp
    model = model.model_copy(update={"max_sequence_length": size[1]})
    kind = _graph(model, dtype, split, size).kinds["block"]
    shapes = {p.name: shape_on(p, split.tp) for p in model.kinds()["block"]}

    def kept(ranks: TensorParallel) -> dict[Recompute, int]:
        layer = _Layer(model, dtype, "cpu", size, ranks)
        flat = layer.make(kind.parameters)
        parts = torch.split(flat, [tensor.elements for tensor in kind.tensors])
        views = {
            tensor.name: part.view(shapes[tensor.name])
            for tensor, part in zip(kind.tensors, parts, strict=True)
        }
        block = Block(model, layer.rope, ranks, in_product=in_product)
        x, found = layer.x.detach(), {}
        for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.MLP):
            kept = KeptActivations(weights=flat.view(torch.uint8))
            block.record(views, x, kept, recompute, layer.turn)
            found[recompute] = kept.nbytes
        boundary = KeptActivations()
        boundary.keep_input(x)
        return found | {Recompute.FULL: boundary.nbytes}

    # One counts gradients of matrices that all have whole, and keeps what they are made of.
    every = split.on_ranks(kept)[0]
    found = {recompute: max(one[recompute] for one in every) for recompute in Recompute}
    assert found == {recompute: kind.kept(recompute) for recompute in Recompute}
