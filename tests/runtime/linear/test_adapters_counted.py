"""Blocks with adapters keep and compute what the planner counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch.utils.flop_counter import FlopCounterMode

from bigplan.graph.build import build_graph
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.operators import Gemm, Operator
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import splits_over_tensor_parallel
from bigplan.runtime.layers.carried import Turn
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.kinds import Block
from bigplan.runtime.linear.dropout import Drops
from bigplan.runtime.mixers.positions import Sharing, position_tables
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.spec.lora import Lora, adapters, possible_targets
from bigplan.spec.model import ModelSpec
from tests.examples import examples
from tests.runtime.neighbours import Neighbour, side_by_side
from tests.runtime.plans import models, shape_on, tiny_training

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
OF_BATCHES = ("delta rule's", "state space's")  # counted in tests/runtime/mixers
LENGTH = 288  # tokens of a rank: every saved tensor is large enough to be moved (kept.SMALL)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


class _Case:
    """A block's shape on each of `tp` ranks."""

    def __init__(self, model: ModelSpec, lora: Lora, tp: int, dtype: torch.dtype) -> None:
        self.length, self.tp, self.dtype, self.lora = LENGTH * tp, tp, dtype, lora
        self.model = model.model_copy(update={"max_sequence_length": self.length})
        training = tiny_training(
            1, sequence_length=self.length, precision=DTYPES[dtype], lora=lora.model_dump()
        )
        graph = build_graph(
            self.model, training, Strategy(dp=1, tp=tp), loss_chunk=None, fused=True
        )
        self.kind: LayerKind = graph.kinds["block"]

    def recorded(self, ranks: TensorParallel, recompute: Recompute) -> KeptActivations:
        """A forward whose backward may follow."""
        described = (*self.model.kinds()["block"], *adapters(self.model, self.lora))
        shapes = {p.name: shape_on(p, self.tp) for p in described}
        flat = torch.randn(self.kind.parameters, dtype=self.dtype) * 0.1
        parts = torch.split(flat, [tensor.elements for tensor in self.kind.tensors])
        views = {
            tensor.name: part.view(shapes[tensor.name])
            for tensor, part in zip(self.kind.tensors, parts, strict=True)
        }
        trained = {
            tensor.name: torch.randn(shapes[tensor.name], dtype=self.dtype)
            for tensor in self.kind.adapters
        }
        tables = position_tables(self.model, self.length, "cpu", self.dtype, Sharing(ranks))
        block = Block(self.model, tables, ranks, in_product=True)
        block.lora = self.lora
        kept = KeptActivations(weights=flat.view(torch.uint8))
        hidden = ranks.hidden(1, self.length, self.model.hidden)
        x = torch.randn(hidden).to(self.dtype)
        drops = Drops(self.lora.dropout, 0, 1, torch.tensor([0]), self.length)
        turn = Turn(drops=drops if self.lora.dropout else None)
        block.record({**views, **trained}, x, kept, recompute, turn)
        kept.sums.open({n: torch.empty(t.shape) for n, t in trained.items()}, fresh=True)
        return kept

    def on_ranks(self, recompute: Recompute) -> list[tuple[KeptActivations, int, int]]:
        """What each keeps, and the FLOP of its forward's and its backward's products."""

        def work(group: Neighbour | None) -> tuple[KeptActivations, int, int]:
            ranks = TensorParallel(group, True) if group else ONE
            forward, backward = _counter(), _counter()
            with forward:
                kept = self.recorded(ranks, recompute)
            hidden = ranks.hidden(1, self.length, self.model.hidden)
            nbytes = kept.nbytes
            with backward:
                kept.gradients(torch.randn(hidden).to(self.dtype))
            kept.nbytes = nbytes
            return kept, _counted(forward), _counted(backward)

        return [work(None)] if self.tp == 1 else side_by_side(self.tp, work)[0]


def _counter() -> FlopCounterMode:
    """Of products, also those that are added to a tensor in place, which torch's leaves out."""

    def added(_: torch.Size, x: torch.Size, y: torch.Size, **__: object) -> int:
        return 2 * x[0] * x[1] * y[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added})


def _counted(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts()["Global"]
    # Products of batches are those of capped scores, which attention makes itself.
    beside = ("attention", "bmm")
    return sum(n for op, n in counts.items() if not any(name in str(op) for name in beside))


def _gemms(operators: Sequence[Operator]) -> float:
    """FLOP of products but those of a delta rule and of a state space, which are of batches."""
    gemms = (one for one in operators if isinstance(one, Gemm))
    return sum(one.flops for one in gemms if not one.name.startswith(OF_BATCHES))


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    model = draw(models(kv_heads=(1, 2, 4)))
    model = model.seen_by(draw(st.sampled_from(model.layer_sequence()[1:-1])))
    tp = draw(st.sampled_from((1, 2, 4)))
    assume(splits_over_tensor_parallel(model, tp))
    some = st.lists(st.sampled_from(possible_targets(model)), min_size=1, unique=True)
    targets, dropout = draw(st.none() | some.map(tuple)), draw(st.sampled_from((0.0, 0.3)))
    if any(target.startswith("experts.") for target in targets or ()):
        dropout = 0.0
    lora = Lora(rank=draw(st.sampled_from((1, 4))), targets=targets, dropout=dropout)
    return _Case(model, lora, tp, draw(st.sampled_from(tuple(DTYPES))))


@given(_cases())
@settings(max_examples=examples(15), derandomize=True, deadline=None)
def test_a_block_keeps_and_computes_what_the_planner_counted(case: _Case) -> None:
    """Bytes, and products of its operators."""
    for recompute in (Recompute.NONE, Recompute.SELECTIVE, Recompute.MLP):
        again = _gemms(case.kind.again(recompute))
        for kept, forward, backward in case.on_ranks(recompute):
            assert kept.nbytes == case.kind.kept(recompute), recompute
            if case.model.shared_gate:  # whose one column is priced in a second run that it has not
                continue
            assert forward == _gemms(case.kind.forward)
            assert backward == _gemms(case.kind.backward) + again


def test_frozen_weights_have_no_gradients() -> None:
    """A third of a block's products is left out, and each adapter's four are small."""
    lora = Lora(rank=1, targets=("q_proj",))
    model = ModelSpec.model_validate(
        {"name": "m", "layers": 1, "hidden": 64, "ffn": 96, "heads": 4, "vocab": 64}
        | {"max_sequence_length": 512, "source": "test"}
    )
    case = _Case(model, lora, 1, torch.float32)
    ((_, forward, backward),) = case.on_ranks(Recompute.NONE)
    assert backward == pytest.approx(forward, rel=0.03)
