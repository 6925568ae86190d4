"""Experts on a GPU: kernels for any numbers of rows, which nothing waits for, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.build import graph_of_shape
from bigplan.graph.experts import inner_bytes
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime import generated
from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts import mlp as expert_mlp
from bigplan.runtime.experts.mixture import EXPERTS, Mixture
from bigplan.runtime.layers.sums import Sums
from bigplan.spec.catalog import find_cluster
from bigplan.spec.model import ModelSpec
from tests.runtime.plans import tiny_model, tiny_training

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
TOKENS = 2048
# Products of some hundred terms in fp32, rounded to bf16 once or, in a weighted row, a few times.
APART = 2**-7


@pytest.fixture(autouse=True)
def _only_with_kernels() -> None:
    if not experts.stays_on_device(DEVICE, BF16):
        pytest.skip("torch has no kernel of grouped products for this GPU")


def _make(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 0.1).to(DEVICE, BF16)


def _apart(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize(
    "counts", [(5, 0, 130, 1, 0, 64), (200, 0, 0), (0, 0, 7), (1,) * 40, (0, 300)]
)
@pytest.mark.parametrize("widths", [(64, 24), (256, 512), (8, 136)])
def test_products_of_any_numbers_of_rows(
    counts: tuple[int, ...], widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and weights' gradients by kernels are those of expert by expert."""
    (hidden, ffn), number = widths, len(counts)
    ends = torch.tensor(counts, dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    rows, gradient = (_make(sum(counts), width, seed=width) for width in (hidden, ffn))
    weight = _make(ffn * number, hidden, seed=1)

    def all_products() -> list[Tensor]:
        total = torch.full(weight.shape, torch.nan, device=DEVICE)
        experts.add_grouped(total, (gradient, rows), ends, fresh=True)
        once = total.clone()
        experts.add_grouped(total, (gradient, rows), ends, fresh=False)
        return [
            experts.grouped(rows, experts.entering(weight, number), ends),
            experts.grouped(gradient, experts.leaving(weight, number), ends),
            once,
            total,
        ]

    found = all_products()
    monkeypatch.setattr(experts, "stays_on_device", lambda *_: False)
    for ours, plain in zip(found, all_products(), strict=True):
        assert _apart(ours, plain) < APART


class _Case(NamedTuple):
    """An MLP's passes to run again and again."""

    p: dict[str, Tensor]
    sums: Sums
    x: Tensor
    normed: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, model: ModelSpec) -> _Case:
        shapes = {q.name: q.shape for q in model.kinds()["block"] if q.name in EXPERTS}
        p = {name: _make(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        sums = Sums()
        sums.open({n: torch.zeros(t.shape, device=DEVICE) for n, t in p.items()}, fresh=False)
        x, normed, gradient = (_make(1, TOKENS, model.hidden, seed=10 + i) for i in range(3))
        return cls(p, sums, x.requires_grad_(), normed.requires_grad_(), gradient)


def _model(**changes: object) -> ModelSpec:
    sizes = {"hidden": 512, "ffn": 768, "heads": 8, "experts": 16, "experts_per_token": 4}
    return tiny_model(layers=1, router_loss=0.1, **sizes | changes)


# Experts with biases and a clamped activation, as GPT-OSS has them.
STYLES = [{}, {"mlp": "clamped_swiglu", "mlp_bias": True}]


def _mixture(
    case: _Case, *, kernels: bool = True, gated: bool = True, low: bool = False
) -> Mixture:
    training = tiny_training(1, precision="bf16", fp8_gemms=low)
    library = generated.library_for(training, DEVICE) if kernels else None
    how = Mixture(sums=case.sums, balance=lambda: 0.5, gated=gated)
    grouped = generated.matrices_for(training, library).grouped
    return how._replace(rows=generated.rows_of(library), grouped=grouped)


def _passes(case: _Case, model: ModelSpec, how: Mixture) -> Callable[[], list[Tensor]]:
    """A forward and a backward; sums are emptied first."""

    def run() -> list[Tensor]:
        for total in case.sums.totals.values():
            total.zero_()
        output = expert_mlp.mlp(case.p, case.x, case.normed, model, how)
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(output, [case.x, case.normed], case.gradient)
        return [output.detach(), *found, *case.sums.totals.values()]

    return run


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("low", [False, True], ids=["bf16", "fp8"])
@pytest.mark.usefixtures("_no_waiting")
def test_nothing_waits_and_graphs_repeat_it(
    style: dict[str, object], *, kernels: bool, gated: bool, low: bool
) -> None:
    model = _model(**style)
    case = _Case.of(model)
    run = _passes(case, model, _mixture(case, kernels=kernels, gated=gated, low=low))
    before = [one.clone() for one in run()]  # kernels are compiled and loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    again = [one.clone() for one in run()]
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, before, again))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():  # other experts are chosen
        case.normed.copy_(_make(1, TOKENS, model.hidden, seed=99))
    graph.replay()
    repeated = [one.clone() for one in captured]
    assert all(map(torch.equal, run(), repeated))
    assert not torch.equal(repeated[0], before[0])


@pytest.mark.parametrize("style", STYLES)
def test_kernels_of_rows_compute_what_torchs_operators_do(style: dict[str, object]) -> None:
    model = _model(**style)
    case = _Case.of(model)
    ours, plain = (
        [one.clone() for one in _passes(case, model, _mixture(case, kernels=kernels))()]
        for kernels in (True, False)
    )
    for one, other in zip(ours, plain, strict=True):
        assert _apart(one, other) < APART


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("low", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("changes", [*STYLES, {"experts": 4, "experts_per_token": 1, "ffn": 2048}])
def test_a_backward_needs_no_more_than_was_counted(
    changes: dict[str, object], *, gated: bool, low: bool
) -> None:
    """The activation counts as saved, so one that is not kept comes on top of the workspace."""
    model = _model(**changes)
    case = _Case.of(model)
    how = _mixture(case, gated=gated, low=low)
    _passes(case, model, how)()
    output = expert_mlp.mlp(case.p, case.x, case.normed, model, how)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(output, [case.x, case.normed], case.gradient)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gpu = find_cluster("h200-1x").group.gpu
    training = tiny_training(1, sequence_length=TOKENS, precision="bf16", fp8_gemms=low)
    shape = RankShape.on(gpu, model, training, Strategy(dp=1))
    counted = graph_of_shape(shape, None).kinds["block"].backward_workspace
    assert peak < 1.1 * (counted + gated * inner_bytes(shape))
