"""`optimise(memory=)`: linear + cross-entropy in chunks where captured code has them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigplan.cost.compute import gemm_seconds
from bigplan.errors import InputError
from bigplan.graph.operators import Gemm
from bigplan.kernels import loss as chunks
from bigplan.kernels.loss import ROWS
from bigplan.kernels.optimised import optimise
from tests.kernels.generated import DEVICE, error, random

FP32 = 3e-6  # as in test_generated.py
WORDS, WIDTH, TOKENS = 50, 8, 2 * ROWS - 100  # two chunks
MEMORY = ROWS * WORDS * 4
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class LanguageModel(nn.Module):
    """A head and its loss, with logits in fp32 as Hugging Face has them."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(x).float()
        return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def _targets() -> Tensor:
    targets = torch.arange(TOKENS, device=DEVICE) * 7 % WORDS
    targets[::5] = -100
    return targets


def _operators(ours: Any) -> list[str]:
    """Of a function or module that has run."""
    (plan,) = ours.kernels.plans
    return [node.op for node in plan.graph.nodes]


TAKEN: dict[str, Loss] = {
    "linear": lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
    "cast, sum": lambda x, w, t: F.cross_entropy((x @ w.T).float(), t, reduction="sum"),
    "viewed": lambda x, w, t: F.cross_entropy(
        torch.matmul(x.view(4, -1, WIDTH), w.t()).reshape(-1, WORDS), t, ignore_index=-100
    ),
}
LEFT: dict[str, Loss] = {
    "bias": lambda x, w, t: F.cross_entropy(F.linear(x, w, w[:, 0]), t),
    "smoothing": lambda x, w, t: F.cross_entropy(x @ w.T, t, label_smoothing=0.1),
    "a word that is ignored": lambda x, w, t: F.cross_entropy(
        x @ w.T, t.clamp_min(0), ignore_index=3
    ),
    "a loss a token": lambda x, w, t: F.cross_entropy(x @ w.T, t, reduction="none").sum(),
    "other arithmetic": lambda x, w, t: F.cross_entropy(2 * (x @ w.T), t),
    "other rows": lambda x, w, t: F.cross_entropy((x @ w.T).view(-1, 2 * WORDS), t[::2]),
}


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_loss_and_gradients(name: str, interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not interpreted:  # what runs where there is no Triton
        monkeypatch.setattr(chunks, "runs_kernels", lambda _: False)
    function, targets = TAKEN[name], _targets()
    leaves = [random(0, TOKENS, WIDTH).requires_grad_(), random(1, WORDS, WIDTH).requires_grad_()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = function(wide[0], wide[1], targets)
    ours = optimise(function, memory=MEMORY)
    loss = ours(*leaves, targets)
    assert error(loss.detach(), right.detach()) < FP32
    for scale in (1, 3):  # the first backward leaves what the second reads
        found = torch.autograd.grad(scale * loss, leaves, retain_graph=True)
        expected = torch.autograd.grad(scale * right, wide, retain_graph=True)
        assert all(error(a, b) < 3 * FP32 for a, b in zip(found, expected, strict=True))
    operators = _operators(ours)
    assert "linear_cross_entropy" in operators
    assert "mm" not in operators
    (plan,) = ours.kernels.plans
    assert plan.kept_bytes == (TOKENS + WORDS) * WIDTH * 4  # gradients alone: no logits


@pytest.mark.parametrize("name", LEFT)
def test_what_is_another_loss_stays_as_it_is(name: str) -> None:
    x, weight, targets = random(0, TOKENS, WIDTH), random(1, WORDS, WIDTH), _targets()
    ours = optimise(LEFT[name], memory=MEMORY)
    right = LEFT[name](x.double(), weight.double(), targets)
    assert error(ours(x, weight, targets), right) < FP32
    assert "linear_cross_entropy" not in _operators(ours)


def test_logits_are_never_whole_unless_somebody_asks() -> None:
    given = random(0, TOKENS, WIDTH), random(1, WORDS, WIDTH), _targets()
    whole = optimise(TAKEN["linear"])
    whole(*given)
    assert {"mm", "cross_entropy_rows"} <= set(_operators(whole))

    def both(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, w)
        return F.cross_entropy(logits, t), logits

    for ours, right in zip(optimise(both, memory=MEMORY)(*given), both(*given), strict=True):
        assert error(ours, right.double()) < FP32


def test_a_model_with_a_head() -> None:
    model = LanguageModel().to(DEVICE, torch.bfloat16)
    x, targets = random(0, 2, TOKENS // 2, WIDTH, dtype=torch.bfloat16), _targets().view(2, -1)
    ours = optimise(model, memory=MEMORY)
    loss = ours(x, targets)
    (gradient,) = torch.autograd.grad(loss, model.lm_head.weight)
    wide = LanguageModel().to(DEVICE, torch.float64)
    wide.load_state_dict(model.state_dict())
    logits = wide.lm_head(x.double()).view(-1, WORDS)
    right = F.cross_entropy(logits, targets.view(-1))
    (expected,) = torch.autograd.grad(right, wide.lm_head.weight)
    assert loss.dtype == torch.float32
    assert "linear_cross_entropy" in _operators(ours)
    assert error(loss.detach(), right.detach()) < 2**-9  # of logits rounded to 2^-9 each
    assert error(gradient, expected) < 2**-6


def test_too_little_memory_is_told() -> None:
    given = random(0, TOKENS, WIDTH), random(1, WORDS, WIDTH), _targets()
    with pytest.raises(InputError, match="give it as many at least"):
        optimise(TAKEN["linear"], memory=1000)(*given)


def test_its_price_is_that_of_its_products() -> None:
    """8,192 tokens of 128,256 words took 1.06 times their products on an H200, in chunks."""
    x, weight = (
        torch.empty(n, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for n in (8192, 128_256)
    )
    targets = torch.empty(8192, dtype=torch.int64, device="meta")
    ours = optimise(TAKEN["linear"], [x, weight, targets], gpu="h200-sxm", memory=2**30)
    (plan,) = ours.kernels.plans
    (node,) = (node for node in plan.graph.nodes if node.op == "linear_cross_entropy")
    products = 3 * gemm_seconds(Gemm("", 8192, 128_256, 4096), ours.kernels.pricer.device)
    price = ours.kernels.pricer.torch(plan.graph, node)
    assert 1.0 < price / products < 1.12
