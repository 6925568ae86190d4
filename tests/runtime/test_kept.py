"""What a layer keeps is what the planner counted, and comes back from host memory as it was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.build import build_graph
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.runtime import blocks
from bigplan.runtime.context import DTYPES
from bigplan.runtime.kept import SMALL, Kept
from bigplan.runtime.slab import PAGE, align_up, aligned_empty
from bigplan.spec.model import ModelSpec
from tests.runtime.plans import tiny_model, tiny_training


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


class _Layer:
    """A block's flat weights in a buffer of their own, and one micro-batch."""

    def __init__(self, model: ModelSpec, length: int, precision: str) -> None:
        self.model, self.dtype = model, DTYPES[precision]
        training = tiny_training(1, sequence_length=length, precision=precision)
        self.kind: LayerKind = build_graph(model, training, Strategy(dp=1)).kinds["block"]
        self.rope = blocks.rope_table(model, length, "cpu", self.dtype)
        generator = torch.Generator().manual_seed(length)
        flat = torch.randn(self.kind.parameters, generator=generator) * 0.1
        self.weights = flat.to(self.dtype).view(torch.uint8)
        self.x = torch.randn(1, length, model.hidden, generator=generator).to(self.dtype)
        self.gradient = torch.randn(1, length, model.hidden, generator=generator).to(self.dtype)

    def record(self, recompute: Recompute = Recompute.NONE) -> Kept:
        constants = frozenset(t.untyped_storage().data_ptr() for t in self.rope)
        kept = Kept(weights=self.weights, constants=constants)
        cheap = kept.run_again if recompute is Recompute.SELECTIVE else blocks.plainly
        views, start = {}, 0
        for p in self.model.kinds()["block"]:
            count = torch.Size(p.shape).numel()
            part = self.weights.view(self.dtype)[start : start + count].view(p.shape)
            views[p.name] = part.detach().requires_grad_()
            start += count
        kept.parameters = list(views.values())
        kept.record(lambda x: blocks.block(views, x, self.model, self.rope, cheap), self.x)
        return kept

    def plain(self) -> tuple[Tensor, ...]:
        return self.record().gradients(self.gradient)


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
    return _Layer(model, length, draw(st.sampled_from(("fp32", "bf16"))))


@given(layers())
@settings(max_examples=25, derandomize=True, deadline=None)
def test_a_layer_keeps_what_the_planner_counted(layer: _Layer) -> None:
    for recompute in (Recompute.NONE, Recompute.SELECTIVE):
        assert layer.record(recompute).nbytes == layer.kind.kept(recompute)
    boundary = Kept()
    boundary.keep_input(layer.x)
    assert boundary.nbytes == layer.kind.kept(Recompute.FULL)


@given(layers(), st.sampled_from((Recompute.NONE, Recompute.SELECTIVE)))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_activations_come_back_in_the_pages_that_were_reserved(
    layer: _Layer, recompute: Recompute
) -> None:
    kept = layer.record(recompute)
    reserved = aligned_empty(align_up(layer.kind.kept(recompute), PAGE))
    kept.move_out(reserved)
    assert not any(isinstance(saved, Tensor) for saved in kept.saved)
    kept.fetch(reserved, [], torch.device("cpu"))
    reserved.fill_(0xFF)  # the fetched copy is what the backward reads
    for ours, plain in zip(kept.gradients(layer.gradient), layer.plain(), strict=True):
        assert torch.equal(ours, plain)


def test_activations_that_fill_their_pages_exactly_need_no_padding() -> None:
    """Statistics of an odd number of tokens are no multiple of 16 bytes, and pages may be full."""
    model = tiny_model(max_sequence_length=4096)
    full = [
        length
        for length in range(SMALL // 4, 4096)
        if length % 4
        for kept in [
            build_graph(model, tiny_training(1, sequence_length=length), Strategy(dp=1))
            .kinds["block"]
            .kept(Recompute.NONE)
        ]
        if -kept % PAGE < 12
    ]
    assert full
    layer = _Layer(model, full[0], "fp32")
    kept = layer.record()
    kept.move_out(aligned_empty(align_up(layer.kind.kept(Recompute.NONE), PAGE)))


def test_weights_are_looked_up_where_they_are_at_backward() -> None:
    """The graph holds no memory of parameters: their slot may change, or hold others meanwhile."""
    layer = _Layer(tiny_model(), 32, "fp32")
    plain = layer.plain()
    kept = layer.record()
    kept.weights = layer.weights.clone()
    layer.weights.fill_(0xFF)
    for ours, expected in zip(kept.gradients(layer.gradient), plain, strict=True):
        assert torch.equal(ours, expected)


def test_more_than_was_reserved_is_refused() -> None:
    layer = _Layer(tiny_model(max_sequence_length=512), 256, "fp32")
    with pytest.raises(AssertionError, match="the plan reserved"):
        layer.record().move_out(aligned_empty(PAGE))
