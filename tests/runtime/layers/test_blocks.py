"""The pure-function blocks against transformers' models on the same weights."""

from __future__ import annotations

import pytest

from bigplan.spec.model import ModelSpec

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from bigplan.runtime.export.hf import joined
from bigplan.runtime.layers import blocks
from bigplan.runtime.mixers import positions
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.weights import ParameterPiece, hf_tensors
from tests.runtime.weights.hf_models import CASES, LENGTH, loss, named, ours_of, reference, spec_of

# fp32 sums of a few hundred terms in another order: a relative 1e-5 is about 100 roundings.
TOLERANCE = 1e-5


def _model(**changes: object) -> ModelSpec:
    fields = {
        "name": "test",
        "layers": 2,
        "hidden": 48,
        "ffn": 112,
        "heads": 6,
        "kv_heads": 2,
        "vocab": 130,
        "max_sequence_length": 64,
        "rope_theta": 5000.0,
        "source": "test",
    }
    return ModelSpec.model_validate(fields | changes)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_transformers(case: str) -> None:
    theirs = reference(case)
    model = spec_of(theirs)
    ours = ours_of(theirs, model)
    # Not token 1, which is padding for transformers' OPT: its row gets no gradient.
    text = torch.randint(2, model.vocab, (3, LENGTH + 1))
    tokens, targets = text[:, :-1], text[:, 1:]
    scores = theirs(tokens).logits
    expected = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    torch.autograd.backward(expected)
    found = loss(model, ours, tokens, targets)
    torch.autograd.backward(found)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    by_name = named(theirs, gradients=True)
    family = CASES[case][0]
    for tensor in hf_tensors(family, model, FAMILIES[family].in_transformers):
        if any(piece.parameter.constant for piece in tensor.pieces):
            continue
        rows = [_gradient(ours[piece.layer], piece) for piece in tensor.pieces]
        gradient, by_theirs = joined(tensor, rows), by_name[tensor.name]
        error = (gradient - by_theirs).norm() / by_theirs.norm().clamp(min=1e-30)
        # Softmax ignores what is added to all keys alike, so k_proj.bias has no gradient without
        # rope, and with it a small one of terms that cancel.
        if tensor.name.endswith("k_proj.bias"):
            usual = by_name[tensor.name.replace("k_proj", "q_proj")]
            assert (gradient - by_theirs).norm() < TOLERANCE * usual.norm()
        else:
            # What decays give are sums over tokens that cancel: of in_proj_a both are up to 7e-3
            # off in fp32, by A_log 4e-2. Tests of mixers/ have them in
            # fp64.
            cancels = tensor.name.endswith((".A_log", ".dt_bias", ".in_proj_a.weight"))
            # Norms around each part of five blocks: up to 5e-5 in fp32, 6e-6 with rope's angles
            # alone in fp32.
            deep = model.block_inputs is not None
            room = 100 if cancels else 10 if deep else 1
            assert error < room * TOLERANCE, (tensor.name, error)


def _gradient(layer: dict[str, torch.Tensor], piece: ParameterPiece) -> torch.Tensor:
    found = layer[piece.parameter.name].grad
    assert found is not None, piece.parameter.name
    experts = piece.parameter.experts
    return found[piece.expert :: experts] if experts else found


def test_a_block_does_not_write_over_its_callers_gradient() -> None:
    model = _model(layers=1)
    p = {
        parameter.name: torch.randn(parameter.shape).requires_grad_()
        for parameter in model.kinds()["block"]
    }
    x, given = torch.randn(2, 9, 48, requires_grad=True), torch.randn(2, 9, 48)
    before = given.clone()
    rope = positions.position_tables(model, 9, "cpu", torch.float32)
    blocks.block(p, x, model, rope).backward(given)  # type: ignore[no-untyped-call]
    assert torch.equal(given, before)
    assert x.grad is not None
    assert not torch.equal(x.grad, given)


@pytest.mark.parametrize("case", ["qwen3", "gpt2", "opt", "mixtral"])
def test_bf16_stays_near_fp32(case: str) -> None:
    theirs = reference(case)
    model = spec_of(theirs)
    ours = ours_of(theirs, model)
    tokens, targets = torch.randint(model.vocab, (2, 2, 16)).unbind()
    narrow = [{n: t.detach().bfloat16().requires_grad_() for n, t in p.items()} for p in ours]
    wide, short = loss(model, ours, tokens, targets), loss(model, narrow, tokens, targets)
    assert (wide.dtype, short.dtype) == (torch.float32, torch.float32)
    # bf16 has 8 bits: 0.4% a rounding, averaged over 32 targets.
    assert short.item() == pytest.approx(wide.item(), rel=0.01)
    torch.autograd.backward(short)
    assert all(t.grad is not None and t.grad.dtype == t.dtype for p in narrow for t in p.values())
