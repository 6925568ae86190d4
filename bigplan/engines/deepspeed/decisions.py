"""What a plan for DeepSpeed decides, and the placement and configuration that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from bigplan.errors import InputError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy, chunk_blocks
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.plan import Plan

DEVICES = {Tier.HOST: "cpu", Tier.NVME: "nvme"}
_TIERS = {device: tier for tier, device in DEVICES.items()}


@dataclass(frozen=True, slots=True)
class Decisions:
    """All that is open where DeepSpeed executes a plan.

    On one GPU `strategy.zero` is 0, whatever DeepSpeed's `stage` is: nothing is sharded, but
    DeepSpeed offloads only with a stage.
    """

    strategy: Strategy
    stage: int
    state: Tier = Tier.GPU  # of master copies and moments
    parameters: Tier = Tier.GPU  # of 16-bit parameters; off the GPU only with stage 3
    on_cpu: float = 1.0  # of the state in host memory: what the CPU keeps and updates (Twin-Flow)
    recompute: bool = False  # every block, from its input
    loss_chunk: int = 1
    own_pinning: bool = True  # page-locked blocks have their own size, not powers of two

    def problems(self) -> Iterator[str]:
        """Combinations that DeepSpeed refuses."""
        if self.strategy.pp > 1 and self.stage > 1:
            yield f"pipelines need ZeRO stage 0 or 1, not {self.stage}"
        if self.parameters is not Tier.GPU and self.stage < 3:
            yield f"parameters on {self.parameters} need ZeRO stage 3, not {self.stage}"
        if self.state is not Tier.GPU and self.stage == 0:
            yield f"optimizer state on {self.state} needs ZeRO stage 1, 2 or 3"
        if self.state is Tier.NVME and self.stage < 3:
            yield f"optimizer state on NVMe needs ZeRO stage 3, not {self.stage}"
        if self.parameters is not Tier.GPU and self.state is Tier.GPU:
            yield f"parameters on {self.parameters} need optimizer state off the GPU as well"
        if self.on_cpu < 1.0 and (self.stage < 3 or self.state is not Tier.HOST):
            yield "a part of the state alone on the CPU (ratio) needs ZeRO stage 3 and host memory"
        if self.on_cpu < 1.0 and self.parameters is not Tier.GPU:
            yield "a part of the state alone on the CPU (ratio) needs parameters on the GPU"

    def placement(self, every: int, resident: float) -> Placement:
        """These decisions as counts of layers, the form that every plan has.

        `every`: blocks of the model. `resident`: share of the optimizer state that is on the GPU.
        """
        last, found = self.strategy.pp - 1, list[StagePlacement]()
        for stage, blocks in enumerate(chunk_blocks(every, self.strategy)):
            counts = {"embedding": int(stage == 0), "block": blocks, "head": int(stage == last)}
            kinds = {
                kind: self._kind(count, resident, is_block=kind == "block")
                for kind, count in counts.items()
                if count
            }
            found.append(StagePlacement(kinds=kinds))
        return Placement(stages=tuple(found), loss_chunk=self.loss_chunk)

    def _kind(self, layers: int, resident: float, *, is_block: bool) -> KindPlacement:
        again = Recompute.FULL if self.recompute and is_block else Recompute.NONE
        gpu = resident * layers
        whole = ceil(gpu - 1e-9)
        gradients = {Tier.GPU: whole, Tier.HOST: layers - whole}
        optimizer = {Tier.GPU: gpu, self.state: layers - gpu} if gpu < layers else {Tier.GPU: gpu}
        return KindPlacement(
            layers=layers,
            parameters={self.parameters: layers},
            gradients={tier: count for tier, count in gradients.items() if count},
            activations={again: {Tier.GPU: layers}},
            optimizer={tier: count for tier, count in optimizer.items() if count},
        )

    @classmethod
    def of(cls, plan: Plan) -> Decisions:
        """Decisions read from a plan's configuration. Raises InputError where it holds none."""
        config: Mapping[str, Any] = plan.config
        try:
            zero = config["json"]["zero_optimization"]
            state, parameters = zero.get("offload_optimizer"), zero.get("offload_param")
            activations = plan.placement.stages[0].kinds["block"].activations
            found = cls(
                strategy=plan.strategy,
                stage=int(zero["stage"]),
                state=_TIERS[state["device"]] if state else Tier.GPU,
                parameters=_TIERS[parameters["device"]] if parameters else Tier.GPU,
                on_cpu=float(state.get("ratio", 1.0)) if state else 1.0,
                recompute=bool(sum(activations.get(Recompute.FULL, {}).values())),
                loss_chunk=plan.placement.loss_chunk,
                own_pinning=config["environment"].get("DS_PIN_MEMORY_BACKEND") != "torch",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"config: not a configuration that bigplan wrote for DeepSpeed ({error!r})"
            ) from None
        for problem in found.problems():
            raise InputError(f"config: {problem}")
        return found
