"""What a layer keeps comes back from host memory as it was, in the bytes that were reserved."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.build import build_graph
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import PAGE
from bigplan.runtime.context import DTYPES
from bigplan.runtime.layers.kept import SMALL, KeptActivations
from bigplan.runtime.layers.kinds import Block
from bigplan.runtime.memory.slab import align_up, aligned_empty
from bigplan.runtime.mixers import positions
from bigplan.spec.model import ModelSpec
from tests.examples import examples
from tests.runtime.plans import tiny_model, tiny_training

GRAPHS = [Recompute.NONE, Recompute.SELECTIVE, Recompute.MLP]  # which keep one from the forward on


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


class _Layer:
    """A block's flat weights in a buffer of their own, and one micro-batch."""

    def __init__(
        self, model: ModelSpec, length: int, precision: str, *, in_product: bool = True
    ) -> None:
        self.model, self.dtype = model, DTYPES[precision]
        training = tiny_training(1, sequence_length=length, precision=precision)
        self.kind: LayerKind = build_graph(model, training, Strategy(dp=1)).kinds["block"]
        rope = positions.position_tables(model, length, "cpu", self.dtype)
        self.block = Block(model, rope, in_product=in_product)
        generator = torch.Generator().manual_seed(length)
        flat = torch.randn(self.kind.parameters, generator=generator) * 0.1
        self.weights = flat.to(self.dtype).view(torch.uint8)
        self.x = torch.randn(1, length, model.hidden, generator=generator).to(self.dtype)
        self.gradient = torch.randn(1, length, model.hidden, generator=generator).to(self.dtype)

    def record(self, recompute: Recompute = Recompute.NONE) -> KeptActivations:
        """What a forward keeps; FULL: what is recorded just before the backward."""
        kept = KeptActivations(weights=self.weights)
        self.block.record(self.views(self.weights.view(self.dtype)), self.x, kept, recompute)
        return kept

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The block's tensors in a flat buffer."""
        parameters = self.model.kinds()["block"]
        parts = torch.split(flat, [torch.Size(p.shape).numel() for p in parameters])
        return {p.name: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}

    def gradients(self, kept: KeptActivations) -> dict[str, Tensor]:
        """By the input (`x`), and the sums that one backward has started."""
        sums = self.views(torch.full((self.kind.parameters,), torch.nan))
        kept.sums.open(sums, fresh=True)
        by_input, others = kept.gradients(self.gradient)
        kept.sums.add(others)
        assert not kept.sums.fresh, "a parameter got no gradient"
        return {"x": by_input} | sums

    def plain(self) -> dict[str, Tensor]:
        return self.gradients(self.record())


def _same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@st.composite
def layers(draw: st.DrawFn) -> _Layer:
    """Lengths at which every saved tensor is large enough to be moved, page borders among them."""
    flag = st.booleans()
    model = tiny_model(
        kv_heads=draw(st.sampled_from((1, 2, 4))),
        qk_norm=draw(flag),
        qkv_bias=draw(flag),
        max_sequence_length=4096,
    )
    length = draw(st.integers(SMALL // 4, SMALL // 4 + 300) | st.sampled_from((511, 513, 1023)))
    precision = draw(st.sampled_from(("fp32", "bf16")))
    return _Layer(model, length, precision, in_product=draw(flag))


@given(layers(), st.sampled_from(GRAPHS))
@settings(max_examples=examples(25), derandomize=True, deadline=None)
def test_activations_come_back_in_the_pages_that_were_reserved(
    layer: _Layer, recompute: Recompute
) -> None:
    kept = layer.record(recompute)
    reserved = aligned_empty(align_up(layer.kind.kept(recompute), PAGE))
    kept.move_out(reserved)
    assert not any(isinstance(saved, Tensor) for saved in kept.saved)
    kept.fetch(reserved, [], torch.device("cpu"))
    reserved.fill_(0xFF)  # the fetched copy is what the backward reads
    _same(layer.gradients(kept), layer.plain())


@given(layers(), st.sampled_from(GRAPHS))
@settings(max_examples=examples(10), derandomize=True, deadline=None)
def test_activations_that_stay_leave_their_storages_to_the_next(
    layer: _Layer, recompute: Recompute
) -> None:
    kept = layer.record(recompute)
    kept.stay()
    assert not any(isinstance(saved, Tensor) for saved in kept.saved)
    storages = kept.fetched
    _same(layer.gradients(kept), layer.plain())
    other, reserved = layer.record(recompute), aligned_empty(layer.kind.kept(recompute))
    other.move_out(reserved)
    other.fetch(reserved, storages, torch.device("cpu"))
    assert other.fetched is storages
    _same(layer.gradients(other), layer.plain())


def test_activations_that_fill_their_pages_exactly_need_no_padding() -> None:
    """Statistics of an odd number of tokens are no multiple of 16 bytes, and pages may be full."""
    model = tiny_model(max_sequence_length=4096)
    full = next(
        length
        for length in range(SMALL // 4, 4096)
        if length % 4
        for kept in [
            build_graph(model, tiny_training(1, sequence_length=length), Strategy(dp=1))
            .kinds["block"]
            .kept(Recompute.NONE)
        ]
        if -kept % PAGE < 12
    )
    layer = _Layer(model, full, "fp32")
    kept = layer.record()
    kept.move_out(aligned_empty(align_up(layer.kind.kept(Recompute.NONE), PAGE)))


def test_weights_are_looked_up_where_they_are_at_backward() -> None:
    """The graph holds no memory of parameters: their slot may change, or hold others meanwhile."""
    layer = _Layer(tiny_model(), 32, "fp32")
    plain = layer.plain()
    kept = layer.record()
    kept.weights = layer.weights.clone()
    layer.weights.fill_(0xFF)
    _same(layer.gradients(kept), plain)


@given(layers())
@settings(max_examples=examples(25), derandomize=True, deadline=None)
def test_gradients_do_not_need_the_output(layer: _Layer) -> None:
    again = layer.record(Recompute.FULL)
    activation = layer.x.numel() // layer.model.hidden * layer.model.ffn * layer.dtype.itemsize
    assert again.nbytes == layer.kind.saved - activation  # which the backward makes again
    _same(layer.gradients(again), layer.plain())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", Recompute)
def test_gradients_added_in_products_are_autograds(precision: str, recompute: Recompute) -> None:
    model = tiny_model(qk_norm=True, qkv_bias=True, mlp_bias=True)
    fused, plain = (_Layer(model, 24, precision, in_product=flag) for flag in (True, False))
    expected = plain.plain()
    for name, ours in fused.gradients(fused.record(recompute)).items():
        # Autograd rounds them to the weights' dtype, by half its eps at most.
        error = (ours.float() - expected[name].float()).norm()
        assert error <= torch.finfo(fused.dtype).eps * expected[name].float().norm(), name


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("recompute", GRAPHS)
def test_what_was_kept_is_given_back_at_once(recompute: Recompute, experts: int) -> None:
    """Not by a collection of cycles: until that comes, a ring's memory would be taken twice."""
    model = tiny_model(experts=experts, experts_per_token=min(2, experts), max_sequence_length=512)
    layer = _Layer(model, 512, "fp32")
    gc.collect()
    gc.disable()
    try:
        kept = layer.record(recompute)
        kept.stay()
        storages = [weakref.ref(storage) for storage in kept.fetched]
        layer.gradients(kept)
        del kept
        assert storages
        assert all(storage() is None for storage in storages)
    finally:
        gc.enable()


def test_more_than_was_reserved_is_refused() -> None:
    layer = _Layer(tiny_model(max_sequence_length=512), 256, "fp32")
    with pytest.raises(AssertionError, match="the plan reserved"):
        layer.record().move_out(aligned_empty(PAGE))
