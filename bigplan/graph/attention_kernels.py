"""Which kernel computes a rank's attention, and what it takes besides heads as they are."""

from __future__ import annotations

from bigplan import mechanics
from bigplan.graph.shape import RankShape


def linear_biases(shape: RankShape) -> bool:
    """Whether fused attention adds linear biases (ALiBi) to its scores.

    What keeps documents apart adds them as well, at no price of their own.
    """
    biased = shape.model.positions == "alibi" and shape.training.attention == "flash"
    return biased and not shape.training.isolate_documents


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


def by_products(shape: RankShape) -> bool:
    """Whether wide heads attend by products, with generated kernels between them."""
    model = shape.model
    plain = model.score_cap is None and not (model.latent_attention or model.attention_sinks)
    ours = plain and model.positions != "alibi" and shape.training.attention == "flash"
    return ours and shape.generated and mechanics.by_products(shape.element, model.head_dim)


def isolates_in_kernel(shape: RankShape) -> bool:
    """Whether a generated kernel keeps documents apart, which takes biases and caps as well."""
    ours = shape.generated and shape.training.isolate_documents
    return ours and mechanics.isolates_in_kernel(shape.element, shape.model.head_dim)


def is_generated(shape: RankShape) -> bool:
    """Whether the attention kernel is a generated one."""
    return biases_in_kernel(shape) or caps_in_kernel(shape) or isolates_in_kernel(shape)


def in_blocks(shape: RankShape) -> bool:
    """Whether plain torch has scores of some queries at a time (runtime/attention/in_blocks.py)."""
    if shape.training.isolate_documents:
        return not (isolates_in_kernel(shape) or by_products(shape))
    return caps_scores(shape) and not caps_in_kernel(shape)


def attended_length(shape: RankShape) -> int:
    """Tokens of sequences in which attention has as much to do, windows aside."""
    # The host cuts keys off, and knows no documents.
    if (in_blocks(shape) and shape.fused) or by_products(shape):
        return shape.training.sequence_length
    return shape.training.attended_length


def pads_values(shape: RankShape) -> bool:
    """Whether narrower values than keys are padded (runtime/attention/narrow_values.py)."""
    latent = shape.model.latent_attention
    if latent is None or latent.value_dim == latent.head_dim:
        return False
    if shape.training.isolate_documents:
        return isolates_in_kernel(shape)
    if shape.element == 4:
        return not shape.fused  # torch's memory-efficient kernel takes them as they are
    widths = latent.head_dim, latent.value_dim
    return shape.training.deterministic or not (shape.narrow and widths == mechanics.NARROW_WIDTHS)
