"""The model's architecture: dimensions and switches of a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.carried import BlockInputs, KeySharing, check_carried, shares_keys
from bigplan.spec.combinations import check_attention, check_latent, check_norms, check_positions
from bigplan.spec.experts import DENSE, ROUTED, check_experts
from bigplan.spec.files.document import LONGEST_NAME, Spec
from bigplan.spec.files.problems import KeyPath
from bigplan.spec.global_heads import GlobalHeads, check_heads
from bigplan.spec.latent import LatentAttention
from bigplan.spec.mixers import (
    ATTENTION,
    BESIDE_ATTENTION,
    MLP,
    AttentionBeside,
    GatedDeltaRule,
    Mixer,
    ShortConvolution,
    StateSpace,
    check_mixers,
    mixers_of,
)
from bigplan.spec.pattern import BlockAttention, in_runs, of_blocks, shares_of
from bigplan.spec.rope_scaling import QueryGrowth, RopeScaling
from bigplan.spec.routing import Routing

MOST_LAYERS = 1000


def _heads(data: dict[str, int]) -> int:
    return data["heads"]


def _head_dim(data: dict[str, Any]) -> int:
    if (latent := data.get("latent_attention")) is not None:
        return int(latent.head_dim)
    return int(data["hidden"] // data["heads"])  # Architecture._check sees to the remainder.


class Architecture(Spec):
    """A decoder-only transformer: embedding, `layers` blocks, head."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    """what it is called in plans and reports"""
    layers: int = Field(gt=0, le=MOST_LAYERS)
    """number of transformer blocks"""
    hidden: int = Field(gt=0, le=10**6)
    """width of the residual stream"""
    ffn: int = Field(ge=0, le=10**7)
    """inner width of the MLP; with experts, of one of them; 0: blocks have none, as in Mamba-2"""
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
    routing: Routing | None = None
    """how a token's experts are chosen and weighted; null: the likeliest ones, by a softmax"""
    expert_norms: Literal["as_others", "after", "each"] = "as_others"
    """norms of experts: where `norms` says, or one behind them, too (A.X-K1)

    With each, experts and the router read the residual stream by a norm each, and what experts and
    the MLP beside them give has one each before their sum (Gemma 4).
    """
    expert_latent: int = Field(default=0, ge=0, le=10**6)
    """width of what experts read and give: a product narrows the residual stream to it before the
    router's choice, another widens their sum (Nemotron 3 Super); 0: they read the stream"""
    shared_ffn: int = Field(default=0, ge=0, le=10**7)
    """inner width of an MLP beside the experts that all tokens pass, the shared ones; 0: none"""
    shared_gate: bool = False
    """what that MLP gives is multiplied by the sigmoid of a score of the token, as in Qwen2-MoE"""
    dense_blocks: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """first blocks that have one MLP for all tokens in place of experts, as in DeepSeek-V3"""
    expert_pattern: tuple[str, ...] = ()
    """runs of blocks without experts and with them, over and over, as [1 dense, 1 routed]

    Where blocks are one thing alone, it says nothing of those that are a mixer.
    """
    dense_ffn: int = Field(default=0, ge=0, le=10**7)
    """inner width of the MLP in these"""
    heads: int = Field(gt=0, le=10**5)
    """query heads"""
    kv_heads: int = Field(default_factory=_heads, gt=0, le=10**5)
    """key and value heads; default: `heads`"""
    latent_attention: LatentAttention | None = None
    """heads are made of narrow latents, as in DeepSeek-V2 and V3; null: of the residual stream"""
    head_dim: int = Field(default_factory=_head_dim, gt=0, le=10**6)
    """width of one head's queries and keys; default: `hidden` / `heads`, or latent attention's"""
    global_heads: GlobalHeads | None = None
    """heads of global blocks of an `attention_pattern`, as in Gemma 4; null: as those of others"""
    keys_as_values: bool = False
    """values are keys as a product gives them, so that they have no matrix of their own"""
    value_norm: bool = False
    """RMSNorm without weights on each head's values"""
    key_sharing: KeySharing | None = None
    """the last blocks read an earlier one's keys and values, as in Gemma 4 E2B; null: none does"""
    block_inputs: BlockInputs | None = None
    """each block has an input of its own by token, as in Gemma 4 E2B; null: none has"""
    convolution: ShortConvolution | None = None
    """mixes tokens in place of attention in some blocks, or all; null: in none"""
    delta_rule: GatedDeltaRule | None = None
    """likewise, a gated delta rule"""
    state_space: StateSpace | None = None
    """likewise, a state space"""
    attention_beside: AttentionBeside | None = None
    """attention beside the state space in each block (Falcon-H1); null: blocks have one of them"""
    mixer_pattern: tuple[str, ...] = ()
    """runs of blocks by what mixes their tokens, over and over, as [2 convolution, 1 attention]

    Without a pattern, all blocks have the same mixer. With `mlp` among its words, as in
    [1 state_space, 1 mlp], each block is one thing alone: a mixer, an MLP or experts (Nemotron-H).
    """
    vocab: int = Field(gt=0, le=10**8)
    """rows of the token table"""
    max_sequence_length: int = Field(gt=0, le=10**9)
    """longest sequence, in tokens, that its positions cover"""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(default=1e-5, gt=0)
    norm_bias: bool = True
    """layernorm adds a bias (rmsnorm never has one); MPT's does not"""
    norm_plus_one: bool = False
    """norms multiply by 1 + weight, as in Gemma and Nemotron; their weights begin at 0"""
    weightless_norms: Literal["none", "heads", "all"] = "none"
    """which norms multiply by nothing: those of queries and keys (Llama 4), or all (OLMo 1)"""
    norms: Literal["before", "around", "after"] = "before"
    """norms stand before attention and MLP, before and after (Gemma 2), or after alone (OLMo 2)"""
    embedding_norm: bool = False
    """a norm after the token table, as in BLOOM"""
    embedding_scale: float = Field(default=1.0, gt=0)
    """rows of the token table are multiplied by it: the root of `hidden` in Gemma"""
    residual_scale: float = Field(default=1.0, gt=0)
    """what attention and MLP add to the residual stream is multiplied by it, as in Granite"""
    block_scale: bool = False
    """what a block gives is multiplied by a number of its own, which training leaves as it is"""
    mlp_scale: float = Field(default=1.0, gt=0)
    """what the MLP adds is multiplied by it, too, as in Falcon-H1"""
    gate_scale: float = Field(default=1.0, gt=0)
    """the MLP's gate is multiplied by it before its activation, as in Falcon-H1"""
    logit_scale: float = Field(default=1.0, gt=0)
    """scores of words are multiplied by it, as in Granite and Cohere"""
    mlp: Literal[
        "swiglu", "clamped_swiglu", "geglu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"
    ] = "swiglu"
    """swiglu and geglu are gated; gelu_tanh is GPT-2's approximation of gelu, which geglu takes

    relu2 is the square of relu (So et al., arXiv 2109.08668), as in Nemotron. xielu has trained
    numbers of each block (Huang, arXiv 2411.13010), as in Apertus. clamped_swiglu is that of
    GPT-OSS's experts: (u + 1) g sigmoid(1.702 g), of the gate up to 7 and u within 7.
    """
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    """rope rotates queries and keys, learned adds a table, alibi biases scores by distance

    With none, a token knows those before it alone by what mixes tokens, as in Granite 4.
    """
    position_offset: int = Field(default=0, ge=0, le=10**6)
    """rows of a learned table before the first position: OPT has 2"""
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    """angles changed for longer texts, as in Llama 3.1; null: not"""
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """part of each head that rope rotates: 0.25 in GPT-NeoX"""
    parallel_residual: bool = False
    """attention and MLP read the same input, as in GPT-NeoX"""
    shared_norm: bool = False
    """with `parallel_residual`, one norm is before both, as in Cohere; else each has its own"""
    tied_embeddings: bool = False
    """the head reuses the token table"""
    head_bias: bool = False
    """the head's product has a bias, as in Phi-2"""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    """products of MLPs have biases, those of experts each its own"""
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys, as in Qwen3"""
    qk_norm_whole: bool = False
    """that norm is over all heads together, as in OLMo 2"""
    qk_norm_turned: bool = False
    """that norm is of what rope has turned, as in Hunyuan

    Without weights, blocks whose rope turns nothing have none, as in Llama 4.
    """
    sliding_window: int | None = Field(default=None, gt=0, le=10**9)
    """tokens that a token attends to: itself and those just before it; null: all before it"""
    attention_chunk: int | None = Field(default=None, gt=0, le=10**9)
    """tokens of a chunk: a token attends to those before it in its own (Llama 4); null: to all"""
    attention_pattern: tuple[str, ...] = ()
    """runs of local and global blocks, over and over, such as [5 local, 1 global]

    Local blocks have the sliding window or chunks, and `local_rope_theta`. Global ones see all
    tokens. Without a pattern, all blocks are alike.
    """
    local_rope_theta: float | None = Field(default=None, gt=0)
    """rope's base in local blocks, whose angles are not scaled; null: that of global ones"""
    global_rope: bool = True
    """false: rope turns nothing in global blocks, as in SmolLM3; without windows, in none"""
    global_query_growth: QueryGrowth | None = None
    """queries grow with their position in global blocks, whose rope turns nothing (Llama 4)"""
    attention_sinks: bool = False
    """each head has a trained logit that counts in its softmax's sum alone, as in GPT-OSS"""
    attention_gate: bool = False
    """what attention gives is multiplied by the sigmoid of a gate of each column (Qwen3-Next)"""
    gate_of_heads: bool = False
    """that gate has one number for all columns of a head (LFM3)"""
    score_scale: float | None = Field(default=None, gt=0)
    """factor of products of queries and keys; null: 1 / root of `head_dim`"""
    score_cap: float | None = Field(default=None, gt=0)
    """scores s become cap * tanh(s / cap), as in Gemma 2; null: not"""
    logit_cap: float | None = Field(default=None, gt=0)
    """the same of the scores of words"""
    source: str = Field(min_length=1)
    """where the dimensions come from"""

    @model_validator(mode="after")
    def _check(self) -> Architecture:
        derived = "head_dim" not in self.model_fields_set and self.latent_attention is None
        if derived and self.hidden % self.heads:
            raise InputError(
                f"`hidden` {self.hidden} is not a multiple of `heads` {self.heads}; "
                "state `head_dim`, or change one of them"
            )
        check_experts(self)
        check_attention(self)
        check_norms(self)
        check_latent(self)
        check_mixers(self)
        check_heads(self)
        check_carried(self)
        if self.heads % self.kv_heads:
            raise InputError(
                f"`heads` {self.heads} is not a multiple of `kv_heads` {self.kv_heads}; "
                "each key/value head must serve equally many query heads"
            )
        check_positions(self)
        return self

    def implausible(self) -> Iterator[tuple[KeyPath, str]]:
        """Blocks that all read another's keys, as kinds of blocks see their model."""
        if self.keys_given and self.key_sharing is not None:
            told = (
                f"is {self.key_sharing.blocks}, which leaves none of `layers` {self.layers} with "
                "keys for others; share fewer"
            )
            yield ("key_sharing", "blocks"), told

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What mixes tokens in every block."""
        alone = ATTENTION if self.mixer_pattern else self.mixer
        return mixers_of(self.mixer_pattern, self.layers, alone)

    @property
    def mixer(self) -> Mixer:
        """What mixes tokens in all blocks; with a `mixer_pattern`, attention in some of them.

        `mlp`: nothing does, because all blocks are MLPs alone.
        """
        others = (name for name in BESIDE_ATTENTION if getattr(self, name) is not None)
        alone = bool(self.mixer_pattern) and set(self.mixers) == {MLP}
        return MLP if alone else ATTENTION if self.mixer_pattern else next(others, ATTENTION)

    @property
    def dense(self) -> tuple[bool, ...]:
        """Whether each block has one MLP for all tokens, in a model whose others have experts."""
        if not self.expert_pattern:
            return tuple(number < self.dense_blocks for number in range(self.layers))
        words = in_runs("expert_pattern", self.expert_pattern, self.layers, (DENSE, ROUTED))
        alone = MLP in self.mixers  # of mixers alone the pattern says nothing
        pairs = zip(words, self.mixers, strict=True)
        return tuple(word == DENSE and (mixer == MLP or not alone) for word, mixer in pairs)

    @property
    def keys_given(self) -> bool:
        """Whether blocks, if all are alike, read keys and values that others have made."""
        return self.key_sharing is not None and all(shares_keys(self))

    @property
    def attentions(self) -> tuple[BlockAttention, ...]:
        """The attention of every block."""
        far = BlockAttention(
            None,
            self.rope_theta if self.positions == "rope" and self.global_rope else None,
            self.rope_scaling is not None and self.global_rope,
            growth=self.global_query_growth,
        )
        turned = self.positions == "rope"
        near = BlockAttention(
            self.sliding_window,
            (self.local_rope_theta or self.rope_theta) if turned else None,
            self.rope_scaling is not None and self.local_rope_theta is None,
            self.attention_chunk,
        )
        alike = not self.attention_pattern and not self.global_rope  # all blocks are global
        return of_blocks(self.attention_pattern, self.layers, far if alike else near, far)

    @property
    def attention_shares(self) -> Mapping[BlockAttention, float]:
        """The part of the blocks that has each kind of attention, of the first block's first."""
        return shares_of(self.attentions)

    @property
    def weighted_by(self) -> Routing:
        """As `routed_by`, with the factor of what a block adds in experts' weights."""
        routing = self.routed_by
        if self.residual_scale == 1:
            return routing
        return routing.model_copy(update={"scale": routing.scale * self.residual_scale})

    @property
    def mixers_of_a_block(self) -> tuple[Mixer, ...]:
        """What mixes tokens in each block of a model whose blocks are alike, in turns."""
        return (self.mixer,) if self.attention_beside is None else (ATTENTION, self.mixer)

    def scale_of(self, part: str) -> float:
        """Factor of what a part of a block adds to the residual stream: a mixer, or "mlp"."""
        own = {"mlp": self.mlp_scale}
        if (beside := self.attention_beside) is not None:
            own |= {ATTENTION: beside.attention_scale, self.mixer: beside.other_scale}
        return self.residual_scale * own.get(part, 1.0)

    def closes(self, part: str) -> bool:
        """Whether what a part of a block gives is normed before it is added."""
        return self.norms != "before" or (part == "mlp" and self.expert_norms != "as_others")

    def adds_product_of(self, part: str) -> bool:
        """Whether the product of a part of a block is added as it is, not normed or scaled."""
        return not self.closes(part) and self.scale_of(part) == 1

    @property
    def has_mlp(self) -> bool:
        """Whether a block has an MLP, or experts, besides its mixer."""
        return self.ffn > 0

    @property
    def gated(self) -> bool:
        """Whether the MLP's activation is a product of two inputs."""
        return self.mlp in ("swiglu", "clamped_swiglu", "geglu")

    @property
    def expert_width(self) -> int:
        """Columns of what experts read and give."""
        return self.expert_latent or self.hidden

    @property
    def routes_apart(self) -> bool:
        """Whether routers read something else than experts do."""
        return self.expert_norms == "each" or self.expert_latent > 0

    @property
    def routed_by(self) -> Routing:
        """How a token's experts are chosen."""
        return self.routing or Routing()

    @property
    def inner_widths(self) -> tuple[int, ...]:
        """Inner widths of MLPs, which tensor-parallel ranks share out; 0 where there is none."""
        return self.ffn, self.shared_ffn, self.dense_ffn

    @property
    def scale_of_scores(self) -> float:
        """Factor of products of queries and keys."""
        scale = self.score_scale or self.head_dim**-0.5
        scaling = self.rope_scaling if self.latent_attention is not None else None
        return scale * scaling.score_factor if scaling else scale

    def window_within(self, length: int) -> int | None:
        """The narrowest window, if it hides a token of a sequence of this length."""
        window = self.sliding_window
        return window if window is not None and window < length else None

    @property
    def attention_width(self) -> int:
        """Columns of o_proj: heads x value_width (not always `hidden`)."""
        return self.heads * self.value_width

    @property
    def value_width(self) -> int:
        """Columns of one head's values."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.value_dim

    @property
    def kv_width(self) -> int:
        """Rows of k_proj and of v_proj."""
        return self.kv_heads * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Columns of a head that rope rotates: its first, or latent attention's last."""
        if self.latent_attention is not None:
            return self.latent_attention.rope_dim
        return int(self.head_dim * self.rotary_fraction)
