"""Configurations of other tools, priced; bigplan/export goes the other way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bigplan.intake import accelerate, deepspeed, megatron, torchtitan
from bigplan.intake.setup import Given, Setup

__all__ = ["TOOLS", "Given", "Setup"]

TOOLS: dict[str, Callable[[Path, Given], Setup]] = {
    "deepspeed": deepspeed.read,
    "accelerate": accelerate.read,
    "megatron": megatron.read,
    "torchtitan": torchtitan.read,
}
