"""Ranks that split a layer compute together what one does, and meet in the planned collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.operators import Collective, Operator
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import splits_over_tensor_parallel
from bigplan.runtime.experts.expert_parallel import ALL_HERE, ExpertParallel
from bigplan.runtime.layers import kept as kept_module
from bigplan.runtime.layers.head import Head
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.kinds import Block, Embedding, Layer
from bigplan.runtime.layers.losses import Losses
from bigplan.runtime.layers.visit import Batches, Visit
from bigplan.runtime.memory.pieces import Owner
from bigplan.runtime.mixers import positions
from bigplan.runtime.operators import capped
from bigplan.runtime.parallel.group import ALONE, RankGroup
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.runtime.parallel.words import Words, cross_entropy
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter
from tests.examples import examples
from tests.runtime.neighbours import ROWS, Called, Turn, in_two_ways, side_by_side
from tests.runtime.parallel.sharded_ranks import (
    BESIDE,
    BESIDE_UNNORMED,
    DELTA_RULE,
    EXPERTS,
    EXPERTS_ALONE,
    FALCON_H1,
    FAMILIES,
    IN_GROUPS,
    LATENT,
    MIXER_ALONE,
    MLP_ALONE,
    STATE_SPACE,
)
from tests.runtime.plans import models, shape_on, tiny_model, tiny_training
from tests.runtime.reference import UNIT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, LENGTH, CHUNK = 3, 8, 12  # of the loss: two chunks
TOKENS = BATCH * LENGTH
# Sums of up to 256 terms in another order, through a block forward and backward: 1e-5 is 170 unit
# roundoffs of fp32.
APART = 1e-5

splits = st.tuples(st.sampled_from((2, 4)), st.booleans())
recomputes = st.sampled_from(tuple(Recompute))
PARTS: dict[str, Mapping[str, object]] = {
    **FAMILIES,
    **{"experts": EXPERTS, "latent": LATENT, "beside": BESIDE, "delta rule": DELTA_RULE},
    **{"state space": STATE_SPACE, "state space in groups": IN_GROUPS},
    **{"side by side": FALCON_H1, "unnormed": BESIDE_UNNORMED},
    **{"mixer alone": MIXER_ALONE, "MLP alone": MLP_ALONE, "experts alone": EXPERTS_ALONE},
}


@pytest.fixture(autouse=True, scope="module")
def _as_in_a_plain_loop() -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


def graph_of(model: ModelSpec, tp: int, parts: bool) -> Graph:
    strategy = Strategy(dp=1, tp=tp, micro_batch=BATCH, sequence_parallel=parts)
    training = tiny_training(BATCH, sequence_length=LENGTH)
    return build_graph(model, training, strategy, loss_chunk=CHUNK, fused=True)


@dataclass
class _Layer:
    """One layer of the whole model, its input and the gradient by its output; on ranks, parts."""

    model: ModelSpec
    kind: str
    x: Tensor
    gradient: Tensor
    values: Mapping[str, Tensor]
    tokens: Tensor

    @classmethod
    def of(cls, model: ModelSpec, kind: str, device: str = "cpu") -> _Layer:
        generator = torch.Generator().manual_seed(1)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        values = {p.name: 0.1 * make(*p.matrix) for p in cls.parameters(model, kind).values()}
        x, gradient = make(BATCH, LENGTH, model.hidden), make(BATCH, LENGTH, model.hidden)
        tokens = torch.randint(model.vocab, (BATCH, LENGTH), generator=generator).to(device)
        return cls(model.seen_by(kind), kind, x, gradient, values, tokens)

    @staticmethod
    def parameters(model: ModelSpec, kind: str) -> dict[str, Parameter]:
        found = {p.name: p for p in model.kinds()[kind]}
        table = {p.name: p for p in model.kinds()["embedding"]}
        shared = {step.shared for step in model.steps(kind)} & set(table)
        return found | {name: table[name] for name in shared}

    def local(self, at: Owner) -> dict[str, Tensor]:
        """The parameters as a rank has them, one behind the other in a flat tensor."""
        found = {}
        for name, p in self.parameters(self.model, self.kind).items():
            mine = torch.zeros(p.local(at.tp, at.ep), device=self.x.device)
            if (part := at.holds(p)) is not None:
                mine[: part.rows, : part.columns] = self.values[name][part.in_matrix]
            found[name] = mine.view(-1, p.shape[-1]) if p.experts else mine.view(shape_on(p, at.tp))
        flat = torch.cat([mine.flatten() for mine in found.values()])
        parts = torch.split(flat, [mine.numel() for mine in found.values()])
        return {n: part.view(found[n].shape) for n, part in zip(found, parts, strict=True)}

    def put(self, into: Mapping[str, Tensor], mine: Mapping[str, Tensor], at: Owner) -> None:
        """Add a rank's gradients to those of the whole, of which it has parts."""
        for name, p in self.parameters(self.model, self.kind).items():
            local = mine[name].view(p.local(at.tp, at.ep))
            if (part := at.holds(p)) is not None:
                own = local[: part.rows, : part.columns]
                into[name][part.in_matrix] += own
                own.zero_()
            assert not local.any(), "filling has a gradient"


@dataclass
class _Result:
    output: Tensor | None
    by_input: Tensor | None
    gradients: dict[str, Tensor]
    losses: list[Tensor]
    evaluated: list[Tensor]
    kept: int  # bytes


class _Tokens:
    """Batches of one micro-batch. A target in three counts nothing."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def tokens(self, _: Visit) -> Tensor:
        return self._tokens

    def targets(self, _: Visit) -> Tensor:
        targets = self._tokens.flatten().roll(-1)
        targets[::3] = -100
        return targets


def _object(layer: _Layer, ranks: TensorParallel, losses: Losses, *, in_product: bool) -> Layer:
    model, batches = layer.model, cast(Batches, _Tokens(layer.tokens))
    if layer.kind == "embedding":
        return Embedding(model, batches, ranks)
    if layer.kind == "block":
        rope = positions.position_tables(
            model, LENGTH, layer.x.device, torch.float32, positions.Sharing(ranks)
        )
        return Block(model, rope, ranks, in_product=in_product)
    graph = SimpleNamespace(loss_chunk=CHUNK, tied=model.tied_embeddings)
    context = SimpleNamespace(model=model, graph=graph, tensor_parallel=ranks)
    return Head(cast(Any, context), batches, losses, in_product=in_product)


def _parts(whole: Tensor, ranks: TensorParallel) -> Tensor:
    """A hidden state as a rank has it, in memory of its own."""
    if ranks.parts == 1:
        return whole.clone()
    return ranks.group.own(whole.flatten(0, 1)).clone()


def _run(
    layer: _Layer,
    recompute: Recompute,
    ranks: TensorParallel,
    *,
    in_product: bool,
    evaluates: bool = True,
    spread: ExpertParallel = ALL_HERE,
) -> _Result:
    losses = Losses(share=0.5, scale=2.0)
    one = _object(layer, ranks, losses, in_product=in_product)
    if isinstance(one, Block):
        one.spread = spread
    tensors = layer.local(_owner(ranks.group, spread.group))
    flat = next(iter(tensors.values()))._base
    assert flat is not None
    totals = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    x, by_output = _parts(layer.x, ranks), _parts(layer.gradient, ranks)
    turn = cast(Visit, Turn(flat, tensors, x, by_output, recompute, totals))
    evaluated = one.evaluate(turn) if evaluates else None
    alone, losses.parts[:] = list(losses.parts), []
    kept = KeptActivations(weights=flat.view(torch.uint8))
    output = one.forward(turn, kept)
    if output is not None and evaluated is not None:
        assert torch.equal(output, evaluated)
    nbytes = kept.nbytes
    by_input = one.backward(turn, kept)
    return _Result(output, by_input, totals, losses.parts, alone, nbytes)


def _owner(tensor: RankGroup, experts: RankGroup = ALONE) -> Owner:
    """What the rank at these places has of a layer."""
    return Owner(0, 1, tensor.place, tensor.size, experts.place, experts.size)


def _apart(ours: Tensor | None, plain: Tensor | None) -> float:
    if ours is None or plain is None:
        assert ours is plain
        return 0.0
    return float((ours.flatten() - plain.flatten()).norm() / plain.norm())


def _rms(tensors: Iterable[Tensor]) -> float:
    """The root mean square of all elements."""
    return float(torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt())


def _together(parts: list[Tensor | None], tokens: bool) -> Tensor | None:
    """A hidden state of ranks that each have its part, or the same."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    if tokens:
        return torch.cat(found)
    assert all(torch.equal(part, found[0]) for part in found)
    return found[0]


@pytest.mark.parametrize("norms", ["as_others", "after"])
@pytest.mark.parametrize("recompute", Recompute)
def test_experts_of_a_latent_are_split(recompute: Recompute, norms: str) -> None:
    """Also where a norm reads what the matrix behind the latent gives, run again or not."""
    experts = {"ffn": 32, "experts": 4, "experts_per_token": 2, "shared_ffn": 16}
    model = tiny_model(layers=2, **experts, expert_latent=16, expert_norms=norms)
    for split in ((2, False), (2, True)):
        _check_parts(_Layer.of(model, "block", "cpu"), split, recompute, in_product=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
@given(models(kv_heads=(1, 2, 4)), splits, recomputes, st.booleans(), st.sampled_from((256, 257)))
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_ranks_compute_what_one_does(
    device: str,
    kind: str,
    model: ModelSpec,
    split: tuple[int, bool],
    recompute: Recompute,
    in_product: bool,
    vocab: int,
) -> None:
    layer = _Layer.of(model.model_copy(update={"vocab": vocab}), kind, device)
    _check_parts(layer, split, recompute, in_product=in_product)


@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("family", PARTS)
def test_layers_of_every_family_may_be_split(family: str, parts: bool, kind: str) -> None:
    """Random models rarely have all that a family has."""
    layer = _Layer.of(tiny_model(**PARTS[family]), kind)
    for recompute in Recompute if kind == "block" else (Recompute.NONE,):
        _check_parts(layer, (2, parts), recompute, in_product=False)


def _check_parts(
    layer: _Layer, split: tuple[int, bool], recompute: Recompute, *, in_product: bool
) -> None:
    """Compare what ranks compute together with what one does alone."""
    size, parts = split
    alone = _run(layer, recompute, ONE, in_product=in_product)
    found, _ = side_by_side(
        size,
        lambda group: _run(layer, recompute, TensorParallel(group, parts), in_product=in_product),
    )
    assert _apart(_together([one.output for one in found], parts), alone.output) < APART
    assert _apart(_together([one.by_input for one in found], parts), alone.by_input) < APART
    totals = {name: torch.zeros_like(value) for name, value in layer.values.items()}
    for place, one in enumerate(found):
        layer.put(totals, one.gradients, _owner(RankGroup(size, place)))
    _check_gradients(totals, alone)
    for one in found:
        for losses, all_of in ((one.losses, alone.losses), (one.evaluated, alone.evaluated)):
            assert len(losses) == len(all_of)
            assert float(sum(losses)) == pytest.approx(float(sum(all_of)), rel=APART)


def _check_gradients(totals: Mapping[str, Tensor], alone: _Result) -> None:
    usual = _rms(alone.gradients.values())
    for name, total in totals.items():
        plain = alone.gradients[name].view(total.shape)
        # One that cancels to zero, as that by a bias of keys does, is as exact as the others.
        most = APART * max(_rms([plain]), usual)
        assert _rms([total - plain]) < most, name


def _called(operators: tuple[Operator, ...]) -> Counter[Called]:
    """Collectives by what they do, and to how many bytes."""
    found = Counter[Called]()
    for one in operators:
        if isinstance(one, Collective):
            found[one.pattern, one.nbytes] += one.count
    return found


@pytest.mark.parametrize("kind", ["embedding", "block", "head"])
@given(models(kv_heads=(1, 2, 4)), splits, recomputes)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_ranks_meet_in_the_collectives_that_the_planner_counted(
    kind: str, model: ModelSpec, split: tuple[int, bool], recompute: Recompute
) -> None:
    size, parts = split
    _check_collectives(kind, model, size, parts, recompute)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("mlp", ["swiglu", "gelu", "gelu_tanh", "relu"])
def test_every_activation_meets_in_the_collectives_of_every_recomputation(
    mlp: str, recompute: Recompute
) -> None:
    """Random models rarely are a ReLU's recomputed in the MLP, where no product runs again."""
    _check_collectives("block", tiny_model(mlp=mlp), 2, True, recompute)


def _check_collectives(
    kind: str, model: ModelSpec, size: int, parts: bool, recompute: Recompute
) -> None:
    described = graph_of(model, size, parts).kinds[kind]
    rerun = described.reruns.get(recompute)
    again = rerun.operators if rerun is not None else ()
    layer = _Layer.of(model, kind)

    def train(ranks: TensorParallel) -> None:
        _run(layer, recompute, ranks, in_product=True, evaluates=False)

    _, called = side_by_side(size, lambda group: train(TensorParallel(group, parts)))
    operators = (*described.forward, *again, *described.backward)
    assert Counter(called) == _called(operators)


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("parts", [False, True])
def test_ranks_that_split_experts_send_their_rows_to_those_that_have_others(
    parts: bool, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two by two, each row of them with the same tokens, all of which pass all experts."""
    layer = _Layer.of(tiny_model(**EXPERTS | {"experts": 4, "experts_per_token": 4}), "block")
    alone = _run(layer, recompute, ONE, in_product=True)
    monkeypatch.setattr(kept_module, "SMALL", 32)  # so that no statistic is too small to be counted

    def run(tensor: RankGroup, experts: RankGroup) -> _Result:
        ranks, spread = TensorParallel(tensor, parts), ExpertParallel(experts)
        return _run(layer, recompute, ranks, in_product=True, evaluates=False, spread=spread)

    found, called = in_two_ways((2, 2), run)
    totals = {name: torch.zeros_like(value) for name, value in layer.values.items()}
    for rank, one in enumerate(found):
        row, column = divmod(rank, 2)
        layer.put(totals, one.gradients, _owner(RankGroup(2, column), RankGroup(2, row)))
    for first in (0, 2):
        row_of = found[first : first + 2]
        assert _apart(_together([one.output for one in row_of], parts), alone.output) < APART
        assert _apart(_together([one.by_input for one in row_of], parts), alone.by_input) < APART
    _check_gradients({name: total / 2 for name, total in totals.items()}, alone)
    strategy = Strategy(dp=2, tp=2, ep=2, micro_batch=BATCH, sequence_parallel=parts)
    training = tiny_training(2 * BATCH, sequence_length=LENGTH)
    described = build_graph(layer.model, training, strategy, fused=True).kinds["block"]
    rerun = described.reruns.get(recompute)
    again = rerun.operators if rerun is not None else ()
    exchanged = Counter(("all_to_all" if name == ROWS else name, n) for name, n in called)
    assert exchanged == _called((*described.forward, *again, *described.backward))
    # Where rows lie is kept beside what is saved: of all tokens, which come from both rows.
    places = 4 * (2 * TOKENS * 4 + 2 * TOKENS + 2 * TOKENS * 4) * (recompute is not Recompute.FULL)
    assert {one.kept + places for one in found} == {described.kept(recompute)}


@pytest.mark.parametrize("device", DEVICES)
@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from((2, 3, 4, 8)),
    st.integers(0, 99),
    st.sampled_from((None, 20.0)),
)
@settings(max_examples=examples(40), derandomize=True, deadline=None)
def test_a_loss_over_shared_words_is_that_over_all(
    device: str, tokens: int, vocab: int, size: int, seed: int, cap: float | None
) -> None:
    """Also where a rank has no word at all, and where logits are large."""
    generator = torch.Generator().manual_seed(seed)
    rows = -(-vocab // size)
    logits = 30 * torch.randn(tokens, vocab, generator=generator).to(device)
    targets = torch.randint(-1, vocab, (tokens,), generator=generator).to(device)
    targets[targets < 0] = -100
    wide = logits.double().requires_grad_()
    plain = torch.nn.functional.cross_entropy(capped(wide, cap), targets, reduction="sum")
    (by_logits,) = torch.autograd.grad(plain, wide)
    off = 4 * float(logits.abs().max()) * UNIT  # roundings of numbers as large as logits
    filled = torch.nn.functional.pad(logits, (0, size * rows - vocab), value=1e9)

    def loss(ranks: TensorParallel) -> tuple[Tensor, Tensor]:
        first = ranks.group.place * rows
        mine = filled[:, first : first + rows].clone().requires_grad_()
        found = cross_entropy(mine * 1.0, targets, Words(vocab, cap), ranks)
        return found.detach(), torch.autograd.grad(found, mine)[0]

    found, _ = side_by_side(size, lambda group: loss(TensorParallel(group)))
    for ours, _gradient in found:
        assert torch.equal(ours, found[0][0])
        torch.testing.assert_close(ours.double(), plain.detach(), rtol=0, atol=tokens * off)
    ours = torch.cat([gradient for _, gradient in found], 1)
    assert not ours[:, vocab:].any(), "filling has a gradient"
    torch.testing.assert_close(ours[:, :vocab].double(), by_logits, rtol=0, atol=off)


def test_a_model_may_have_fewer_key_heads_than_ranks() -> None:
    model = tiny_model(kv_heads=2)
    assert splits_over_tensor_parallel(model, 4)
    assert not splits_over_tensor_parallel(model, 8)  # four heads of queries
    assert not splits_over_tensor_parallel(tiny_model(heads=6, kv_heads=3, head_dim=8), 2)
