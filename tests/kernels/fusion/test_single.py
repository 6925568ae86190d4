"""Single operators as kernels: what the planner counts of them is what they move."""

from __future__ import annotations

import pytest

from bigplan.graph.block import block
from bigplan.graph.operators import Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.kernels.fusion import single
from bigplan.kernels.fusion.fuse import work_of
from bigplan.kernels.fusion.price import Fused, Pricer
from bigplan.kernels.fusion.single import Single
from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.gpu import find_gpu
from bigplan.spec.multiprocessor import find_multiprocessor, list_multiprocessors
from bigplan.spec.training import Training

GPU = "h200-sxm"
TOKENS = 4096
PRICER = Pricer(find_gpu(GPU), find_multiprocessor(GPU))


def _kernel(made: Single) -> Fused:
    nodes = [node for node in made.graph.nodes if not node.layout]
    fused = PRICER.fused(made.graph, nodes, frozenset(made.wanted))
    assert isinstance(fused, Fused), fused
    return fused


def _moved(made: Single) -> float:
    work = work_of(_kernel(made).body)
    return work.read + work.written


def _streams(name: str, kernels: str) -> tuple[dict[str, Stream], dict[str, Stream]]:
    fields = {"sequence_length": TOKENS, "global_batch": 1, "kernels": kernels}
    training = Training.model_validate(fields)
    kind = block(RankShape(find_model(name), training, Strategy(dp=1), fused=True))
    return _named(kind.forward), _named(kind.backward)


def _named(operators: tuple[Operator, ...]) -> dict[str, Stream]:
    return {one.name: one for one in operators if isinstance(one, Stream)}


@pytest.mark.parametrize("gpu", list_multiprocessors())
def test_the_norms_of_every_model_of_up_to_16384_columns_have_kernels(gpu: str) -> None:
    prices = Pricer(find_gpu(gpu), find_multiprocessor(gpu))
    models = [find_model(name) for name in list_models()]
    kinds = {(model.norm, model.hidden) for model in models if model.hidden <= 16384}
    assert ("layernorm", 12288) in kinds
    for kind, columns in sorted(kinds):
        rows, biased = (1, TOKENS), kind == "layernorm"
        back = single.norm_backward(kind, rows, columns, "bf16", biased=biased, beside=True)
        ahead = single.norm(kind, rows, columns, "bf16", 1e-5, biased=biased, added=True)
        frozen = single.norm_backward(kind, rows, columns, "bf16", frozen=True, beside=True)
        for made in (ahead, back, frozen):
            fused = prices.fused(made.graph, made.graph.nodes, frozenset(made.wanted))
            assert isinstance(fused, Fused), (kind, columns, fused)


@pytest.mark.parametrize("name", ["gpt2-xl", "opt-13b", "llama-3-8b"])
def test_the_planner_counts_the_bytes_of_the_kernels(name: str) -> None:
    model = find_model(name)
    kind, mlp, columns = model.norm, model.mlp, model.hidden
    rows, biased = (1, TOKENS), model.norm == "layernorm"
    ahead, back = _streams(name, "generated")
    # A row's statistics, the weights and a strip's sums are below a hundredth.
    plain = single.norm(kind, rows, columns, "bf16", 1e-5, biased=biased)
    assert _moved(plain) == pytest.approx(ahead["input norm"].nbytes, rel=0.01)
    added = single.norm(kind, rows, columns, "bf16", 1e-5, biased=biased, added=True)
    both = ahead["post norm"].nbytes + ahead["attention residual"].nbytes
    assert _moved(added) == pytest.approx(both, rel=0.01)
    gradients = single.norm_backward(kind, rows, columns, "bf16", biased=biased, beside=True)
    both = back["input norm"].nbytes + back["attention residual"].nbytes
    assert _moved(gradients) == pytest.approx(both, rel=0.01)
    alone = single.norm_backward(kind, rows, columns, "bf16", frozen=True, beside=True)
    assert alone.wanted == ("total",)
    assert _moved(alone) == pytest.approx(both, rel=0.01)  # sums of a strip are small
    shape = (*rows, model.ffn)
    assert mlp != "clamped_swiglu"
    assert mlp != "xielu"
    assert _moved(single.activation(mlp, shape, "bf16")) == ahead["activation"].nbytes
    assert _moved(single.activation_backward(mlp, shape, "bf16")) == back["activation"].nbytes


def test_xielu_moves_the_bytes_of_an_activation_of_one_tensor() -> None:
    """But for its numbers, and two sums a row."""
    ahead, back = _streams("gpt2-xl", "generated")
    shape = (1, TOKENS, find_model("gpt2-xl").ffn)
    assert _moved(single.xielu(shape, "bf16")) == pytest.approx(ahead["activation"].nbytes, 1e-3)
    moved = _moved(single.xielu_backward(shape, "bf16"))
    assert moved == pytest.approx(back["activation"].nbytes, 1e-3)


def test_a_layer_norms_sums_are_in_its_kernels() -> None:
    """Two sums forward and back of GPT-2's residual stream cost passes of their own otherwise."""
    for side, (ours, plain) in enumerate(
        zip(_streams("gpt2-xl", "generated"), _streams("gpt2-xl", "torch"), strict=True)
    ):
        hidden = TOKENS * 1600 * 2
        saved = sum(one.nbytes for one in plain.values()) - sum(o.nbytes for o in ours.values())
        assert saved == (4 if side else 1) * hidden


def test_the_model_of_a_kernel_and_the_planners_price_agree() -> None:
    """Where tensors are large both are bytes at the rate of a copy."""
    ahead, _ = _streams("llama-3-8b", "generated")
    made = _kernel(single.norm("rmsnorm", (1, TOKENS), 4096, "bf16", 1e-5))
    rate = PRICER.device.stream_rate
    assert made.seconds == pytest.approx(ahead["input norm"].nbytes / rate, rel=0.25)
    inner = _kernel(single.activation("swiglu", (1, TOKENS, 14336), "bf16"))
    assert inner.seconds == pytest.approx(ahead["activation"].nbytes / rate, rel=0.1)


@pytest.mark.parametrize("rows", [(4, 64, 1), (1, 64, 1), (2, 1, 2), (4, 64, 2)])
def test_norms_of_heads_of_which_there_may_be_one(rows: tuple[int, ...]) -> None:
    """Statistics of one head, [b, s, 1, 1], are no images whose channels lie side by side."""
    for made in (
        single.norm("rmsnorm", rows, 16, "fp32", 1e-5, biased=False, added=False),
        single.norm_backward("rmsnorm", rows, 16, "fp32", biased=False, beside=False),
    ):
        assert _kernel(made).tile.rows > 0
