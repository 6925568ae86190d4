"""What is open where a training framework runs a plan, and the placement that follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.cost.step import Execution
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy, chunk_blocks, chunk_ranges
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.spec.layers import BLOCKS
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training


@dataclass(frozen=True, slots=True)
class Way:
    """Frameworks treat all layers alike, except for how many blocks they recompute."""

    strategy: Strategy
    policy: Recompute = Recompute.NONE
    again: int = 0  # recomputed blocks of each chunk; all of them, where a chunk has fewer
    on_cpu: float = 0.0  # share of the optimizer state that host memory keeps and the CPU updates
    parameters_on_host: bool = False  # and gradients with them

    def blocks(self, model: ModelSpec) -> Iterator[Counter[tuple[str, bool]]]:
        """Blocks of each stage, first to last, by kind and whether they run again.

        Those that do are the first of each chunk.
        """
        kinds = [kind for kind in model.layer_sequence() if kind in BLOCKS]
        chunks = chunk_ranges(chunk_blocks(model.layers, self.strategy))
        for stage in range(self.strategy.pp):
            mine = chunks[stage :: self.strategy.pp]
            yield Counter((kinds[i], i - chunk.start < self.again) for chunk in mine for i in chunk)

    def execution(self, model: ModelSpec) -> Execution:
        """What the closed formulas ask for; uneven stages all recompute the same share."""
        again = sum(n for stage in self.blocks(model) for (_, runs), n in stage.items() if runs)
        return Execution(
            recompute=self.policy,
            recomputed=again / model.layers,
            virtual_stages=self.strategy.vpp,
            cpu_update=self.on_cpu > 0,
            on_cpu=self.on_cpu,
            parameters_on_host=self.parameters_on_host,
        )

    def placement(self, model: ModelSpec, training: Training) -> Placement:
        """The way as counts of layers, the form that every plan has."""
        stages, last = list[StagePlacement](), self.strategy.pp - 1
        for stage, blocks in enumerate(self.blocks(model)):
            kinds = {
                name: self._kind(blocks[name, True] + blocks[name, False], blocks[name, True])
                for name in dict.fromkeys(name for name, _ in blocks)
            }
            if stage == 0:
                kinds["embedding"] = self._kind(1, 0)
            if stage == last:
                kinds["head"] = self._kind(1, 0)
            stages.append(StagePlacement(kinds=kinds))
        tokens = self.strategy.micro_batch * training.sequence_length
        return Placement(stages=tuple(stages), loss_chunk=tokens)

    def _kind(self, layers: int, again: int) -> KindPlacement:
        home = Tier.HOST if self.parameters_on_host else Tier.GPU
        kept = {Recompute.NONE: layers - again, self.policy: again} if again else {}
        optimizer = {Tier.GPU: (1.0 - self.on_cpu) * layers, Tier.HOST: self.on_cpu * layers}
        return KindPlacement(
            layers=layers,
            parameters={home: layers},
            gradients={home: layers},
            activations={
                policy: {Tier.GPU: count}
                for policy, count in (kept or {Recompute.NONE: layers}).items()
                if count
            },
            optimizer={tier: count for tier, count in optimizer.items() if count},
        )

    @classmethod
    def of(cls, plan: Plan) -> Way:
        """The way that a plan describes; comparison finds whether its placement says more."""
        block = plan.placement.stages[0].blocks
        chunks = chunk_blocks(plan.model.layers, plan.strategy)
        again: dict[Recompute, int] = {
            policy: sum(tiers.values())
            for policy, tiers in block.activations.items()
            if policy is not Recompute.NONE and any(tiers.values())
        }
        policy, count = next(iter(again.items()), (Recompute.NONE, 0))
        each = max(chunks) if count == block.layers else count // plan.strategy.vpp
        return cls(
            plan.strategy,
            policy,
            each if count else 0,
            on_cpu=block.optimizer.get(Tier.HOST, 0.0) / block.layers,
            parameters_on_host=bool(block.parameters.get(Tier.HOST)),
        )
