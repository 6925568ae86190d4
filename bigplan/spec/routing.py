"""How the experts of a token are chosen and weighted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bigplan.spec.files.document import Spec


class Routing(Spec):
    """How a router's scores become a token's experts and their weights.

    Shares of experts are a softmax over all scores, or the sigmoid of each. A token gets the
    experts with the largest shares, plus `bias` where there is one; its weights are shares without
    the bias (DeepSeek-V3, arXiv 2412.19437, equations 13 to 16).

    With SparseMixer (arXiv 2409.12136) a token's experts are those with the largest scores, one
    after the other. Each weighs its share by a softmax over those that were not chosen before it
    and whose score s comes near the largest m of these: (m - s) / max(|s|, m) is at most twice
    `jitter`. So transformers' PhiMoE evaluates; what its training draws by chance is left out.
    """

    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = Field(default=0.01, gt=0, le=1)
    """of SparseMixer: half of the relative distance of scores that count"""
    bias: bool = False
    """numbers added to shares where experts are chosen; training leaves them as they are"""
    bias_of: Literal["shares", "scores"] = "shares"
    """what these are added to: shares, or scores before they are shares (Kolibri 1)"""
    score_bias: bool = False
    """a trained bias is added to scores, as in GPT-OSS"""
    score_scale: float = Field(default=1.0, gt=0)
    """factor of scores: 1 / root of `hidden` in Gemma 4"""
    expert_scales: bool = False
    """a token's weights are multiplied by a trained number of each expert, as in Gemma 4"""
    groups: int = Field(default=1, ge=1, le=10**4)
    """equal groups of experts; a token chooses among the experts of some groups alone"""
    groups_per_token: int = Field(default=1, ge=1, le=10**4)
    """these: the groups whose best experts together have most"""
    group_best: int = Field(default=2, ge=1, le=10**4)
    """experts of a group that count for it, its best: 2 in DeepSeek-V3, 1 in V2"""
    weighs: Literal["outputs", "inputs"] = "outputs"
    """what the weights multiply: what experts give, or what they read, as in Llama 4"""
    scale: float = Field(default=1.0, gt=0)
    """factor of all weights"""

    @property
    def own(self) -> tuple[str, ...]:
        """What Megatron-LM's routers have not, which wants sigmoids beside a bias."""
        parts = {
            "score_bias": self.score_bias,
            "bias beside softmax": self.bias and self.scores == "softmax",
            "scores sparsemixer": self.scores == "sparsemixer",
            "bias_of scores": self.bias_of == "scores",
            "score_scale": self.score_scale != 1,
            "expert_scales": self.expert_scales,
        }
        return tuple(part for part, there in parts.items() if there)

    def problem(self, experts: int, each: int) -> str | None:
        """Why a token cannot choose `each` of so many experts like this; None: it can."""
        if self.scores == "sparsemixer" and (self.bias or self.groups > 1):
            beside = "bias" if self.bias else "groups"
            return (
                f"`routing.scores` is sparsemixer with `routing.{beside}`, but it chooses the "
                "largest scores of all experts; remove one"
            )
        if self.bias_of == "scores" and not self.bias:
            return "`routing.bias_of` is scores without `routing.bias`; state it, or remove this"
        if self.groups == self.groups_per_token == 1:
            return None
        size, rest = divmod(experts, self.groups)
        best = {1: "one", 2: "two"}.get(self.group_best, str(self.group_best))
        if rest or size < self.group_best:
            return (
                f"`routing.groups` {self.groups} must divide `experts` {experts} into groups of "
                f"{best} or more, the {best} best of which are added up; correct it"
            )
        if self.groups_per_token > self.groups or self.groups_per_token * size < each:
            return (
                f"`routing.groups_per_token` {self.groups_per_token} of {self.groups} groups of "
                f"{size} experts must hold `experts_per_token` {each}; correct it"
            )
        return None
