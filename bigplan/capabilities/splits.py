"""Splits that no engine of ours executes: ranks that do not share out what is in a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from math import prod

from bigplan.graph.strategy import EVERY_EXPERT
from bigplan.graph.strategy_space import undivided, unexchanged
from bigplan.spec.lora import trained
from bigplan.spec.model import ModelSpec
from bigplan.spec.moments import sharing_scales
from bigplan.spec.training import Training
from bigplan.spec.unplanned import OTHER_EXPERT_PARALLEL

WITH_EXPERTS = ("megatron",)  # other tools that are planned for models with experts


def expert_parallel_refusal(ways: object, model: ModelSpec, tool: str) -> str | None:
    """Why experts are not spread over so many ranks by `tool`; None: they may be."""
    if str(ways) == "1" or (model.experts and tool in (*WITH_EXPERTS, "native")):
        return None
    if not model.experts:
        return (
            f"ep {ways}: {model.name} has no experts to spread over ranks; leave ep out, or plan "
            "a model with `experts`"
        )
    return f"ep {ways}: {OTHER_EXPERT_PARALLEL}"


def spread_refusal(model: ModelSpec, training: Training, fixed: Mapping[str, object]) -> str | None:
    """Why the native runtime does not spread experts over ranks so; None: it does.

    `fixed`: values of a strategy, all or some.
    """
    ep = int(str(fixed.get("ep", 1)))
    if ep == 1 or (why := expert_parallel_refusal(ep, model, "native")):
        return None if ep == 1 else why
    if fixed.get("replicas"):
        return f"ep {ep}: unlike nodes with unequal micro-batches spread no experts; use ep 1"
    if model.experts % ep:
        return (
            f"ep {ep} does not divide the {model.experts} experts of {model.name}: use an ep that "
            "does"
        )
    dp, cp = fixed.get("dp"), int(str(fixed.get("cp", 1)))
    if isinstance(dp, int) and dp * cp % ep:
        ranks = f"dp {dp}" if cp == 1 else f"dp {dp} x cp {cp}"
        return f"ep {ep} does not divide {ranks}, whose ranks spread experts: use an ep that does"
    return None


def tensor_parallel_refusal(model: ModelSpec, tp: object) -> str | None:
    """Why so many ranks do not share out what is in a layer; None: they do."""
    if odd := undivided(model, int(str(tp))):
        return (
            f"tp {tp} does not divide {' and '.join(odd)} of {model.name}, of which "
            "tensor-parallel ranks have equal parts: use a tp that does"
        )
    return None


_NOT_HANDED_ON = {
    "tp": "which tensor-parallel ranks do not split",
    "vpp": "of which a stage holds those of one chunk",
}


def carried_refusal(model: ModelSpec, fixed: Mapping[str, object]) -> str | None:
    """Why ranks do not share out what blocks hand on beside the residual stream; None: they do.

    `fixed`: values of a strategy, all or some.
    """
    several = (key for key in _NOT_HANDED_ON if str(fixed.get(key, 1)) != "1")
    key = next(several, None)
    if key is None or not model.carries:
        return None
    parts = {"inputs of their own": model.block_inputs, "keys and values": model.key_sharing}
    told = " and ".join(name for name, part in parts.items() if part is not None)
    return (
        f"{key} {fixed[key]}: blocks of {model.name} hand on {told} beside the residual stream, "
        f"{_NOT_HANDED_ON[key]}: use {key} 1, with dp, cp or pp"
    )


def context_parallel_refusal(model: ModelSpec, fixed: Mapping[str, object]) -> str | None:
    """Why so many ranks do not exchange heads for tokens; None: they do, or with some tp.

    `fixed`: values of a strategy, all or some.
    """
    cp, tp = (int(str(fixed.get(name, 1))) for name in ("cp", "tp"))
    tried = (
        [tp] if "tp" in fixed else [n for n in range(1, model.heads + 1) if not undivided(model, n)]
    )
    if not all(unexchanged(model, n, cp) for n in tried):
        return None
    beside = f" on each of tp {tp} ranks" if tp > 1 else ""
    return (
        f"cp {cp} does not divide {' and '.join(unexchanged(model, tp, cp))} of {model.name}"
        f"{beside}, of which ranks that share sequences have equal parts: use a cp that does, or "
        "that is a multiple of kv_heads, key_heads or groups alone"
    )


def zero_group_refusal(fixed: Mapping[str, object]) -> str | None:
    """Why no runtime shards over groups of so many ranks; None: some do.

    `fixed`: values of a strategy, all or some.
    """
    ranks = int(str(fixed.get("zero_group", 0)))
    if not ranks:
        return None
    if fixed.get("zero") == 0:
        return f"zero_group {ranks} with zero 0, which shards nothing: use zero 1, 2 or 3"
    if ranks == 1:
        return "zero_group 1 shards nothing: use zero 0, or a zero_group of several ranks"
    if ranks % int(str(fixed.get("ep", 1))):
        return (
            f"zero_group {ranks} with ep {fixed['ep']}: {EVERY_EXPERT}; use a multiple of ep, or "
            "leave zero_group out"
        )
    dp = fixed.get("dp")
    shards = dp * int(str(fixed.get("cp", 1))) if isinstance(dp, int) else ranks
    if shards % ranks:
        return (
            f"zero_group {ranks} does not divide the {shards} ranks with the same parameters "
            "(dp x cp): use a divisor"
        )
    return None


def muon_refusal(training: Training, fixed: Mapping[str, object]) -> str | None:
    """Why Muon does not update what is split so; None: it does, or another optimizer does.

    `fixed`: values of a strategy, all or some.
    """
    if training.optimizer.name != "muon":
        return None
    if training.lora is not None:
        return "optimizer muon: adapters are trained by adamw or sgd; use one of them with lora"
    if (ways := fixed.get("ep", 1)) != 1:
        return (
            f"ep {ways}: Muon's updates are not planned where experts are spread over ranks; use "
            "ep 1, or optimizer adamw"
        )
    if fixed.get("replicas"):
        return (
            "replicas: Muon is not planned for unlike nodes with unequal micro-batches; leave them "
            "equal, or use optimizer adamw"
        )
    return None


def copies_refusal(model: ModelSpec, training: Training, tp: int, ep: int = 1) -> str | None:
    """Why copies of a tensor that several ranks have would come apart; None: they do not.

    Elements that share a scale get another one where ranks have other elements among them. A layer
    is cut between such blocks, and what more ranks have copies of comes last (`LayerKind`,
    `Adapters`): of experts that are spread over `ep` ranks, then of the rest.
    """
    block = sharing_scales(training.optimizer.moments)
    for kind in model.kinds() if block > 1 else ():
        sizes = Counter[tuple[bool, int]]()
        for parameter in trained(model, kind, training.lora):
            rest = ep > 1 and not parameter.experts
            sizes[rest, parameter.holders(tp)] += prod(parameter.local(tp, ep))
        ends = list(accumulate(size for _, size in sorted(sizes.items())))
        if odd := [end for end in ends[:-1] if end % block]:
            ways = f"tp {tp}" if ep == 1 else f"tp {tp} and ep {ep}"
            return (
                f"moments int8 with {ways}: {block} elements share a scale, and what more ranks "
                f"have, such as norms, follows {odd[-1]:,} elements that a rank has of a layer, "
                "which do not divide by it, so that ranks would round it otherwise: use other "
                "degrees, or moments bf16"
            )
    return None
