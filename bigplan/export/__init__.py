"""A plan as the configuration of another tool, with what that cannot express."""

from __future__ import annotations

from collections.abc import Callable

from bigplan.export import accelerate, deepspeed, fsdp2, megatron, nemo, torchtitan
from bigplan.export.written import WrittenConfig
from bigplan.plan import Plan

__all__ = ["TOOLS", "WrittenConfig"]

TOOLS: dict[str, Callable[[Plan], WrittenConfig]] = {
    "deepspeed": deepspeed.written,
    "fsdp2": fsdp2.written,
    "accelerate": accelerate.written,
    "megatron": megatron.written,
    "torchtitan": torchtitan.written,
    "nemo": nemo.written,
}
