"""Rotary angles of models that read longer texts than their pre-training did."""

from __future__ import annotations

from math import log, sqrt
from typing import Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec

FAST, SLOW = 32.0, 1.0  # the YaRN paper's values for Llama


class QueryGrowth(Spec):
    """How queries that no rope turns grow with their position (arXiv 2501.19399 has the idea).

    At position i, from 0, they are multiplied by 1 + factor * ln(1 + floor((i + 1) / length)).
    """

    factor: float = Field(default=0.1, gt=0)
    length: int = Field(gt=0, le=10**9)
    """tokens before the first that grows, but for one"""

    def grows_within(self, length: int) -> bool:
        """Whether queries of sequences of so many tokens grow."""
        return length >= self.length


class RopeScaling(Spec):
    """Rotary angles changed for longer texts than those of the pre-training.

    "linear" divides all frequencies by `factor`. "llama3" divides those whose wave is longer than
    original_length / low_frequency_factor, leaves those shorter than original_length /
    high_frequency_factor, and blends in between. "yarn" (arXiv 2309.00071) blends between numbers
    of turns in original_length, and multiplies cos and sin by a factor. "longrope" (arXiv
    2402.13753) divides each by a factor of its own, by others in sequences longer than
    original_length, and multiplies cos and sin. "proportional" turns the fastest pairs of a head's
    columns alone, a part `turned` of them, as in Gemma 4. Other kinds are known by name only.
    """

    name: Literal["linear", "llama3", "dynamic", "yarn", "longrope", "proportional"]
    factor: float | None = Field(default=None, gt=0)
    low_frequency_factor: float | None = Field(default=None, gt=0)
    high_frequency_factor: float | None = Field(default=None, gt=0)
    original_length: int | None = Field(default=None, gt=0, le=10**9)
    """tokens in a sequence of the pre-training"""
    beta_fast: float | None = Field(default=None, gt=0)
    """yarn leaves frequencies that turn more often in original_length; null: 32"""
    beta_slow: float | None = Field(default=None, gt=0)
    """yarn divides frequencies that turn less often in it; null: 1"""
    mscale: float | None = Field(default=None, gt=0)
    """yarn multiplies cos and sin by m(mscale) / m(mscale_all_dim), where m(x) = 0.1 x ln(factor)
    + 1; one of them null: by m(1), as the paper has it"""
    mscale_all_dim: float | None = Field(default=None, gt=0)
    """latent attention multiplies scores by m(mscale_all_dim)^2; null: not"""

    short_factors: tuple[float, ...] = ()
    """longrope: divisors of frequencies, a pair's each, of sequences up to original_length"""
    long_factors: tuple[float, ...] = ()
    """longrope: those of longer sequences"""
    rounded: bool = True
    """yarn blends between whole numbers of pairs; false: between fractions, as in GPT-OSS"""
    attention_factor: float | None = Field(default=None, gt=0)
    """what yarn and longrope multiply cos and sin by; null: what their papers say"""
    turned: float | None = Field(default=None, gt=0, le=1)
    """proportional: the part of the pairs that rope turns; others stay as they are"""
    query_growth: float | None = Field(default=None, gt=0)
    """yarn: queries at position i are multiplied by 1 + it * ln(1 + floor(i /
    original_length)), as in Ministral 3 (arXiv 2501.19399 has the idea); null: not"""

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        needed = {
            "linear": ("factor",),
            "llama3": tuple(RopeScaling.model_fields)[1:5],
            "yarn": ("factor", "original_length"),
            "longrope": ("factor", "original_length", "short_factors", "long_factors"),
            "proportional": ("turned",),
        }
        missing = [key for key in needed.get(self.name, ()) if not getattr(self, key)]
        if missing:
            told = ", ".join(f"`{key}`" for key in missing)
            raise InputError(f"rope scaling {self.name} needs {told}; add them")
        if any(divisor <= 0 for divisor in (*self.short_factors, *self.long_factors)):
            raise InputError(
                "`short_factors` and `long_factors` divide frequencies; use factors above 0"
            )
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low is not None and high is not None and low > high:
            raise InputError(
                f"`low_frequency_factor` {low:g} is above `high_frequency_factor` "
                f"{high:g}, but waves between the two are blended; exchange them"
            )
        if (self.attention_factor and self.name not in ("yarn", "longrope")) or not (
            self.rounded or self.name == "yarn"
        ):
            raise InputError(
                "`attention_factor` is of yarn and longrope, `rounded` of yarn, and `name` is "
                f"{self.name}; remove them"
            )
        if self.query_growth and self.name != "yarn":
            raise InputError(f"`query_growth` is of yarn, and `name` is {self.name}; remove it")
        if self.turned is not None and self.name != "proportional":
            raise InputError(f"`turned` is of proportional, and `name` is {self.name}; remove it")
        fast, slow = self.turns
        if slow > fast:
            raise InputError(
                f"`beta_slow` {slow:g} exceeds `beta_fast` {fast:g}, but frequencies between the "
                "two are blended; exchange them"
            )
        return self

    @property
    def turns(self) -> tuple[float, float]:
        """How often frequencies turn in original_length that yarn leaves, and that it divides."""
        return self.beta_fast or FAST, self.beta_slow or SLOW

    def grows_within(self, length: int) -> bool:
        """Whether queries of sequences of so many tokens grow."""
        return bool(self.query_growth) and length > (self.original_length or length)

    def _magnitude(self, scale: float) -> float:
        """How much larger scores should be in longer texts (the paper's section 3.4)."""
        factor = self.factor or 1.0
        return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0

    @property
    def angle_factor(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.name == "longrope":  # as Phi-3 has it
            assert self.factor and self.original_length, self
            return sqrt(1.0 + log(max(1.0, self.factor)) / log(self.original_length))
        if self.name != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """What latent attention's scores are multiplied by."""
        if self.name != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self._magnitude(self.mscale_all_dim) ** 2
