"""Decisions the user fixes: `--set KEY=VALUE`, where KEY and VALUE are

    dp cp tp pp vpp ep zero micro_batch accumulation_group first_blocks last_blocks
        sequence_parallel = N                   the strategy
    zero_group = N                              ranks that share what ZeRO shards; 0: all
    [WHERE.]parameters|gradients|optimizer|activations = TIER          all of it on one tier
    [WHERE.]parameters|gradients|activations.TIER = N                  layers per stage
    [WHERE.]optimizer.TIER = F                                         fraction of the state
    [WHERE.]streamed = F                              fraction of it that passes through the GPU
    [WHERE.]recompute = none|selective|mlp|full,   [WHERE.]recompute.full = N
    [WHERE.]activations.none|selective|mlp|full.TIER = N                   both at once
    slots sums = N,   shared_ends = 0|1                                rings on the GPU
    loss_chunk = N                                                     tokens of logits at a time
    captured = 0|1                       blocks' passes repeated by the GPU, from CUDA graphs

WHERE is [STAGE.][KIND]: a class of stages (first, middle, late, last) and a kind of layer. Without
a kind, a pin speaks of all kinds (a count: of the repeated layers).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from bigplan.errors import InputError, quoted, shortened
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Rings, Tier
from bigplan.solve.alike import LEAN, ROOMY
from bigplan.solve.linear import Linear, Rule, total
from bigplan.solve.stage import StageClass
from bigplan.spec.files.words import did_you_mean
from bigplan.spec.gpu import Gpu
from bigplan.spec.layers import BLOCKS

STRATEGY_KEYS = tuple(key for key in Strategy.model_fields if key != "replicas")
RING_KEYS = Rings._fields
LOSS_CHUNK = "loss_chunk"
CAPTURED = "captured"
OF_PLAN = (*RING_KEYS, LOSS_CHUNK, CAPTURED)  # of a placement as a whole
WRITTEN = "written"  # bytes a step to a node's drives, at most; no key of --set
POSITIVE = (
    *("dp", "cp", "tp", "pp", "ep", "vpp", "micro_batch", "accumulation_group"),
    *("slots", "sums", LOSS_CHUNK),
)
ZERO = 3  # the highest of its stages
SWITCHES = ("sequence_parallel", "shared_ends", CAPTURED)
TRIED = (ROOMY, Rings(slots=2), Rings(slots=2, shared_ends=True), LEAN)  # the roomiest first
STAGES = ("all", "first", "middle", "late", "last")
STREAMED = "streamed"
MOVED = ("parameters", "gradients", "optimizer", "activations")
TENSORS = (*MOVED, "recompute", STREAMED)
OF_TRAINED = ("gradients", "optimizer", STREAMED)  # frozen layers have none of these
FRACTIONS = ("optimizer", STREAMED)  # of the state; other pins count layers


@dataclass(frozen=True, slots=True)
class Pin:
    """One fixed decision; `choice` is a tier, a recompute policy, or both (`full.host`).

    `amount` counts layers, of FRACTIONS it is a fraction of them; None means all. Rings have no
    choice, but an amount.
    """

    kind: str | None
    tensor: str
    choice: str
    amount: float | None
    stage: str | None = None  # a class of stages; None: all


def parse_pins(settings: Mapping[str, str | int | float]) -> tuple[dict[str, int], tuple[Pin, ...]]:
    """Strategy values and placement pins. Raises InputError: key, value and what is allowed."""
    strategy: dict[str, int] = {}
    pins = []
    for key, value in settings.items():
        if key in STRATEGY_KEYS:
            strategy[key] = _whole(key, value)
        elif key in OF_PLAN:
            pins.append(Pin(None, key, "", float(_whole(key, value))))
        else:
            pins.append(_pin(key, value))
    return strategy, tuple(pins)


def _pin(key: str, value: str | int | float) -> Pin:
    parts = key.split(".")
    stage = parts.pop(0) if len(parts) > 1 and parts[0] in STAGES else None
    kind = parts.pop(0) if len(parts) > 1 and parts[0] not in TENSORS else None
    if not parts or parts[0] not in TENSORS or len(parts) > (3 if parts[0] == TENSORS[3] else 2):
        known = (*STRATEGY_KEYS, *OF_PLAN, *TENSORS)
        hint = did_you_mean(key, known)
        raise InputError(
            f"--set {shortened(key)}: no such decision{hint} (decisions: {', '.join(known)})"
        )
    tensor = parts[0]
    if tensor == STREAMED:
        if len(parts) > 1:
            raise InputError(
                f"--set {shortened(key)}: streamed state is in host memory; write streamed=0.5"
            )
        return Pin(kind, tensor, "", _fraction(key, value), stage)
    choices = list(Recompute) if tensor == "recompute" else list(Tier)
    if len(parts) == 1:
        return Pin(kind, tensor, _choice(key, str(value), choices), None, stage)
    choice = _choice(key, parts[-1], choices)
    if len(parts) == 3:
        choice = f"{_choice(key, parts[1], list(Recompute))}.{choice}"
    amount = _fraction(key, value) if tensor == "optimizer" else float(_whole(key, value))
    return Pin(kind, tensor, choice, amount, stage)


def _shown(key: str, value: object) -> str:
    return f"{shortened(key)}={shortened(str(value))}"


def _choice(key: str, value: str, choices: list[Recompute] | list[Tier]) -> str:
    if value not in [str(choice) for choice in choices]:
        raise InputError(
            f"--set {shortened(key)}: {quoted(value)} is not one of {', '.join(choices)}"
        )
    return value


def _whole(key: str, value: str | int | float) -> int:
    number = _number(key, value, "0 or 1" if key in SWITCHES else "a number, such as 1")
    if key in SWITCHES and number not in (0, 1):
        raise InputError(f"--set {_shown(key, value)}: write 0 or 1")
    if not number.is_integer() or number < 0:
        raise InputError(f"--set {_shown(key, value)}: write a whole number, such as {key}=4")
    if number == 0 and key in POSITIVE:
        raise InputError(f"--set {key}=0: write a whole number of at least 1")
    if key == "zero" and number > ZERO:
        raise InputError(f"--set {_shown(key, value)}: ZeRO has stages up to {ZERO}")
    return int(number)


def _fraction(key: str, value: str | int | float) -> float:
    number = _number(key, value, "a number, such as 0.5")
    if not 0 <= number <= 1:
        raise InputError(f"--set {_shown(key, value)}: write a fraction from 0 to 1, such as 0.5")
    return number


def _number(key: str, value: str | int | float, wanted: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"--set {_shown(key, value)}: write {wanted}") from None


def refuse_of_trained(fixed: Mapping[str, int], pins: Iterable[Pin]) -> None:
    """Raise InputError for decisions that a model has not whose adapters alone are trained."""
    if fixed.get("zero") in (1, 2):
        raise InputError(
            f"--set zero={fixed['zero']}: with lora there are no gradients and no state that this "
            "would shard, but those of small adapters; use 0, or 3, which shards parameters"
        )
    for pin in pins:
        if pin.tensor in OF_TRAINED:
            raise InputError(
                f"--set {pin.tensor}: with lora the model is frozen and has no gradients and no "
                "optimizer state, and those of its adapters stay on the GPU; leave it out"
            )


def refuse_of_muon(pins: Iterable[Pin]) -> None:
    """Raise InputError for parts of layers, which Muon updates whole, and for state on drives."""
    for pin in pins:
        if pin.kind is not None and pin.kind not in BLOCKS:
            continue  # AdamW updates it
        if pin.tensor == "optimizer" and pin.choice == Tier.NVME and pin.amount != 0:
            raise InputError(
                "--set optimizer: nvme: the GPU makes Muon's updates, and brings their state from "
                "host memory alone; use host or gpu, or optimizer adamw"
            )
        if pin.tensor in FRACTIONS and pin.amount not in (None, 0.0, 1.0):
            raise InputError(
                f"--set {pin.tensor}: {pin.amount:g}: Muon updates layers whole, and which of them "
                f"the GPU holds is the search's decision; use 0 or 1, or leave it out"
            )


def refuse_of_launched(fixed: Mapping[str, int], pins: Iterable[Pin], gpu: Gpu) -> None:
    """Raise InputError for CUDA graphs where the device, or other ranks in a pass, allow none."""
    if not any(pin.tensor == CAPTURED and pin.amount for pin in pins):
        return
    if not gpu.runs_kernels:
        raise InputError(
            f"--set captured=1: CUDA graphs repeat kernels of a GPU, and {gpu.name} is none; leave "
            "it out"
        )
    for name in ("tp", "cp", "pp"):
        if (ways := fixed.get(name, 1)) > 1:
            raise InputError(
                f"--set captured=1 with {name}={ways}: CUDA graphs repeat passes in which no other "
                f"rank takes part; use {name}=1, or leave captured out"
            )


def refuse_unknown_kind(pin: Pin, kinds: Collection[str]) -> None:
    """Raise InputError where the pin is of layers of a kind that is not among these."""
    if pin.kind is not None and pin.kind not in kinds:
        known = ", ".join(kinds)
        raise InputError(
            f"--set {shortened(pin.kind)}.{pin.tensor}: no such layer kind (kinds: {known})"
        )


def pin_rules(stage: StageClass, pins: tuple[Pin, ...]) -> Iterator[Rule]:
    """The pins that concern a class of stages."""
    for pin in pins:
        if pin.tensor in (*OF_PLAN, WRITTEN) or pin.stage not in (None, stage.name):
            continue
        refuse_unknown_kind(pin, stage.graph.kinds)
        for kind, count in stage.kinds:
            if pin.kind not in (None, kind.name) or not _movable(pin, kind):
                continue
            counts_blocks = pin.tensor != STREAMED and pin.amount is not None
            if pin.kind is None and counts_blocks and kind.name != _main(stage):
                continue  # counts without a kind speak of the repeated layers
            amount = 1.0 * count if pin.amount is None else pin.amount
            if pin.tensor in FRACTIONS and pin.amount is not None:
                amount *= count
            label = f"{stage.name}.{kind.name}: {pin.tensor} {pin.choice} set by the user"
            yield Rule(label, _pinned(stage, kind, pin) - amount, equal=True)


def rings_tried(pins: tuple[Pin, ...]) -> tuple[Rings, ...]:
    """Rings that plans may have, the first that fits is taken."""
    fixed = {pin.tensor: int(pin.amount or 0) for pin in pins if pin.tensor in RING_KEYS}
    every = (
        Rings(
            slots=fixed.get("slots", rings.slots),
            sums=fixed.get("sums", rings.sums),
            shared_ends=bool(fixed.get("shared_ends", rings.shared_ends)),
        )
        for rings in TRIED
    )
    return tuple(dict.fromkeys(every))


def without_drives(kinds: Iterable[str]) -> tuple[Pin, ...]:
    """Pins that leave nothing of these kinds of layers on drives."""
    return tuple(Pin(kind, tensor, Tier.NVME, 0.0) for kind in kinds for tensor in MOVED)


def _main(stage: StageClass) -> str:
    return max(stage.counts, key=lambda item: item[1])[0]


def _movable(pin: Pin, kind: LayerKind) -> bool:
    if kind.frozen and pin.tensor in OF_TRAINED:
        return False
    if pin.tensor in ("activations", "recompute"):
        return kind.stores_activations or pin.kind == kind.name
    return not (kind.pinned and pin.tensor not in FRACTIONS) or pin.kind == kind.name


def _pinned(stage: StageClass, kind: LayerKind, pin: Pin) -> Linear:
    """Layers of the kind that are as the pin says."""
    tensor = "activations" if pin.tensor == "recompute" else pin.tensor
    said = {tensor, *pin.choice.split(".")} - {""}
    return total([decision for key, decision in stage.decisions(kind) if said <= set(key)])
