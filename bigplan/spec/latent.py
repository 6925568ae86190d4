"""Multi-head latent attention (MLA): heads that are made of narrow values shared by all of them.

As DeepSeek-V2 has it (arXiv 2405.04434, section 2.1). Each token has a latent of `kv_rank` columns,
of which every head's keys and values are products, and a key of `rope_dim` columns that rope turns
and all heads share. Queries are made of a latent of their own, or of the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec


class LatentAttention(Spec):
    """Widths of latent attention, in columns."""

    query_rank: int | None = Field(default=None, gt=0, le=10**6)
    """of the latent that queries are made of; null: of the residual stream, by one matrix"""
    kv_rank: int = Field(gt=0, le=10**6)
    """of the latent that keys and values are made of"""
    plain_dim: int = Field(gt=0, le=10**6)
    """of a head's queries and keys that rope does not turn"""
    rope_dim: int = Field(gt=0, le=10**6)
    """of a head's queries that rope turns, and of the key that all heads share"""
    value_dim: int = Field(gt=0, le=10**6)
    """of a head's values"""
    interleaved: bool = True
    """rope turns columns 2i and 2i + 1 together; false: i and i + rope_dim / 2"""

    norm_epsilon: float | None = Field(default=None, gt=0)
    """of the norms of latents; null: as the model's other norms"""

    @property
    def head_dim(self) -> int:
        """Columns of a head's queries and keys."""
        return self.plain_dim + self.rope_dim

    def check(self, heads: tuple[int, int, int], unlike: Mapping[str, bool]) -> None:
        """Raise InputError where a model with it cannot be like this.

        `heads`: query heads, key heads, and columns of each. `unlike`: what else no such model has.
        """
        count, kv_heads, head_dim = heads
        if head_dim != self.head_dim or kv_heads != count:
            raise InputError(
                f"`head_dim` {head_dim} and `kv_heads` {kv_heads} with `latent_attention`, whose "
                f"{count} heads have a key each, of {self.head_dim} columns: {self.plain_dim} "
                f"plain ones and {self.rope_dim} of rope; remove `head_dim` and `kv_heads`"
            )
        if self.rope_dim % 2:
            raise InputError(
                f"`rope_dim` {self.rope_dim} is odd, but rope rotates pairs; use an even number"
            )
        if self.value_dim > self.head_dim:
            raise InputError(
                f"`value_dim` {self.value_dim} exceeds a key's {self.head_dim} columns; no kernel "
                "takes values wider than keys; use fewer"
            )
        if found := [name for name, there in unlike.items() if there]:
            raise InputError(
                f"`latent_attention` with {' and '.join(found)}, but its norms are rmsnorm, its "
                "positions rope, and every token sees all before it; change that, or remove "
                "`latent_attention`"
            )
