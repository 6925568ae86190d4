"""What a plan's configuration asks of the process that runs DeepSpeed. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OFFLOADS = ("offload_optimizer", "offload_param")


def settings(config: Mapping[str, Any], scratch: Path | None = None) -> dict[str, Any]:
    """A plan's configuration as DeepSpeed takes it; what lives on a drive is in `scratch`."""
    found: dict[str, Any] = json.loads(json.dumps(config["json"]))
    for part in _offloaded(found):
        if part["device"] == "nvme" and scratch is not None:
            part["nvme_path"] = str(scratch)
    return found


def pins_itself(config: Mapping[str, Any]) -> bool:
    """Whether the plan has DeepSpeed page-lock memory by its own means."""
    return bool(config["environment"].get("DS_PIN_MEMORY_BACKEND") == "native")


def updates_on_cpu(found: Mapping[str, Any]) -> bool:
    """Whether CPUs update optimizer state by DeepSpeed's settings, all of it or a part."""
    return bool(found["zero_optimization"].get("offload_optimizer"))


def uses_own_adam(found: Mapping[str, Any]) -> bool:
    """Whether that is by DeepSpeed's compiled AdamW; else torch's, for which it has a switch."""
    return updates_on_cpu(found) and bool(found.get("zero_force_ds_cpu_optimizer", True))


def needed(config: Mapping[str, Any]) -> list[str]:
    """The compiled operators that a plan's configuration uses."""
    found = settings(config)
    uses = {
        "cpu_adam": uses_own_adam(found),
        "pin_memory": pins_itself(config),
        "async_io": any(part["device"] == "nvme" for part in _offloaded(found)),
    }
    return [name for name, used in uses.items() if used]


def _offloaded(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    zero = found["zero_optimization"]
    return [zero[name] for name in OFFLOADS if zero.get(name)]
