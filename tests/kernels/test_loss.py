"""Linear + cross-entropy in chunks, and AdamW: what plain torch gives in fp64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F

from bigplan.errors import InputError
from bigplan.kernels import update as update_kernels
from bigplan.kernels.library import Library
from bigplan.kernels.loss import ROWS, chunk_for, linear_cross_entropy
from bigplan.kernels.optimised import Optimiser
from bigplan.kernels.update import AdamW
from bigplan.runtime.cpu.native import Piece
from bigplan.runtime.generated import adamw_step
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.spec.optimizer import Optimizer
from tests.kernels.generated import DEVICE, error, random

FP32 = 3e-6  # as in test_generated.py
PRICER = Optimiser("h200-sxm", 0.0).pricer


@pytest.mark.parametrize("words", [300, 70_000])  # whole rows, and rows in passes
def test_losses_and_their_gradient(words: int) -> None:
    logits = random(0, 3, words)
    targets = torch.tensor([words - 1, -100, words + 7], device=DEVICE)  # another rank's last
    wide = logits.double().requires_grad_()
    lse = wide.logsumexp(1)
    losses = torch.stack((lse[0] - wide[0, -1], 0.0 * lse[1], lse[2]))
    (expected,) = torch.autograd.grad(losses.sum() * 0.3, wide)
    found = Library(PRICER).cross_entropy_(logits, targets, torch.tensor([0.3], device=DEVICE))
    assert error(found, losses.detach()) < FP32
    assert error(logits, expected) < FP32


def test_masked_words_have_no_probability() -> None:
    logits = random(0, 2, 100)
    logits[:, 50:] = -torch.inf
    targets = torch.tensor([3, 4], device=DEVICE)
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    found = Library(PRICER).cross_entropy_(logits, targets, torch.ones(1, device=DEVICE))
    assert error(found, expected) < FP32
    assert not logits[:, 50:].any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_in_chunks(reduction: str) -> None:
    x, weight = random(0, 2 * ROWS - 100, 8), random(1, 50, 8)
    targets = torch.arange(len(x), device=DEVICE) % 51 - 1
    targets[targets < 0] = -100
    wide = [t.double().requires_grad_() for t in (x, weight)]
    plain = F.cross_entropy(wide[0] @ wide[1].T, targets, reduction=reduction)
    expected = torch.autograd.grad(3 * plain, wide)
    leaves = [t.requires_grad_() for t in (x, weight)]
    memory = ROWS * 50 * 4
    loss = linear_cross_entropy(x, weight, targets, memory=memory, reduction=reduction)
    found = torch.autograd.grad(3 * loss, leaves)
    assert error(loss.detach(), plain.detach()) < FP32
    assert all(error(a, b) < FP32 * 3 for a, b in zip(found, expected, strict=True))


def test_a_chunk_fills_its_memory_and_no_more() -> None:
    row = 128_256 * 2
    assert chunk_for(8192, 128_256, 2, 8192 * row) == 8192
    for memory in (2**28, 2**29, 2**30, 3 * 2**29):
        chunk = chunk_for(8192, 128_256, 2, memory)
        assert chunk % ROWS == 0
        assert chunk * row <= memory < 2 * chunk * row
    assert chunk_for(100, 1000, 4, 400_000) == 100
    with pytest.raises(InputError, match="at least"):
        chunk_for(1000, 128_256, 2, 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of several lengths, one of them not aligned, with and without a 16-bit copy."""
    monkeypatch.setattr(update_kernels, "NOMINAL", 512)  # what the tile is chosen for is no bound
    settings, update = Optimizer(), AdamW(PRICER)
    kernel = adamw_kernel(settings, 3, 1e-2, 0.1)
    factors = update.factors(kernel.native.constants, 4.0, torch.device(DEVICE))
    for count, start in ((1000, 0), (37, 3)):
        p, m = random(0, count + start)[start:].clone(), random(1, count) * 0.1
        v, g = random(2, count).square() * 0.1, random(3, count + start, dtype=dtype)[start:]
        copy = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE)
        twins = [t.clone() for t in (p, m, v)]
        kernel.fused([Piece(twins[0], g.float() / 4, (twins[1], twins[2]))], None)
        update.step(p, g, (m, v), copy, factors)
        for ours, theirs in zip((p, m, v), twins, strict=True):
            assert error(ours, theirs.double()) < 1e-6  # a few roundings of fp32
        assert error(copy, p.double()) < 2**-7
        whole = Piece(p.clone(), g.clone(), (m.clone(), v.clone()))
        update.step(p, g, (m, v), None, factors)
        monkeypatch.setattr(AdamW, "most", 100)  # a larger piece is cut, with the same bits
        adamw_step(update, factors, [whole])
        monkeypatch.undo()
        assert torch.equal(whole.parameter, p)
