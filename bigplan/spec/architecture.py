"""The model's architecture: dimensions and switches of a decoder-only transformer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.files.document import LONGEST_NAME, Spec

MOST_LAYERS = 1000


class RopeScaling(Spec):
    """Rotary angles changed for longer texts than those of the pre-training.

    "linear" divides all frequencies by `factor`. "llama3" divides those whose wave is longer than
    original_length / low_frequency_factor, leaves those shorter than original_length /
    high_frequency_factor, and blends in between. Other kinds are known by name only.
    """

    name: Literal["linear", "llama3", "dynamic", "yarn", "longrope"]
    factor: float | None = Field(default=None, gt=0)
    low_frequency_factor: float | None = Field(default=None, gt=0)
    high_frequency_factor: float | None = Field(default=None, gt=0)
    original_length: int | None = Field(default=None, gt=0, le=10**9)
    """tokens in a sequence of the pre-training"""

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        needed = {"linear": ("factor",), "llama3": tuple(RopeScaling.model_fields)[1:]}
        missing = [key for key in needed.get(self.name, ()) if getattr(self, key) is None]
        if missing:
            told = ", ".join(f"`{key}`" for key in missing)
            raise InputError(f"rope scaling {self.name} needs {told}; add them")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low is not None and high is not None and low >= high:
            raise InputError(
                f"`low_frequency_factor` {low:g} is not below `high_frequency_factor` "
                f"{high:g}, but waves between the two are blended; exchange them"
            )
        return self


def _heads(data: dict[str, int]) -> int:
    return data["heads"]


def _head_dim(data: dict[str, int]) -> int:
    return data["hidden"] // data["heads"]  # Architecture._check sees to the remainder.


class Architecture(Spec):
    """A decoder-only transformer: embedding, `layers` equal blocks, head."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    """what it is called in plans and reports"""
    layers: int = Field(gt=0, le=MOST_LAYERS)
    """number of transformer blocks"""
    hidden: int = Field(gt=0, le=10**6)
    """width of the residual stream"""
    ffn: int = Field(gt=0, le=10**7)
    """inner width of the MLP; with experts, of one of them"""
    experts: int = Field(default=0, ge=0, le=10**4)
    """MLPs of each block, of which a router picks some for each token; 0: one for all tokens"""
    experts_per_token: int = Field(default=0, ge=0, le=10**4)
    """experts that a token passes; none is dropped, however many tokens pick the same"""
    router_normalised: bool = True
    """a token's weights of its experts sum to 1 (Mixtral); false: shares of all experts"""
    router_loss: float = Field(default=0.0, ge=0)
    """coefficient of the load-balancing loss of the routers, which keeps experts equally busy

    It is a mean over blocks of E * sum_e f_e * P_e over the tokens of a micro-batch on a rank: f_e
    is the number of choices of expert e per token, P_e the mean of its probability (Fedus et al.,
    arXiv 2101.03961, equations 4 to 6; f_e counts all k choices, as Hugging Face's does).
    """
    heads: int = Field(gt=0, le=10**5)
    """query heads"""
    kv_heads: int = Field(default_factory=_heads, gt=0, le=10**5)
    """key and value heads; default: `heads`"""
    head_dim: int = Field(default_factory=_head_dim, gt=0, le=10**6)
    """width of one head; default: `hidden` / `heads`"""
    vocab: int = Field(gt=0, le=10**8)
    """rows of the token table"""
    max_sequence_length: int = Field(gt=0, le=10**9)
    """longest sequence, in tokens, that its positions cover"""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(default=1e-5, gt=0)
    norm_bias: bool = True
    """layernorm adds a bias (rmsnorm never has one); MPT's does not"""
    embedding_norm: bool = False
    """a norm after the token table, as in BLOOM"""
    mlp: Literal["swiglu", "gelu", "gelu_tanh", "relu"] = "swiglu"
    """gelu_tanh is GPT-2's approximation of gelu"""
    positions: Literal["rope", "learned", "alibi"] = "rope"
    """rope rotates queries and keys, learned adds a table, alibi biases scores by distance"""
    position_offset: int = Field(default=0, ge=0, le=10**6)
    """rows of a learned table before the first position: OPT has 2"""
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    """angles changed for longer texts, as in Llama 3.1; null: not"""
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """part of each head that rope rotates: 0.25 in GPT-NeoX"""
    parallel_residual: bool = False
    """attention and MLP read the same input, as in GPT-NeoX"""
    tied_embeddings: bool = False
    """the head reuses the token table"""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys, as in Qwen3"""
    sliding_window: int | None = Field(default=None, gt=0, le=10**9)
    """tokens that a token attends to: itself and those just before it; null: all before it"""
    source: str = Field(min_length=1)
    """where the dimensions come from"""

    @model_validator(mode="after")
    def _check(self) -> Architecture:
        if "head_dim" not in self.model_fields_set and self.hidden % self.heads:
            raise InputError(
                f"`hidden` {self.hidden} is not a multiple of `heads` {self.heads}; "
                "state `head_dim`, or change one of them"
            )
        self._check_experts()
        if self.heads % self.kv_heads:
            raise InputError(
                f"`heads` {self.heads} is not a multiple of `kv_heads` {self.kv_heads}; "
                "each key/value head must serve equally many query heads"
            )
        if self.position_offset and self.positions != "learned":
            raise InputError(
                f"`position_offset` {self.position_offset} counts rows of a learned table, but "
                f"`positions` is {self.positions}; remove it, or use `positions: learned`"
            )
        if self.rope_scaling and self.positions != "rope":
            raise InputError(
                "`rope_scaling` changes rotary angles, but `positions` is "
                f"{self.positions}; remove it"
            )
        if self.positions == "rope" and (self.rotary_width % 2 or not self.rotary_width):
            raise InputError(
                f"`head_dim` {self.head_dim} times `rotary_fraction` {self.rotary_fraction:g} is "
                f"{self.rotary_width} columns, but rope rotates pairs; use an even number of them"
            )
        return self

    def _check_experts(self) -> None:
        if not self.experts:
            left = ("experts_per_token", "router_loss")
            unused = [f"`{key}` {getattr(self, key):g}" for key in left if getattr(self, key)]
            if unused:
                raise InputError(
                    f"{' and '.join(unused)} without `experts`; state `experts`, or remove it"
                )
            return
        if not 1 <= self.experts_per_token <= self.experts:
            raise InputError(
                f"`experts_per_token` is {self.experts_per_token}, which must be from 1 to "
                f"`experts` {self.experts}; correct it"
            )
        unlike = {
            f"`mlp: {self.mlp}`": self.mlp != "swiglu",
            "`mlp_bias`": self.mlp_bias,
            "`parallel_residual`": self.parallel_residual,
        }
        if found := [name for name, there in unlike.items() if there]:
            raise InputError(
                f"`experts` {self.experts} with {' and '.join(found)}, but experts are swiglu MLPs "
                "without biases, after attention; change that, or remove `experts`"
            )

    def window_within(self, length: int) -> int | None:
        """The sliding window, if it hides a token of a sequence of this length."""
        window = self.sliding_window
        return window if window is not None and window < length else None

    @property
    def attention_width(self) -> int:
        """Columns of o_proj: heads x head_dim (not always `hidden`)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of k_proj and of v_proj."""
        return self.kv_heads * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Columns of a head that rope rotates, its first."""
        return int(self.head_dim * self.rotary_fraction)
