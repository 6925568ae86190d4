"""Llama-style layers as pure functions of a dictionary of parameters.

Weights live in flat buffers that come and go, so no nn.Module owns them: a function takes views
of a layer's buffer under the names of ModelSpec.kinds(). RMSNorm, rotary and SwiGLU are autograd
functions of plain torch operators, so that what autograd saves is known to the byte and the same
on CPU and CUDA: bigplan/graph/activations.py holds the formula.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.spec.model import ModelSpec, Parameter

Parameters = Mapping[str, Tensor]
Rope = tuple[Tensor, Tensor]

INITIAL_STD = 0.02  # of every matrix, as in GPT-2 and Llama


def embedding(p: Parameters, tokens: Tensor) -> Tensor:
    """Rows of embed_tokens.weight [V, h] for int64 tokens [b, s]: [b, s, h], the table's dtype."""
    return F.embedding(tokens, p["embed_tokens.weight"])


def block(p: Parameters, x: Tensor, model: ModelSpec, rope: Rope) -> Tensor:
    """One pre-norm transformer block: x [b, s, h] -> [b, s, h] in the dtype of x and weights.

    `rope` is rope_table's pair for this s.
    """
    normed = _rms_norm(x, p["input_norm.weight"], model.norm_epsilon)
    x = x + _attention(p, normed, model, rope)
    normed = _rms_norm(x, p["post_norm.weight"], model.norm_epsilon)
    return x + _mlp(p, normed)


def head_loss(p: Parameters, x: Tensor, targets: Tensor, model: ModelSpec) -> Tensor:
    """Mean cross-entropy of all targets, an fp32 scalar: x [b, s, h], targets int64 [b, s].

    p holds norm.weight and lm_head.weight [V, h], or embed_tokens.weight where they are tied.
    Logits are in the dtype of x, softmax and loss in fp32.
    """
    table = p["embed_tokens.weight" if model.tied_embeddings else "lm_head.weight"]
    normed = _rms_norm(x, p["norm.weight"], model.norm_epsilon)
    logits = F.linear(normed, table)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rope_table(
    model: ModelSpec, sequence_length: int, device: torch.device | str, dtype: torch.dtype
) -> Rope:
    """Cos and sin of every position and frequency, [s, head_dim / 2] each in `dtype`.

    Computed in fp32 on the CPU, so that every device rotates by the same angles. Both halves of a
    head share frequencies (the rotate-half convention of Hugging Face's Llama), hence half a row.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    positions = torch.arange(sequence_length, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / model.rope_theta**exponents)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def initial_values(kind_name: str, layer: int, parameter: Parameter, seed: int) -> Tensor:
    """First fp32 CPU values: normal (std 0.02) matrices, norm weights one, biases zero.

    They depend on the arguments alone, so every plan starts from the same model. `layer` is the
    index in ModelSpec.layer_sequence().
    """
    if parameter.name.endswith(".bias"):
        return torch.zeros(parameter.shape)
    if len(parameter.shape) == 1:
        return torch.ones(parameter.shape)
    key = f"{seed}/{kind_name}/{layer}/{parameter.name}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return torch.empty(parameter.shape).normal_(0.0, INITIAL_STD, generator=generator)


def _attention(p: Parameters, x: Tensor, model: ModelSpec, rope: Rope) -> Tensor:
    """Causal attention of x [b, s, h] with grouped key and value heads, up to o_proj: [b, s, h]."""
    q = _heads(_linear(p, "q_proj", x), model.head_dim)
    k = _heads(_linear(p, "k_proj", x), model.head_dim)
    v = _heads(_linear(p, "v_proj", x), model.head_dim)
    if model.qk_norm:
        q = _rms_norm(q, p["q_norm.weight"], model.norm_epsilon)
        k = _rms_norm(k, p["k_norm.weight"], model.norm_epsilon)
    q, k = _rotary(q, rope), _rotary(k, rope)
    if needs_expanded_kv(model, x.dtype):
        groups = model.heads // model.kv_heads
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    # The transposes stay views: the kernels answer in q's layout, [b, s, heads, d] in memory, so
    # flattening copies nothing and o_proj saves the storage that attention saves.
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return _linear(p, "o_proj", out.transpose(1, 2).flatten(2))


def needs_expanded_kv(model: ModelSpec, dtype: torch.dtype) -> bool:
    """Whether k and v are repeated for each query head (block_saved_bytes' `expanded_kv`).

    CUDA's flash and cuDNN kernels are for half precisions; its fp32 kernel has no grouped heads,
    and torch would take the unfused path, which saves s x s probabilities. The CPU does the same,
    so that a plan counts one number of bytes on every device.
    """
    return dtype == torch.float32 and model.heads != model.kv_heads


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[b, s, heads * head_dim] seen as [b, s, heads, head_dim]."""
    return x.view(*x.shape[:-1], -1, head_dim)


def _mlp(p: Parameters, x: Tensor) -> Tensor:
    gate, up = _linear(p, "gate_proj", x), _linear(p, "up_proj", x)
    return _linear(p, "down_proj", _swiglu(gate, up))


def _linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


class _RmsNorm(Function):
    """x * rstd * weight over the last dimension, in fp32; saves x and rstd (fp32 [..., 1])."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        gradient = gradients[0].float()
        normed = x.float() * rstd
        by_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * weight.float()
        projection = (gradient * normed).mean(-1, keepdim=True)
        return (rstd * (gradient - normed * projection)).to(x.dtype), by_weight, None


class _Rotary(Function):
    """Rotates the pairs (i, i + d/2) of x [b, s, heads, d]; saves cos and sin only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradients[0], cos, -sin), None, None  # a rotation's transpose


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _SwiGlu(Function):
    """silu(gate) * up; saves gate and up and computes silu again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gradient = gradients[0]
        # torch's own derivative of silu, in fp32 inside for bf16
        by_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return by_gate, F.silu(gate).mul_(gradient)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]


def _rotary(x: Tensor, rope: Rope) -> Tensor:
    return _Rotary.apply(x, *rope)  # type: ignore[no-any-return, no-untyped-call]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _SwiGlu.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]
