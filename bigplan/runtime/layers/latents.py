"""Experts that read a narrow latent of what their router reads, as in Nemotron 3 Super.

The matrices around them are whole on every tensor-parallel rank, which has its own tokens' latents.
What ranks gather, send and sum around experts is latents, too.
"""

from __future__ import annotations

from torch import Tensor

from bigplan.runtime.experts import mlp as experts
from bigplan.runtime.mixers.ways import Parameters, Ways
from bigplan.spec.layers import NARROWING, WIDENING
from bigplan.spec.model import ModelSpec


def mlp(p: Parameters, x: Tensor | None, normed: Tensor, model: ModelSpec, ways: Ways) -> Tensor:
    """Add to x what experts of `normed`, or of a latent of it, give; None: that alone.

    All are [b, s, h], or as tensor-parallel ranks have them. The matrix behind a latent reads what
    experts give for its gradient, where it has one.
    """
    if not model.expert_latent:
        return experts.mlp(p, x, normed, model, ways.experts)
    (latent,) = ways.linears_of_whole(p, (NARROWING,), normed)
    idle = ways.experts.frozen and f"{WIDENING}.lora_A" not in p
    mixture = ways.experts._replace(unread=ways.experts.unread and idle)
    given = experts.mlp(p, None, latent, model, mixture, normed)
    return ways.close_whole(p, WIDENING, x, given, unread=ways.experts.unread)
