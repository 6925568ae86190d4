"""F.cross_entropy in a captured graph: two kernels, what plain torch gives in fp64, less kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigplan.kernels import optimised
from bigplan.kernels.optimised import optimise
from tests.kernels.generated import DEVICE, error, every_operator_generated, random

FP32 = 3e-6  # as in test_generated.py
ROWS, WIDTH = 13, 70


class LanguageModel(nn.Module):
    """A head and its loss, with logits in fp32 as Hugging Face has them."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(x).float()
        return F.cross_entropy(logits.view(-1, WIDTH), targets.view(-1))


def _targets(ignored: int = -100) -> Tensor:
    targets = torch.arange(ROWS, device=DEVICE) * 5 % WIDTH
    targets[3] = ignored
    return targets


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 20])
def test_losses_and_gradients(
    ignored: int, reduction: str, interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not interpreted:  # what runs where there is no Triton
        monkeypatch.setattr(optimised, "runs_kernels", lambda _: False)

    def function(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(x * 2, targets, ignore_index=ignored, reduction=reduction)

    x, targets = random(0, ROWS, WIDTH).requires_grad_(), _targets(ignored)
    wide = x.detach().double().requires_grad_()
    right = function(wide, targets)
    gradient = random(1, *right.shape)
    with every_operator_generated():
        ours = optimise(function)
        loss = ours(x, targets)
    assert error(loss.detach(), right.detach()) < FP32
    found = torch.autograd.grad(loss, x, gradient)
    expected = torch.autograd.grad(right, wide, gradient.double())
    assert error(found[0], expected[0]) < FP32


def test_a_head_and_its_loss_keep_half_precision_logits_alone() -> None:
    model = LanguageModel().to(DEVICE, torch.bfloat16)
    x, targets = random(0, 1, ROWS, 8, dtype=torch.bfloat16), _targets()[None]
    with every_operator_generated():
        ours = optimise(model)
        loss = ours(x, targets)
        (gradient,) = torch.autograd.grad(loss, model.lm_head.weight)
    plan = ours.kernels.plans[0]
    assert sum(kernel.body.width == WIDTH for kernel in ours.kernels.kernels) == 2
    # Logits of two bytes, a logarithm a row, and how many count.
    assert plan.kept_bytes == ROWS * WIDTH * 2 + ROWS * 4 + 8
    wide = LanguageModel().to(DEVICE, torch.float64)
    wide.load_state_dict(model.state_dict())
    logits = wide.lm_head(x.double()).view(-1, WIDTH)
    right = F.cross_entropy(logits, targets.view(-1))
    (expected,) = torch.autograd.grad(right, wide.lm_head.weight)
    assert error(loss.detach(), right.detach()) < 2**-9  # of logits rounded to 2^-9 each
    assert error(gradient, expected) < 2**-6


@pytest.mark.parametrize("rows", [0, 4])
def test_no_target_that_counts_gives_what_torch_gives(rows: int) -> None:
    targets = torch.full((rows,), -100, device=DEVICE)
    ours = optimise(F.cross_entropy)
    assert ours(random(0, rows, WIDTH), targets).isnan()


def test_weights_smoothing_and_probabilities_stay_torchs() -> None:
    x, targets, weight = random(0, ROWS, WIDTH), _targets(), random(1, WIDTH).abs()
    cases: list[tuple[Callable[..., Tensor], Tensor]] = [
        (F.cross_entropy, targets),
        (lambda x, t, w: F.cross_entropy(x, t, label_smoothing=0.1), targets),
        (lambda x, t, w: F.cross_entropy(x, t), random(2, ROWS, WIDTH).softmax(-1)),
        (lambda x, t, w: F.cross_entropy(x.double(), t), targets),
    ]
    for function, given in cases:
        ours = optimise(function)
        assert error(ours(x, given, weight), function(x, given, weight)) < FP32
        (plan,) = ours.kernels.plans
        assert all("rows" not in node.op for node in plan.graph.nodes)


def test_words_beyond_a_tile_are_read_in_passes() -> None:
    x = random(0, 2, 70_000).requires_grad_()
    targets = torch.tensor([69_999, 5], device=DEVICE)
    with every_operator_generated():
        ours = optimise(F.cross_entropy)
        loss = ours(x, targets)
    wide = x.detach().double().requires_grad_()
    right = F.cross_entropy(wide, targets)
    assert error(loss.detach(), right.detach()) < FP32
    expected = torch.autograd.grad(right, wide)
    assert error(torch.autograd.grad(loss, x)[0], expected[0]) < FP32
    assert sum(kernel.body.width == 70_000 for kernel in ours.kernels.kernels) == 2
