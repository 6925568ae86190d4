"""A plan as the configuration of another tool, with what that cannot express."""

from __future__ import annotations

from collections.abc import Callable

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.errors import RefusedError
from bigplan.export import accelerate, deepspeed, fsdp2, megatron, nemo, torchtitan
from bigplan.export.written import WrittenConfig
from bigplan.plan import Plan

__all__ = ["TOOLS", "WrittenConfig", "configuration"]

TOOLS: dict[str, Callable[[Plan], WrittenConfig]] = {
    "deepspeed": deepspeed.written,
    "fsdp2": fsdp2.written,
    "accelerate": accelerate.written,
    "megatron": megatron.written,
    "torchtitan": torchtitan.written,
    "nemo": nemo.written,
}


def configuration(plan: Plan, tool: str) -> WrittenConfig:
    """The plan for a tool of TOOLS.

    Raises RefusedError for models that it is not planned for, and where ranks have unequal work.
    """
    if why := other_tools_refusal(plan.model, plan.training, tool):
        raise RefusedError(why)
    if plan.strategy.replicas:
        raise RefusedError(
            f"the plan's groups of nodes have micro-batches of unlike sizes, and {tool} has one "
            f"size for all ranks; plan with --engine {tool}"
        )
    return TOOLS[tool](plan)
