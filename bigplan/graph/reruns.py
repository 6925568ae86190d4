"""The ways to recompute a transformer block: what each keeps, and what it runs again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bigplan.graph.activations import saved_values, score_bytes
from bigplan.graph.adapters import adapters_of
from bigplan.graph.eight_bits import name_of_cast
from bigplan.graph.expert_biases import biases_of
from bigplan.graph.experts import SENT, brought_again, kept_rows
from bigplan.graph.graph import Recompute, Rerun
from bigplan.graph.latent import made_again, runs_again
from bigplan.graph.mixers import mixing, out_of_output, output_of
from bigplan.graph.operators import Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.shared import into_mlp, into_router, out_of_experts, out_of_shared
from bigplan.graph.spread import counted, places_bytes
from bigplan.graph.wide_norms import wide_norms
from bigplan.spec.carried import OWN_ACTIVATION
from bigplan.spec.layers import SHARED_ACTIVATION, SHARED_DOWN
from bigplan.spec.step import LayerStep, StepOp, StepValue


def reruns(
    shape: RankShape,
    saved: int,
    linear: tuple[Operator, ...],
    inner: tuple[Operator, ...],
    streams: Sequence[Stream],
) -> Mapping[Recompute, Rerun]:
    """The ways to recompute a block that saves `saved` bytes; `inner` is the attention core.

    Selective recomputation runs the core again where its scores are materialised, as Korthikanti et
    al. do (arXiv 2205.05198, section 5). Otherwise it runs norms and activation again, and makes
    heads of latents again.
    """
    steps, kept = shape.every_step("block"), saved_values(shape.model, shape.activation_shape)
    scores = score_bytes(shape.model, shape.activation_shape)
    core = inner if scores else ()
    first = streams
    streams = tuple(second for one in first if (second := _run_again(shape, one)))
    # Beside frozen products not all of their inputs are kept.
    cheap = tuple(
        step for step in steps if step.cheap and {*step.gives} & {*kept} and runs_again(shape, step)
    )
    gathers, kept_instead = made_again(shape)
    cheap_bytes = sum(kept.get(value, 0) for step in cheap for value in step.gives) - kept_instead
    cheap_streams = (*gathers, *_of(cheap, (*linear, *streams)))
    selective = Rerun(saved - (scores or cheap_bytes), core or cheap_streams)
    # The activation's step saves results of products; a run of these products gives them again.
    wanted = {v for step in steps if step.op is StepOp.ACTIVATION for v in step.saves}
    makes = StepOp.PRODUCT, StepOp.SCALE
    widening = tuple(step for step in steps if step.op in makes and wanted & {*step.gives})
    widened = sum(kept[value] for step in widening for value in step.gives if value in kept)
    gathered = (*into_mlp(shape, "mlp input"), *brought_again(shape))
    # ReLU saves what it gives: no product of the MLP runs again, and nothing is gathered for one.
    made = _of(widening, (*linear, *streams))
    again = (*gathered, *_copies(streams), *made) if widening else ()
    widened -= sum(map(shape.activation_shape.nbytes, _read_again(steps, widening, kept)))
    if shape.spreads_experts:
        widened += kept_rows(shape) - places_bytes(shape)
    mlp = Rerun(saved - scores - cheap_bytes - widened, (*core, *cheap_streams, *again))
    full = _all_again(shape, linear, inner, first, gathered)
    return {Recompute.SELECTIVE: selective, Recompute.MLP: mlp, Recompute.FULL: full}


def _all_again(
    shape: RankShape,
    linear: Sequence[Operator],
    inner: Sequence[Operator],
    first: Sequence[Stream],
    gathered: Sequence[Operator],
) -> Rerun:
    """A run of all steps but those that lead to the block's output alone, from its input.

    `first`: memory-bound operators as the forward has them; `gathered`: before the MLP's products.
    """
    streams = tuple(second for one in first if (second := _run_again(shape, one)))
    left_out = _of(unread(shape.every_step("block")), (*linear, *streams))
    again = [op for op in (*linear, *inner, *streams) if op not in left_out]
    names = {op.name for op in left_out}
    mixer = mixing(shape)
    exchanged = [*mixer.exchanges(shape), *wide_norms(shape), *mixer.into(shape, "")]
    if output_of(shape) not in names:
        exchanged += out_of_output(shape)
    if "mlp down" not in names:
        exchanged += out_of_experts(shape, "mlp output")
        if shape.model.experts:  # their rows are weighted again, before the backward does
            again += [one for one in first if one.name == "activation"]
    if SHARED_DOWN not in names:
        exchanged += out_of_shared(shape, "mlp output", "")
    brought = (*counted(shape), *into_router(shape, "mlp input"), *gathered)
    return Rerun(shape.hidden, (*again, *exchanged, *brought))


def _read_again(
    steps: Sequence[LayerStep], again: Sequence[LayerStep], kept: Collection[StepValue]
) -> set[StepValue]:
    """What second runs of products read that is not kept otherwise, and that no norm gives again.

    Beside a frozen product nobody else may keep its input, and not every block norms it.
    """
    routes = [step for step in steps if step.op is StepOp.ROUTE]
    read = {value for step in again for value in step.reads}
    read = {next((r.reads[0] for r in routes if value in r.gives), value) for value in read}
    given = {value for step in steps if step.cheap or step in again for value in step.gives}
    return read - {*kept} - given


def _copies(streams: Sequence[Stream]) -> tuple[Stream, ...]:
    """What brings experts the rows that the MLP's first products read."""
    return tuple(stream for stream in streams if stream.name == SENT)


def _of(steps: Sequence[LayerStep], operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """The operators that run these steps, casts to fp8, adapters and experts' biases included."""
    names = {name for step in steps for name in (step.name, name_of_cast(step.name))}
    beside = tuple(of(step.name) for step in steps for of in (adapters_of, biases_of))
    return tuple(op for op in operators if op.name in names or op.name.startswith(beside))


def unread(steps: Sequence[LayerStep]) -> Sequence[LayerStep]:
    """Steps whose results nothing in the backward reads: they lead to the block's output alone."""
    read = {value for step in steps for value in step.saves}
    left_out = []
    for step in reversed(steps):
        if read & {*step.gives} or step.statistics:  # which it must run for
            read |= {*step.reads}
        else:
            left_out.append(step)
    return left_out[::-1]


def _run_again(shape: RankShape, stream: Stream) -> Stream | None:
    """The bytes of a second run. The native backward writes a gated activation beside gradients.

    That of experts computes it in any case, for the weights' gradients.
    """
    if stream.name == "activation" and shape.model.experts:
        return None
    gated = stream.name in ("activation", OWN_ACTIVATION)
    gated = gated or (stream.name == SHARED_ACTIVATION and not shape.model.shared_gate)
    if gated and shape.model.gated and shape.fused:
        return Stream(stream.name, stream.nbytes / 3, 0, eager=3.0)
    return stream
