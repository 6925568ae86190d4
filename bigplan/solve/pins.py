"""Decisions the user fixes: `--set KEY=VALUE`, where KEY and VALUE are

    dp tp pp zero micro_batch accumulation_group = N       the strategy
    [KIND.]parameters|gradients|optimizer|activations = TIER          all of it on one tier
    [KIND.]parameters|gradients|activations.TIER = N                  layers per stage
    [KIND.]optimizer.TIER = F                                         fraction of the state
    [KIND.]recompute = none|full,   [KIND.]recompute.full = N

KIND is a kind of layer; without it, a pin speaks of all kinds (a count: of the repeated layers).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bigplan.errors import InputError
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.solve.linear import Linear, Rule, total
from bigplan.solve.stage import StageClass

STRATEGY_KEYS = tuple(Strategy.model_fields)
TENSORS = ("parameters", "gradients", "optimizer", "activations", "recompute")


@dataclass(frozen=True, slots=True)
class Pin:
    """One fixed decision; `choice` is a tier or a recompute policy, `amount` None means all."""

    kind: str | None
    tensor: str
    choice: str
    amount: float | None


def parse_pins(settings: Mapping[str, str | int | float]) -> tuple[dict[str, int], tuple[Pin, ...]]:
    """Strategy values and placement pins. Raises InputError: key, value and what is allowed."""
    strategy: dict[str, int] = {}
    pins = []
    for key, value in settings.items():
        if key in STRATEGY_KEYS:
            strategy[key] = _whole(key, value)
        else:
            pins.append(_pin(key, value))
    return strategy, tuple(pins)


def _pin(key: str, value: str | int | float) -> Pin:
    parts = key.split(".")
    kind = parts.pop(0) if len(parts) > 1 and parts[0] not in TENSORS else None
    if not parts or parts[0] not in TENSORS or len(parts) > 2:
        known = (*STRATEGY_KEYS, *TENSORS)
        close = difflib.get_close_matches(key, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"--set {key}: no such decision{hint} (decisions: {', '.join(known)})")
    tensor = parts[0]
    choices = list(Recompute) if tensor == "recompute" else list(Tier)
    if len(parts) == 1:
        return Pin(kind, tensor, _choice(key, str(value), choices), None)
    choice = _choice(key, parts[1], choices)
    amount = _number(key, value) if tensor == "optimizer" else float(_whole(key, value))
    return Pin(kind, tensor, choice, amount)


def _choice(key: str, value: str, choices: list[Recompute] | list[Tier]) -> str:
    if value not in [str(choice) for choice in choices]:
        raise InputError(f"--set {key}: {value!r} is not one of {', '.join(choices)}")
    return value


def _whole(key: str, value: str | int | float) -> int:
    number = _number(key, value)
    if number != int(number) or number < 0:
        raise InputError(f"--set {key}={value}: write a whole number, such as {key}=4")
    return int(number)


def _number(key: str, value: str | int | float) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"--set {key}={value}: write a number, such as {key}=1") from None


def pin_rules(stage: StageClass, pins: tuple[Pin, ...]) -> Iterator[Rule]:
    """The pins that concern a class of stages."""
    for pin in pins:
        names = [kind.name for kind, _ in stage.kinds]
        if pin.kind is not None and pin.kind not in stage.graph.kinds:
            known = ", ".join(stage.graph.kinds)
            raise InputError(f"--set {pin.kind}.{pin.tensor}: no such layer kind (kinds: {known})")
        for kind, count in stage.kinds:
            if pin.kind in (None, kind.name) and kind.name in names and _movable(pin, kind):
                amount = count if pin.amount is None else pin.amount
                if pin.tensor == "optimizer" and pin.amount is not None:
                    amount = pin.amount * count
                if pin.kind is None and pin.amount is not None and kind.name != _main(stage):
                    continue  # counts without a kind speak of the repeated layers
                label = f"{stage.name}.{kind.name}: {pin.tensor} {pin.choice} set by the user"
                yield Rule(label, _pinned(stage, kind, pin) - amount, equal=True)


def _main(stage: StageClass) -> str:
    return max(stage.counts, key=lambda item: item[1])[0]


def _movable(pin: Pin, kind: LayerKind) -> bool:
    if pin.tensor in ("activations", "recompute"):
        return kind.stores_activations or pin.kind == kind.name
    return not (kind.pinned and pin.tensor != "optimizer") or pin.kind == kind.name


def _pinned(stage: StageClass, kind: LayerKind, pin: Pin) -> Linear:
    if pin.tensor == "activations":
        tier = Tier(pin.choice)
        return total([stage.policy(kind, recompute, tier) for recompute in Recompute])
    if pin.tensor == "recompute":
        recompute = Recompute(pin.choice)
        return total([stage.policy(kind, recompute, tier) for tier in Tier])
    return stage.tensor(kind, pin.tensor, Tier(pin.choice))
