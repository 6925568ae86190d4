"""Blocks with frozen weights and low-rank adapters, against the same written in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy_space import splits_over_tensor_parallel
from bigplan.runtime.layers import blocks
from bigplan.runtime.layers.carried import Turn
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.kinds import Block
from bigplan.runtime.layers.products import Products
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.linear.adapters import Adapters, side_by_side
from bigplan.runtime.linear.dropout import Drops
from bigplan.runtime.mixers.positions import Sharing, position_tables
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.spec.lora import Lora, adapted_steps, adapters, targets_of
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter
from tests.examples import examples
from tests.runtime.linear.lora_loop import plain_ways
from tests.runtime.linear.masks import Drawn
from tests.runtime.neighbours import side_by_side as on_threads
from tests.runtime.plans import models, shape_on, tiny_model

LENGTH = 48
ALL = tuple(Recompute)
# fp32 products of some hundred terms, and gradients that are sums of several of them.
CLOSE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _values(parameters: tuple[Parameter, ...], seed: int) -> dict[str, Tensor]:
    """Whole matrices; B's too are not zero, so that every gradient is."""
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: torch.randn(p.shape, generator=generator) * (0.1 if len(p.shape) > 1 else 1.0)
        for p in parameters
    }


class _Case:
    """A block, its adapters, an input and a gradient, whole."""

    def __init__(self, model: ModelSpec, lora: Lora) -> None:
        self.model, self.lora = model, lora
        self.frozen = _values(model.kinds()["block"], 1)
        self.trained = _values(adapters(model, lora), 2)
        generator = torch.Generator().manual_seed(3)
        self.x, self.gradient = torch.randn(2, 1, LENGTH, model.hidden, generator=generator)

    @property
    def turn(self) -> Turn:
        """What is dropped: of layer 3 and of the training's sequence 5."""
        drops = Drops(self.lora.dropout, 9, 3, torch.tensor([5]), LENGTH)
        return Turn(drops=drops if self.lora.dropout else None)

    def _read(self, target: str, x: Tensor) -> Tensor:
        if not (rate := self.lora.dropout):
            return x
        kept = Drawn(9, 3, target).kept(rate, [5], range(LENGTH), range(x.shape[-1]))
        return x * torch.from_numpy(kept).view(x.shape) / (1 - rate)

    def expected(self, times: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Output, gradient by the input, and the sums of the adapters' over so many passes."""
        tables = position_tables(self.model, LENGTH, "cpu", torch.float32)
        leaves = {name: value.clone().requires_grad_() for name, value in self.trained.items()}
        x = self.x.clone().requires_grad_()
        ways = plain_ways(self.lora.scale, read=self._read)
        output = blocks.block({**self.frozen, **leaves}, x, self.model, tables, ways)
        by_x, *others = torch.autograd.grad(output, [x, *leaves.values()], self.gradient)
        sums = {name: times * by for name, by in zip(leaves, others, strict=True)}
        return output.detach(), by_x, sums


def _flat(values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """One buffer of them in order, and each within it."""
    flat = torch.cat([value.flatten() for value in values.values()])
    ends = accumulate(value.numel() for value in values.values())
    views = {
        name: flat[end - value.numel() : end].view(value.shape)
        for (name, value), end in zip(values.items(), ends, strict=True)
    }
    return flat, views


def _passes(
    case: _Case, recompute: Recompute, times: int, *, in_order: bool = True
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The runtime's block, forward and backward so often into one flat sum."""
    flat, frozen = _flat(case.frozen)
    order = case.trained if in_order else dict(reversed(case.trained.items()))
    _, trained = _flat(order)
    _, totals = _flat({name: torch.full_like(value, torch.nan) for name, value in order.items()})
    tables = position_tables(case.model, LENGTH, "cpu", torch.float32)
    block = Block(case.model, tables, in_product=True)
    block.lora = case.lora
    output = by_input = case.x
    for number in range(times):
        kept = KeptActivations(weights=flat.view(torch.uint8))
        output = block.record({**frozen, **trained}, case.x, kept, recompute, case.turn)
        assert not kept.parameters
        kept.sums.open(totals, fresh=number == 0)
        by_input, by_parameters = kept.gradients(case.gradient)
        assert not by_parameters
    return output, by_input, totals


def _apart(ours: Tensor, exact: Tensor, beside: float = 0.0) -> float:
    """Relative distance of whole tensors; `beside`: a norm below which theirs are roundings."""
    return float((ours - exact).detach().norm() / max(float(exact.norm()), beside))


def _roundings(gradients: Mapping[str, Tensor]) -> float:
    """A norm of gradients that cancel: with a window of one token nothing depends on queries.

    Of it CLOSE are 5e-7 of the largest gradient, a few roundings of fp32.
    """
    return 0.05 * max(float(gradient.norm()) for gradient in gradients.values())


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    drawn = draw(models().filter(lambda model: not (model.delta_rule or model.state_space)))
    model = drawn.seen_by("block")
    known = targets_of(model)
    targets = draw(st.none() | st.lists(st.sampled_from(known), min_size=1, unique=True))
    lora = Lora.model_validate(
        {"rank": draw(st.sampled_from((1, 3, 8))), "targets": targets, "alpha": 5.0}
        | {"dropout": draw(st.sampled_from((0.0, 0.3)))}
        | ({"rank_stabilised": True} if draw(st.booleans()) else {})
    )
    return _Case(model.model_copy(update={"max_sequence_length": LENGTH}), lora)


@pytest.mark.parametrize("recompute", ALL, ids=str)
@given(_cases(), st.integers(1, 2), st.booleans())
@settings(max_examples=examples(15), derandomize=True, deadline=None)
def test_a_block_with_adapters_computes_what_the_formula_says(
    recompute: Recompute, case: _Case, times: int, in_order: bool
) -> None:
    """Whether or not the A's of one input lie side by side."""
    output, by_input, sums = _passes(case, recompute, times, in_order=in_order)
    expected, by_x, totals = case.expected(times)
    if recompute is not Recompute.FULL:  # which computes no output in the backward
        assert _apart(output, expected) < CLOSE
    assert _apart(by_input, by_x) < CLOSE
    assert sums.keys() == totals.keys()
    for name, total in totals.items():
        assert _apart(sums[name], total, _roundings(totals)) < CLOSE, name


@given(_cases())
@settings(max_examples=examples(10), derandomize=True, deadline=None)
def test_a_forward_alone_adds_what_adapters_give(case: _Case) -> None:
    tables = position_tables(case.model, LENGTH, "cpu", torch.float32)
    ways = Products(frozen=True, scale=case.lora.scale, drops=case.turn.drops).ways
    with torch.no_grad():
        found = blocks.block({**case.frozen, **case.trained}, case.x, case.model, tables, ways)
    assert _apart(found, case.expected(1)[0]) < CLOSE


def test_products_of_one_input_read_it_once() -> None:
    """A's that lie side by side are one matrix of the same memory, and so are their sums."""
    lora = Lora(rank=4, targets=("q_proj", "v_proj"))
    _, views = _flat(_values(adapters(tiny_model(), lora), 1))
    found = Products(sums=Sums(), frozen=True, scale=lora.scale).adapters(
        views, ("q_proj", "k_proj", "v_proj")
    )
    assert isinstance(found, Adapters)
    assert found.down.data_ptr() == views["q_proj.lora_A"].data_ptr()
    assert torch.equal(found.down[4:], views["v_proj.lora_A"])
    assert set(found.up) == {0, 2}
    assert side_by_side([views["v_proj.lora_A"], views["q_proj.lora_A"]]) is None


@pytest.mark.parametrize("targets", [("q_proj",), ("down_proj",), ("o_proj", "gate_proj")])
def test_inputs_are_kept_for_targets_alone(targets: tuple[str, ...]) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    lora = Lora(rank=2, targets=targets)
    model = tiny_model()
    values = _values(model.kinds()["block"], 1) | _values(adapters(model, lora), 2)
    products = Products(sums=Sums(), frozen=True, scale=lora.scale)
    inputs = {
        name: torch.randn(1, 8, width, requires_grad=True)
        for name, width in {"q_proj": 32, "o_proj": 32, "gate_proj": 32, "down_proj": 64}.items()
    }
    for name, x in inputs.items():
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            products.linears(values, (name,), x)
            products.alone(values, name, x)
        kept = sum(tensor.data_ptr() == x.data_ptr() for tensor in saved)
        assert kept == (2 if name in targets else 0), name


@given(
    models(kv_heads=(1, 2, 4)).filter(lambda model: not (model.delta_rule or model.state_space)),
    st.sampled_from((2, 4)),
    st.booleans(),
    st.sampled_from(ALL),
    st.sampled_from((0.0, 0.3)),
)
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_ranks_give_parts_of_the_gradients(
    model: ModelSpec, tp: int, parts: bool, recompute: Recompute, dropout: float
) -> None:
    """What a rank has alone is whole; what several have is the sum of theirs."""
    model = model.seen_by("block")
    assume(splits_over_tensor_parallel(model, tp))
    case = _Case(
        model.model_copy(update={"max_sequence_length": LENGTH}), Lora(rank=4, dropout=dropout)
    )
    described = {p.name: p for p in adapters(model, case.lora)}
    whole = {p.name: p for p in model.kinds()["block"]}

    def local(p: Parameter, value: Tensor, rank: int) -> Tensor:
        rows, columns = p.local(tp)
        place = rank // p.holders(tp)
        matrix = value.view(p.matrix)
        if p.split == "replicated":
            return value
        if p.cuts_columns:
            return matrix[:, place * columns : (place + 1) * columns].reshape(shape_on(p, tp))
        return matrix[place * rows : (place + 1) * rows].view(shape_on(p, tp))

    def work(group: object) -> tuple[Tensor, dict[str, Tensor]]:
        ranks = TensorParallel(group, parts)  # type: ignore[arg-type]
        rank = ranks.group.place
        flat, frozen = _flat({n: local(whole[n], v, rank) for n, v in case.frozen.items()})
        _, trained = _flat({n: local(described[n], v, rank) for n, v in case.trained.items()})
        _, totals = _flat({n: torch.full_like(v, torch.nan) for n, v in trained.items()})
        tables = position_tables(model, LENGTH, "cpu", torch.float32, Sharing(ranks))
        block = Block(model, tables, ranks, in_product=True)
        block.lora = case.lora
        kept = KeptActivations(weights=flat.view(torch.uint8))
        hidden = ranks.hidden(1, LENGTH, model.hidden)
        mine, gradient = (ranks.own(t.flatten(0, -2)).view(hidden) for t in (case.x, case.gradient))
        block.record({**frozen, **trained}, mine, kept, recompute, case.turn)
        kept.sums.open(totals, fresh=True)
        by_input, _ = kept.gradients(gradient)
        kept.sums.close(ranks.counted_elsewhere(adapted_steps(model, "block", case.lora)))
        return by_input.flatten(0, -2), totals

    found, _ = on_threads(tp, work)
    _, by_x, totals = case.expected(1)
    by_input = torch.cat([by for by, _ in found]) if parts else found[0][0]
    assert _apart(by_input, by_x.flatten(0, -2)) < CLOSE
    for name, p in described.items():
        holders = p.holders(tp)
        for rank in range(tp):
            first = rank // holders * holders
            mine = sum(found[other][1][name] for other in range(first, first + holders))
            assert isinstance(mine, Tensor)
            exact = local(p, totals[name], rank)
            assert _apart(mine, exact, _roundings(totals)) < 2 * CLOSE, name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bf16_is_rounded_where_products_end(device: str) -> None:
    """Gradients are added in fp32: 1/256 of their size off at most, as their factors are."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a.weight": (96, 64), "a.lora_A": (8, 64), "a.lora_B": (96, 8)}
    exact = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    p = {name: value.to(device, torch.bfloat16) for name, value in exact.items()}
    x = torch.randn(128, 64, generator=generator).to(device, torch.bfloat16).requires_grad_()
    gradient = torch.randn(128, 96, generator=generator).to(device, torch.bfloat16)
    totals = {n: torch.full(shapes[n], torch.nan, device=device) for n in ("a.lora_A", "a.lora_B")}
    sums = Sums()
    (y,) = Products(ONE, sums, frozen=True, scale=2.0).linears(p, ("a",), x)
    sums.open(totals, fresh=True)
    (by_x,) = torch.autograd.grad(y, x, gradient)
    wide = {name: value.double() for name, value in p.items()}
    rows, by = x.detach().double(), gradient.double()
    narrow, by_narrow = rows @ wide["a.lora_A"].T, by @ wide["a.lora_B"]
    near = 2.0**-7
    assert _apart(y.double(), rows @ wide["a.weight"].T + 2 * narrow @ wide["a.lora_B"].T) < near
    assert _apart(by_x.double(), by @ wide["a.weight"] + 2 * by_narrow @ wide["a.lora_A"]) < near
    assert _apart(totals["a.lora_A"].double(), 2 * by_narrow.T @ rows) < near
    assert _apart(totals["a.lora_B"].double(), 2 * by.T @ narrow) < near
