"""Sequences of which a model's attention knows the places of tokens, or not."""

from __future__ import annotations

from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training


def places_refusal(model: ModelSpec, training: Training) -> str | None:
    """Why a model's attention does not know the places of such sequences; None: it does.

    Sequences that are longer than a chunk are whole chunks, and queries that grow do so by their
    place in a sequence, not in a document.
    """
    chunk, length = model.attention_chunk, training.sequence_length
    if chunk is not None and length > chunk and length % chunk:
        return (
            f"a sequence_length of {length} is no multiple of attention_chunk {chunk} of "
            f"{model.name}, within which tokens attend: use a multiple, or at most {chunk}"
        )
    if not training.isolate_documents:
        return None
    scaling, growth = model.rope_scaling, model.global_query_growth
    if scaling is not None and scaling.grows_within(length):
        key, most = "rope_scaling.query_growth", scaling.original_length
    elif growth is not None and growth.grows_within(length):
        key, most = "global_query_growth", growth.length - 1
    else:
        return None
    return (
        f"isolate_documents with {key}: queries grow by their place in a sequence of {length} "
        f"tokens, not in a document; use a sequence_length of at most {most}, or leave "
        "isolate_documents off"
    )
