"""The pure-function blocks against transformers' Llama, Qwen2 and Qwen3 on the same weights."""

from __future__ import annotations

import pytest

from bigplan.spec.model import ModelSpec, Parameter

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from bigplan.runtime import blocks

# fp32 sums of a few hundred terms in another order: a relative 1e-5 is about 100 roundings.
TOLERANCE = 1e-5
SEED = 3
SIZES: dict[str, object] = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "attn_implementation": "eager",
}
Layers = dict[str, dict[str, torch.Tensor]]
CASES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "llama": ("Llama", {}, {}),
    "llama-mha-tied": (
        "Llama",
        {"num_key_value_heads": 6, "tie_word_embeddings": True},
        {"kv_heads": 6, "tied_embeddings": True},
    ),
    "llama-bias": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}, {"qkv_bias": True}),
    "qwen3": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": False},
        {"head_dim": 16, "qk_norm": True},
    ),
}
OURS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
PREFIXES = ("model.", "self_attn.", "mlp.")


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


def _ours(name: str) -> tuple[str, str]:
    """Layer ("embedding", "0", "1", "head") and our name of a transformers parameter."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    for theirs, ours in OURS.items():
        name = name.replace(theirs, ours)
    if name.startswith("layers."):
        _, layer, name = name.split(".", 2)
        return layer, name
    return ("embedding" if name.startswith("embed") else "head"), name


def _reference(case: str) -> tuple[torch.nn.Module, Layers]:
    """The transformers model of a case and our parameters with the same values."""
    family, config, _ = CASES[case]
    made = getattr(transformers, f"{family}Config")(**SIZES | config)
    torch.manual_seed(SEED)
    reference = getattr(transformers, f"{family}ForCausalLM")(made).float()
    ours: Layers = {}
    for name, value in reference.named_parameters():
        with torch.no_grad():  # norms and biases too, which start at one and zero
            value.add_(torch.randn_like(value), alpha=0.05)
        layer, parameter = _ours(name)
        ours.setdefault(layer, {})[parameter] = value.detach().clone().requires_grad_()
    return reference, ours


def _loss(model: ModelSpec, p: Layers, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    head = dict(p["head"])
    if model.tied_embeddings:
        head.update(p["embedding"])
    rope = blocks.rope_table(model, tokens.shape[1], "cpu", torch.float32)
    x = blocks.embedding(p["embedding"], tokens)
    for layer in range(model.layers):
        x = blocks.block(p[str(layer)], x, model, rope)
    return blocks.head_loss(head, x, targets, model)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_transformers(case: str) -> None:
    model = _model(**CASES[case][2])
    reference, ours = _reference(case)
    for kind, layer in (("embedding", "embedding"), ("block", "1"), ("head", "head")):
        shapes = {p.name: p.shape for p in model.kinds()[kind]}
        assert {name: tuple(value.shape) for name, value in ours[layer].items()} == shapes
    text = torch.randint(model.vocab, (3, 20))
    tokens, targets = text[:, :-1], text[:, 1:]
    logits = reference(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.autograd.backward(expected)
    loss = _loss(model, ours, tokens, targets)
    torch.autograd.backward(loss)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    for name, value in reference.named_parameters():
        layer, parameter = _ours(name)
        gradient = ours[layer][parameter].grad
        assert gradient is not None
        assert value.grad is not None
        error = (gradient - value.grad).norm() / value.grad.norm()
        # Softmax ignores what is added to all keys alike, so k_proj.bias has no gradient without
        # rope, and with it a small one of terms that cancel.
        assert error < (10 if parameter == "k_proj.bias" else 1) * TOLERANCE, (name, error)


def test_autograd_functions_have_the_right_derivative() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    rope = blocks.rope_table(_model(head_dim=8), 5, "cpu", torch.float64)
    assert torch.autograd.gradcheck(lambda x: blocks._rotary(x, rope), (x,))
    assert torch.autograd.gradcheck(blocks._swiglu, (x, up))


def test_rms_norm_gradient_equals_torch() -> None:
    x = torch.randn(4, 33, requires_grad=True)
    weight = torch.randn(33, requires_grad=True)
    ours = torch.autograd.grad(blocks._rms_norm(x, weight, 1e-5).square().sum(), (x, weight))
    plain = torch.nn.functional.rms_norm(x, (33,), weight, 1e-5)
    theirs = torch.autograd.grad(plain.square().sum(), (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_bf16_stays_near_fp32() -> None:
    _, ours = _reference("qwen3")
    model = _model(qk_norm=True, head_dim=16)
    tokens, targets = torch.randint(model.vocab, (2, 2, 16)).unbind()
    narrow = {k: {n: t.detach().bfloat16() for n, t in v.items()} for k, v in ours.items()}
    wide = _loss(model, ours, tokens, targets)
    assert wide.dtype == torch.float32
    loss = _loss(model, narrow, tokens, targets)
    assert loss.dtype == torch.float32
    # bf16 has 8 bits: 0.4% a rounding, averaged over 32 targets.
    assert loss.item() == pytest.approx(wide.item(), rel=0.01)


def test_initial_values_depend_on_seed_layer_and_name_alone() -> None:
    matrix = Parameter("q_proj.weight", (32, 48), "rows", True)
    first = blocks.initial_values("block", 1, matrix, seed=5)
    torch.manual_seed(99)
    assert torch.equal(first, blocks.initial_values("block", 1, matrix, seed=5))
    assert first.dtype == torch.float32
    assert first.shape == (32, 48)
    assert first.std().item() == pytest.approx(0.02, rel=0.1)
    renamed = Parameter("k_proj.weight", (32, 48), "rows", True)
    for other in (
        blocks.initial_values("block", 2, matrix, seed=5),
        blocks.initial_values("block", 1, matrix, seed=6),
        blocks.initial_values("block", 1, renamed, seed=5),
    ):
        assert not torch.equal(first, other)


def test_norms_start_at_one_and_biases_at_zero() -> None:
    norm = Parameter("input_norm.weight", (8,), "replicated", False)
    bias = Parameter("q_proj.bias", (8,), "rows", False)
    assert torch.equal(blocks.initial_values("block", 1, norm, 0), torch.ones(8))
    assert torch.equal(blocks.initial_values("block", 1, bias, 0), torch.zeros(8))
