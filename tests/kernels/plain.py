"""Blocks of shipped models in plain torch; products of one input are one, as in families.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigplan.spec.model import ModelSpec


class PlainBlock(nn.Module):
    """One block; tables of positions, [s, 1, r], are for models with rope."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model, h, d = model, model.hidden, model.head_dim
        self.sizes = [model.heads * d, model.kv_heads * d, model.kv_heads * d]
        self.qkv = nn.Linear(h, sum(self.sizes), bias=model.qkv_bias)
        self.out = nn.Linear(self.sizes[0], h, bias=model.attention_output_bias)
        gated = model.gated
        self.up = nn.Linear(h, model.ffn * (1 + gated), bias=model.mlp_bias)
        self.down = nn.Linear(model.ffn, h, bias=model.mlp_bias)
        self.norm_1, self.norm_2 = self._norm(), self._norm()
        if model.qk_norm:
            widths = self.sizes[:2] if model.qk_norm_whole else [d, d]
            norms = [nn.RMSNorm(width, model.norm_epsilon) for width in widths]
            self.q_norm, self.k_norm = norms

    def _norm(self) -> nn.Module:
        model = self.model
        if model.norm == "rmsnorm":
            return nn.RMSNorm(model.hidden, model.norm_epsilon)
        return nn.LayerNorm(model.hidden, model.norm_epsilon, bias=model.norm_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        if self.model.norms == "after":
            total: Tensor = x + self.norm_1(self.out(self._attention(x, cos, sin)))
            last: Tensor = self.norm_2(self._mlp(total))
            return total + last
        scale = self.model.residual_scale
        mixed = self.out(self._attention(self.norm_1(x), cos, sin))
        total = x + (mixed if scale == 1 else mixed * scale)
        added = self._mlp(self.norm_2(x if self.model.parallel_residual else total))
        return total + (added if scale == 1 else added * scale)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        parts = self.qkv(x).split(self.sizes, -1)
        if self.model.qk_norm_whole:
            parts = (self.q_norm(parts[0]), self.k_norm(parts[1]), parts[2])
        q, k, v = (part.view(b, s, -1, self.model.head_dim) for part in parts)
        if self.model.qk_norm and not self.model.qk_norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.model.positions == "rope":
            q, k = (self._turned(heads, cos, sin) for heads in (q, k))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(b, s, -1)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = self.model.rotary_width
        part, rest = x[..., :width], x[..., width:]
        low, high = part.chunk(2, -1)
        turned = part * cos + torch.cat((-high, low), -1) * sin
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    def _mlp(self, x: Tensor) -> Tensor:
        inner, mlp = self.up(x), self.model.mlp
        if mlp == "swiglu":
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        elif mlp == "relu":
            inner = F.relu(inner)
        else:
            inner = F.gelu(inner, approximate="tanh" if mlp == "gelu_tanh" else "none")
        result: Tensor = self.down(inner)
        return result
