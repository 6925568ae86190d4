"""Files written for a tool, and what every tool needs to know of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.graph.graph import Recompute
from bigplan.graph.told import strategy_text
from bigplan.placement import KindPlacement, Tier
from bigplan.plan import Plan
from bigplan.units import format_seconds

HINT = "plan what the tool can do: leave decisions that it has not to it with --set"


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """Files by name, and a sentence for each part of the plan that no file expresses."""

    files: dict[str, str]
    lost: tuple[str, ...]


def heading(plan: Plan, lost: tuple[str, ...]) -> str:
    """The plan's promise and what is lost, as comments."""
    predicted = plan.predicted
    lines = [
        f"{plan.model.name} on {plan.cluster.group.gpus} x {plan.cluster.group.gpu.name}: "
        f"{strategy_text(plan.strategy)}",
        f"Predicted for bigplan's plan: {format_seconds(predicted.step_seconds)} a step, "
        f"{predicted.tokens_per_second:,.0f} tokens/s",
    ]
    if lost:
        lines.append("Not in here, so a step takes other time and memory than predicted:")
        lines += [f"- {each}" for each in lost]
    return "".join(f"# {line}\n" for line in lines)


def attention_of(plan: Plan) -> str:
    """A comment for tools that train the user's own model: the kernel within its window, if any.

    Under a mask, torch's scaled_dot_product_attention computes all pairs of tokens.
    """
    window = plan.model.window_within(plan.training.sequence_length)
    if window is None:
        return ""
    return (
        f"# Priced is attention within the window of {window} tokens by FlashAttention-2, in "
        'transformers attn_implementation="flash_attention_2"; a mask takes as long as no window\n'
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """The placement of the blocks of a plan's first stage."""

    placed: KindPlacement

    @classmethod
    def of(cls, plan: Plan) -> Blocks:
        """The first stage's blocks; tools treat all stages alike but for their ends."""
        return cls(plan.placement.stages[0].blocks)

    def recomputed(self, policy: Recompute) -> int:
        """How many blocks recompute by this policy."""
        return sum(self.placed.activations.get(policy, {}).values())

    @property
    def state_away(self) -> float:
        """The share of optimizer state that is off the GPU."""
        return 1.0 - self.placed.optimizer.get(Tier.GPU, 0.0) / self.placed.layers

    def away(self, tensors: str) -> bool:
        """Whether any parameters, or gradients, leave the GPU."""
        return any(
            count for tier, count in getattr(self.placed, tensors).items() if tier is not Tier.GPU
        )

    @property
    def activations_away(self) -> bool:
        """Whether any activations leave the GPU."""
        kept = self.placed.activations.values()
        return any(n for tiers in kept for tier, n in tiers.items() if tier is not Tier.GPU)

    @property
    def on_drives(self) -> bool:
        """Whether anything lives on drives."""
        tensors = (self.placed.parameters, self.placed.gradients, self.placed.optimizer)
        return any(tiers.get(Tier.NVME) for tiers in tensors)


def lost_by_all(plan: Plan) -> Iterator[str]:
    """Parts of the plan that only bigplan's own runtime can express."""
    blocks = Blocks.of(plan)
    if plan.strategy.accumulation_group > 1:
        yield (
            f"{plan.strategy.accumulation_group} micro-batches pass through a layer before the "
            "next layer"
        )
    if blocks.placed.streamed:
        yield "optimizer state streamed from host memory through the GPU for its update"
    if blocks.activations_away:
        yield "activations in host memory or on drives between forward and backward"
    if blocks.recomputed(Recompute.MLP):
        yield f"{blocks.recomputed(Recompute.MLP)} blocks recomputed in the MLP alone"
    if plan.placement.loss_chunk < plan.strategy.rank_tokens(plan.training):
        yield f"the loss of {plan.placement.loss_chunk} tokens at a time"


def lost_groups(plan: Plan) -> Iterator[str]:
    """Sharding over groups of ranks, of tools that are given none."""
    if ranks := plan.strategy.zero_group:
        yield f"ZeRO over groups of {ranks} ranks: over all is written"


def lost_eight_bits(plan: Plan) -> Iterator[str]:
    """Products in fp8, of tools that are not told of them."""
    if plan.training.fp8_gemms:
        yield f"products in fp8: in {plan.training.precision}"


def lost_without_context(plan: Plan) -> Iterator[str]:
    """What tools that know neither context parallelism nor fp8 from their file do not do."""
    yield from lost_by_all(plan)
    yield from lost_eight_bits(plan)
    if plan.strategy.cp > 1:
        yield f"context parallelism of {plan.strategy.cp}"
