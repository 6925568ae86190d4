"""The plan in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from bigplan.graph.graph import Recompute
from bigplan.graph.told import strategy_text
from bigplan.pace import group_steps
from bigplan.placement import Tier
from bigplan.plan import Mix, Plan
from bigplan.report.bill import WORTH_A_WORD, days_text, job_text
from bigplan.report.stages import TENSORS, StageShares
from bigplan.report.text import percent, seconds_text
from bigplan.spec.cluster import Member
from bigplan.spec.lora import trained_count
from bigplan.units import be, counted, format_count, listed
from bigplan.wear import wear_of

HARDLY = 1e-4  # of the optimizer state: a smaller share is not mentioned
WORST = "each counts as the worst of them"
SOON = 3 * 365.0  # days: drives of servers are sold for three to five years


def decision(plan: Plan, stages: Sequence[StageShares]) -> str:
    """What is trained where, how it is split, what leaves the GPU and what is recomputed."""
    where = _where(plan) + _idle(plan)
    sequences = counted(plan.training.global_batch, "sequence")
    batch = f"{sequences} of {counted(plan.training.sequence_length, 'token')}"
    return (
        f"Train {plan.model.name} ({_size(plan)}) on {where}{_by(plan)} "
        f"with {strategy_text(plan.strategy)}, {batch} a step in {plan.training.precision}; "
        f"{_away(stages)}{_streamed(stages)}; {_again(plan.model.layers, stages)}{_captured(plan)}"
        f"{_worn(plan)}."
    )


def _size(plan: Plan) -> str:
    model, lora = plan.model, plan.training.lora
    size = f"{format_count(model.parameter_count)} parameters"
    if lora is not None:
        trained = format_count(trained_count(model, lora))
        bits = ", blocks in 4 bits" if lora.frozen else ""
        return f"{size}, {trained} trained (LoRA, rank {lora.rank}{bits})"
    if not model.experts:
        return size
    return f"{size}, {format_count(model.active_parameter_count)} for a token"


def _where(plan: Plan) -> str:
    """The GPUs, and whose they are where nodes are unlike."""
    group, members = plan.cluster.group, plan.cluster.members or ()
    if len(members) < 2:
        nodes = f" ({group.nodes} nodes)" if group.nodes > 1 else ""
        return f"{group.gpus} x {group.gpu.name}{nodes}"
    whose = listed([_whose(member, group.gpus_per_node) for member in members])
    among = "among " if group.nodes < sum(member.nodes for member in members) else ""
    counts = "each group with work of its own" if plan.strategy.replicas else WORST
    return f"{group.gpus} GPUs of {group.nodes} nodes ({among}{whose}; {counts})"


def _whose(member: Member, used: int) -> str:
    """The nodes of a group, and how many of their GPUs have no equal in other groups' nodes."""
    idle = member.gpus - used
    rest = f" with {idle} of a node's {member.gpus} GPUs idle" if idle else ""
    return f"{member.nodes} of {member.name}{rest}"


def mixes_text(plan: Plan) -> str:
    """Of a mixed cluster: how long a step takes on each choice of its groups."""
    told = []
    for mix in plan.search.mixes:
        step = mix.refusal if mix.step_seconds is None else seconds_text(mix.step_seconds)
        told.append(f"{' + '.join(mix.groups)}{_work(mix)}: {step}")
    taken = " + ".join(member.name for member in plan.cluster.members or ())
    return f"Groups of nodes: {'; '.join(told)}. Taken: {taken}{_taken(plan)}."


def _work(mix: Mix) -> str:
    """How the groups share the batch out."""
    if not mix.unequal:
        return ""
    sizes = zip(mix.micro_batches, mix.shares, strict=True)
    parts = [f"{counted(size, 'sequence')} ({percent(share)})" for size, share in sizes]
    return f", micro-batches of {listed(parts)}" if parts else ", with unequal work"


def _taken(plan: Plan) -> str:
    """Each group's own work, and what a step takes more because all wait for each other."""
    if not plan.strategy.replicas:
        return ""
    parts = [
        f"{step.view.cluster.group.name} takes {seconds_text(step.alone)}"
        for step in group_steps(plan)
    ]
    return f" with unequal work: without waiting for each other, {listed(parts)}"


def _idle(plan: Plan) -> str:
    """GPUs without work, and the step with all GPUs, where such a plan was found."""
    idle = plan.search.idle_gpus
    if not idle:
        return ""
    every = plan.strategy.ranks + idle
    others = [one.step_seconds for one in plan.alternatives if one.strategy.ranks == every]
    slower = f": with all {every} a step takes {seconds_text(min(others))}" if others else ""
    return f", {counted(idle, 'more GPU')} idle{'s' * (idle == 1)}{slower},"


def _by(plan: Plan) -> str:
    """The engine, where it is not bigplan's own."""
    return "" if plan.engine == "native" else f" by {plan.engine}"


def _captured(plan: Plan) -> str:
    return "; CUDA graphs repeat the blocks" if plan.placement.captured else ""


def _worn(plan: Plan) -> str:
    """The writes of the training, as far as they matter, or how soon the drives are worn out."""
    wear = wear_of(plan)
    if wear is None or wear.life_days is None:
        return ""
    whose = "its" if plan.cluster.group.nodes == 1 else "each node's"
    if wear.job_share is not None and wear.job_share >= WORTH_A_WORD:
        rated = f"{whose} {wear.named} {be(wear.drives)} rated for"
        return (
            f"; {job_text(wear)} {percent(wear.job_share)} of the writes that {rated} "
            f"({days_text(wear.life_days)} without a break)"
        )
    if wear.steps is None or wear.life_days >= SOON:
        return ""
    return f"; {whose} {wear.named} would be worn out in {days_text(wear.life_days)} of training"


def _away(stages: Sequence[StageShares]) -> str:
    away = [
        tensor if tensor != "optimizer" else "optimizer state"
        for tensor in TENSORS
        if any(tier != Tier.GPU for stage in stages for tier in stage.placement[tensor])
    ]
    if not away:
        return "everything stays on the GPU"
    return f"off the GPU at least in part: {listed(away)}"


def _streamed(stages: Sequence[StageShares]) -> str:
    """The share of optimizer state that passes through the GPU; stages may differ."""
    least, most = (end(stage.streamed_fraction for stage in stages) for end in (min, max))
    if most < HARDLY:
        return ""
    told = "all" if least > 1 - HARDLY else percent(most)
    told = told if most - least < HARDLY else f"up to {told}"
    return f"; {told} of the optimizer state is streamed through the GPU for its update"


def _again(layers: int, stages: Sequence[StageShares]) -> str:
    policies = {
        str(Recompute.FULL): "recomputed",
        str(Recompute.MLP): "recomputed in the MLP",
        str(Recompute.SELECTIVE): "recomputed selectively",
    }
    told = []
    for policy, words in policies.items():
        again = sum(stage.recompute.get(policy, 0) for stage in stages)
        if again:
            told.append(f"{again} of {counted(layers, 'layer')} {be(again)} {words}")
    return listed(told) if told else "nothing is recomputed"
