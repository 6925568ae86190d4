"""Which kernel computes a rank's attention, and what it takes besides heads as they are."""

from __future__ import annotations

from bigplan import mechanics
from bigplan.graph.shape import RankShape


def linear_biases(shape: RankShape) -> bool:
    """Whether fused attention adds linear biases (ALiBi) to its scores."""
    return shape.model.positions == "alibi" and shape.training.attention == "flash"


def biases_in_kernel(shape: RankShape) -> bool:
    """Whether a generated kernel does, in place of wider heads."""
    ours = shape.generated and linear_biases(shape)
    return ours and mechanics.biases_in_kernel(shape.element, shape.model.head_dim)


def caps_scores(shape: RankShape) -> bool:
    """Whether fused attention caps its scores."""
    return shape.model.score_cap is not None and shape.training.attention == "flash"


def caps_in_kernel(shape: RankShape) -> bool:
    """Whether a generated kernel does, in place of plain torch, some queries at a time."""
    ours = shape.generated and caps_scores(shape)
    return ours and mechanics.caps_in_kernel(shape.element, shape.model.head_dim)


def is_generated(shape: RankShape) -> bool:
    """Whether the attention kernel is a generated one."""
    return biases_in_kernel(shape) or caps_in_kernel(shape)


def pads_values(shape: RankShape) -> bool:
    """Whether values narrower than keys are padded for attention (runtime/narrow_values.py)."""
    latent = shape.model.latent_attention
    if latent is None or latent.value_dim == latent.head_dim:
        return False
    if shape.element == 4:
        return not shape.fused  # torch's memory-efficient kernel takes them as they are
    widths = latent.head_dim, latent.value_dim
    return shape.training.deterministic or not (shape.narrow and widths == mechanics.NARROW_WIDTHS)
