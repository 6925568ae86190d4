"""Advice that a user can act on. Each piece is computed from the plan and states its gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigplan.batch import batches_tried
from bigplan.capabilities.native import gpu_refusal, native_refusal
from bigplan.errors import InputError
from bigplan.plan import Plan
from bigplan.program import Lane
from bigplan.recheck import promised_again
from bigplan.report.moments import moments_advice
from bigplan.report.muon import muon_advice
from bigplan.report.operators import LAUNCHES, PER_MICRO_BATCH, OperatorRow
from bigplan.report.shapes import one_pass, shape_advice
from bigplan.report.text import seconds_text
from bigplan.simulate import COLLECTIVES, LAUNCHING
from bigplan.units import be, counted, format_bandwidth, format_count

MUCH = 0.05  # of the step: smaller costs get no advice
ALONE = 0.9  # of a resource's work: with more of it on the critical path, compute hides none
ON_GPU = (Lane.COMPUTE, Lane.GPU_UPDATE, COLLECTIVES, LAUNCHING)  # other functions advise on these
DRIVES = {Lane.NVME_READ: "read", Lane.NVME_WRITE: "write"}


@dataclass(frozen=True)
class Advice:
    """`about` names the subject for programs; `gain` is the share of the step that may be saved."""

    about: str
    gain: float
    text: str


def advice_of(
    plan: Plan, rows: Sequence[OperatorRow], hidden: tuple[str, float] | None = None
) -> list[Advice]:
    """All advice for a plan, largest gain first; `hidden` is the result of hiding_tokens."""
    # A model that is there already keeps its shape.
    training = plan.training
    any_shape = training.lora is None and training.weights is None
    shapes = shape_advice(plan, rows) if any_shape else ()
    every = (
        *(Advice(*found) for found in shapes),
        *_precision(plan, rows),
        *_eight_bits(plan, rows),
        *(Advice("moments", *found) for found in moments_advice(plan, MUCH)),
        *(Advice("muon", 0.0, text) for text in muon_advice(plan)),
        *_launches(plan, rows),
        *_tokens(plan, hidden),
        *_drives(plan),
        *_waiting(plan),
        *_bubble(plan),
        *_idle(plan),
    )
    return sorted(every, key=lambda advice: -advice.gain)


def _precision(plan: Plan, rows: Sequence[OperatorRow]) -> Iterator[Advice]:
    gpu, now = plan.cluster.group.gpu, plan.training.precision
    rates = {str(name): rate for name, rate in gpu.peak_flops.items()}
    if now == "fp32" and gpu.runs_kernels and rates.get("bf16", 0.0) > rates["fp32"]:
        products = sum(row.seconds for row in rows if row.flops) / plan.strategy.pp
        faster = rates["bf16"] / rates["fp32"]
        gain = products * (1 - 1 / faster) / plan.predicted.step_seconds
        yield Advice(
            "precision",
            gain,
            f"Train in bf16: fp32 leaves the tensor cores idle, whose peak is {faster:.1f} times "
            f"as high, and matrix products take {gain / (1 - 1 / faster):.0%} of the step.",
        )


def _eight_bits(plan: Plan, rows: Sequence[OperatorRow]) -> Iterator[Advice]:
    """Products in fp8, where the plan would run with them."""
    gpu, now = plan.cluster.group.gpu, plan.training
    unlike = now.fp8_gemms or now.precision == "fp32" or now.lora is not None
    if unlike or "fp8" not in gpu.peak_flops:
        return
    low = plan.model_copy(update={"training": now.model_copy(update={"fp8_gemms": True})})
    model, training = low.model, low.training
    if gpu_refusal(gpu, model, training) or native_refusal(model, training, low.strategy):
        return
    gain = _gain_of(low, plan, rows)
    if gain > MUCH:
        yield Advice(
            "fp8_gemms",
            gain,
            f"The blocks' products in fp8 (`--fp8-gemms`) save about "
            f"{seconds_text(gain * plan.predicted.step_seconds)} a step ({gain:.0%}). They round "
            "factors to 3 or 4 significant bits: compare losses with some steps in "
            f"{now.precision} first.",
        )


def _gain_of(low: Plan, plan: Plan, rows: Sequence[OperatorRow]) -> float:
    """Share of the step that fp8 saves with all else as it is.

    Where it has no room so: of compute, as far as that holds the step up. On one H200 whose drive
    binds 14 B, all of compute told 9% where a new plan saves 4%.
    """
    step = plan.predicted.step_seconds
    try:
        return 1 - promised_again(low).predicted.step_seconds / step
    except InputError:
        on_layers = sum(row.seconds for row in rows if row.of_layers) / plan.strategy.pp
        busy = plan.predicted.parts.compute + plan.predicted.parts.recompute
        holds_up = min(1.0, plan.predicted.critical_path.get(Lane.COMPUTE, 0.0) / busy)
        return (1 - one_pass(low).seconds / one_pass(plan).seconds) * on_layers * holds_up / step


def _launches(plan: Plan, rows: Sequence[OperatorRow]) -> Iterator[Advice]:
    waits = sum(row.seconds for row in rows if row.name == LAUNCHES)
    layers = sum(row.seconds for row in rows if row.of_layers)
    share = waits / layers if layers else 0.0
    if share > MUCH:
        tokens = plan.strategy.rank_tokens(plan.training)
        yield Advice(
            "micro_batch",
            share,
            f"Kernels are too short: {share:.0%} of forward and backward is waiting for launches, "
            f"at {format_count(tokens)} tokens a micro-batch. A larger micro-batch (it may need "
            "recomputation or memory) or longer sequences make each kernel longer.",
        )


def _tokens(plan: Plan, hidden: tuple[str, float] | None) -> Iterator[Advice]:
    now = plan.training.tokens_per_step
    if hidden is None or hidden[1] <= now:
        return
    lane, tokens = hidden
    share = plan.predicted.parts.waiting / plan.predicted.step_seconds
    yield Advice(
        "tokens_per_step",
        share,
        f"From {format_count(float(f'{tokens:.2g}'))} tokens a step on compute takes longer than "
        f"the transfers ({lane}); now it is {format_count(now)}, and the GPU waits for "
        f"{share:.0%} of the step. A larger global batch, passed through each layer together, "
        "spreads the same transfers over more tokens.",
    )


def in_one_unit(plan: Plan) -> Plan:
    """The plan with all micro-batches passed through each layer together: the fewest transfers.

    The result may not fit into memory. A plan with a pipeline is returned as it is, because a
    pipeline needs several units.
    """
    if plan.strategy.pp > 1:
        return plan
    group = plan.strategy.micro_batches(plan.training)
    strategy = plan.strategy.model_copy(update={"accumulation_group": group})
    return plan.model_copy(update={"strategy": strategy})


def hiding_tokens(plan: Plan, rows: Sequence[OperatorRow]) -> tuple[str, float] | None:
    """The lane that needs most tokens a step to hide behind compute, and that number of tokens.

    The network between data-parallel ranks is one of them.

    `rows` are those of the plan in one unit. There, a lane takes F seconds a step whatever the
    batch, and s seconds a token for activations. Compute takes c seconds a token. So the lane hides
    from t tokens on, where c t = F + s t. None where nothing moves, where no number suffices, or
    for a pipeline, whose tokens never pass a layer together.
    """
    if plan.strategy.pp > 1:
        return None
    now = plan.training.tokens_per_step
    compute = sum(row.seconds for row in rows if row.of_layers) / now
    worst: tuple[str, float] | None = None
    for lane in (Lane.H2D, Lane.D2H, Lane.NVME_READ, Lane.NVME_WRITE, Lane.CPU, Lane.COMM):
        moves = [row for row in rows if row.where == lane]
        per_token = sum(row.seconds for row in moves if row.phase == PER_MICRO_BATCH) / now
        fixed = sum(row.seconds for row in moves) - per_token * now
        if fixed > 0 and compute > per_token:
            tokens = fixed / (compute - per_token)
            if worst is None or tokens > worst[1]:
                worst = str(lane), tokens
    return worst


def _drives(plan: Plan) -> Iterator[Advice]:
    predicted, nvme = plan.predicted, plan.cluster.group.nvme
    lane = predicted.bottleneck
    if nvme is None or lane not in DRIVES:
        return
    held_up = predicted.critical_path[lane]
    busy, compute = predicted.busy_seconds[lane], predicted.busy_seconds.get(Lane.COMPUTE, 0.0)
    rate = nvme.node_read if lane == Lane.NVME_READ else nvme.node_write
    needed = rate * busy / compute if compute else rate
    yield Advice(
        "drives",
        held_up / predicted.step_seconds,
        f"The drives are the bottleneck: the step is held up for {seconds_text(held_up)} of its "
        f"{seconds_text(predicted.step_seconds)} while they {DRIVES[Lane(lane)]}, which they do "
        f"for {seconds_text(busy)} at {format_bandwidth(rate)}. "
        f"{format_bandwidth(float(f'{needed:.2g}'))} would hide behind compute: more or faster "
        "drives (`bigplan plan --what-if` solves for one more), or more host memory.",
    )


def _waiting(plan: Plan) -> Iterator[Advice]:
    predicted, step = plan.predicted, plan.predicted.step_seconds
    others = {name: s for name, s in predicted.critical_path.items() if name not in ON_GPU}
    name = max(others, key=lambda name: others[name], default="")
    share = others.get(name, 0.0) / step
    if share > MUCH and name != predicted.bottleneck:
        busy = predicted.busy_seconds[name] / step
        why = (
            f"nearly all the time that {name} works: next to nothing is computed beside it"
            if share > ALONE * busy
            else f"although {name} works for only {busy:.0%} of it: transfers come at the wrong "
            "time or in too large pieces"
        )
        yield Advice(
            "waiting",
            share,
            f"The GPU waits for {name} for {share:.0%} of the step, {why}. "
            "`bigplan plan --what-if` solves for what makes such moves fewer.",
        )


def _bubble(plan: Plan) -> Iterator[Advice]:
    parts, step = plan.predicted.parts, plan.predicted.step_seconds
    share = parts.bubble / step
    if share > MUCH:
        units = counted(plan.strategy.units(plan.training), "unit")
        batch = counted(plan.training.global_batch, "sequence")
        yield Advice(
            "global_batch",
            share,
            f"The pipeline's bubble takes {share:.0%} of the step: {units} for "
            f"{plan.strategy.pp} stages. It shrinks in proportion to the global batch: twice "
            f"{batch} would leave about {share / (2 - share):.0%}.",
        )


def _idle(plan: Plan) -> Iterator[Advice]:
    idle, working = plan.search.idle_gpus, plan.strategy.ranks
    if not idle:
        return
    every, batch = working + idle, plan.training.global_batch
    larger = batches_tried(batch, every)
    splits = (
        f"{larger[0]:,} sequences a step split over more numbers of GPUs than {batch:,} "
        f"(`bigplan plan --global-batch {larger[0]}`). "
        if larger
        else ""
    )
    yield Advice(
        "idle_gpus",
        idle / every,
        f"{idle} of {every} GPUs {be(idle)} idle, as no plan found for more of them is faster. "
        f"{splits}Without {'it' if idle == 1 else 'them'} the same steps cost less.",
    )
