"""Master weights and moments of a DeepSpeed engine, parameter by parameter, whoever holds them.

All ranks call these functions in the same order: under ZeRO a value is brought together from all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")


def optimizers(engine: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that step: under Twin-Flow a second one updates on the GPU."""
    yield engine.basic_optimizer
    backup = getattr(engine.optimizer, "backup_optimizer", None)
    if backup is not None:
        yield backup


def set_rates(engine: Any, rate: float) -> None:
    """The learning rate of the coming update; a group's "factor" multiplies it."""
    for optimizer in optimizers(engine):
        groups = zip(optimizer.param_groups, engine.basic_optimizer.param_groups, strict=False)
        for group, described in groups:
            group["lr"] = rate * described["factor"]


def set_count(engine: Any, updates: int) -> None:
    """Let every optimizer state have seen so many updates, for their bias corrections."""
    for optimizer in optimizers(engine):
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(updates)
            elif "step" in state:
                state["step"] = updates


def link_moments(engine: Any) -> None:
    """Let the functions below find every moment; after the first update.

    DeepSpeed 0.19.8 looks for the moments of all groups after it has updated the first group, so it
    never finds those of the others. With a ratio that leaves parts on the GPU, it also misses the
    moments of ZeRO 3's parts that a second optimizer updates there.
    """
    optimizer = engine.optimizer
    if (beside := getattr(optimizer, "backup_optimizer", None)) is not None:
        for part in optimizer.fp32_partitioned_groups_flat:
            if part in beside.state:
                optimizer.optimizer.state[part] = beside.state[part]
    if getattr(optimizer, "_hp_optimizer_states_linked", None):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def put(engine: Any, parameter: nn.Parameter, values: Mapping[Kind, Tensor]) -> None:
    """Replace a parameter's master copy ("master") and moments by fp32 values in its shape."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    device = engine.device
    own = _own(engine, parameter)
    for kind, value in values.items():
        if own is not None:
            found = own if kind == "master" else engine.basic_optimizer.state[own][kind]
            found.data.copy_(value)
        elif kind == "master":
            safe_set_full_fp32_param(parameter, value.to(device))
        else:
            safe_set_full_optimizer_state(parameter, value.to(device), kind)


def get(engine: Any, parameter: nn.Parameter, kind: Kind) -> Tensor:
    """The master copy ("master") or a moment, whole, fp32 on the CPU."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    own, found = _own(engine, parameter), None
    if own is not None:
        found = own if kind == "master" else engine.basic_optimizer.state[own][kind]
    elif kind == "master":
        found = safe_get_full_fp32_param(parameter)
    else:
        found = safe_get_full_optimizer_state(parameter, kind)
    assert found is not None, kind
    return found.detach().float().cpu()


def _own(engine: Any, parameter: nn.Parameter) -> Tensor | None:
    """What torch's own optimizer steps for a parameter without ZeRO; None: ZeRO's flat buffers.

    In fp32 it is the parameter itself, in 16 bits a copy.
    """
    if engine.optimizer is engine.basic_optimizer:
        return parameter
    copies = getattr(engine.optimizer, "fp32_groups", None)
    if copies is None:
        return None
    groups = zip(engine.optimizer.fp16_groups, copies, strict=True)
    pairs = (pair for group in groups for pair in zip(*group, strict=True))
    found: Tensor = next(copy for low, copy in pairs if low is parameter)
    return found
