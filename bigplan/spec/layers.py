"""What embedding, block and head of a model are made of.

A family with a new part adds it here and in runtime/layers/blocks.py, a new kind of step also in
graph/block.py. capabilities/ says which parts which engine executes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigplan.spec import carried
from bigplan.spec.architecture import Architecture
from bigplan.spec.convolution_steps import convolution
from bigplan.spec.delta_rule_steps import delta_rule
from bigplan.spec.expert_steps import of_experts, routing
from bigplan.spec.grouped_heads import grouped_heads
from bigplan.spec.input_steps import inputs, to_inputs
from bigplan.spec.latent_heads import latent_heads
from bigplan.spec.mixers import ATTENTION, CONVOLUTION, DELTA_RULE, MLP, STATE_SPACE, Mixer
from bigplan.spec.mlp_steps import entering, mlp
from bigplan.spec.pattern import GLOBAL, SHARING_GLOBAL
from bigplan.spec.state_space_steps import state_space
from bigplan.spec.step import (
    TERMS,
    LayerStep,
    Parameter,
    StepOp,
    StepValue,
    product,
    whole_product,
)

TABLE = "embed_tokens.weight"  # which a tied head reads
BLOCK = "block"  # the kind of layer that is repeated
DENSE = "dense"  # a block without experts, in a model whose others have some
# Blocks with another mixer than attention, in a model whose others have attention.
_KINDS: Mapping[tuple[Mixer, bool], str] = {
    (ATTENTION, True): DENSE,
    (CONVOLUTION, True): f"{DENSE}_{CONVOLUTION}",
    (DELTA_RULE, True): f"{DENSE}_{DELTA_RULE}",
    (STATE_SPACE, True): f"{DENSE}_{STATE_SPACE}",
    (MLP, True): f"{DENSE}_{MLP}",
    (CONVOLUTION, False): CONVOLUTION,
    (DELTA_RULE, False): DELTA_RULE,
    (STATE_SPACE, False): STATE_SPACE,
    (MLP, False): MLP,
    (ATTENTION, False): BLOCK,
}
# Blocks that read keys and values of others, by the kind of these.
SHARING: Mapping[str, str] = {BLOCK: "sharing", GLOBAL: SHARING_GLOBAL}
# The global ones: blocks that see all tokens, where their heads are unlike those of others.
BLOCKS = (*_KINDS.values(), GLOBAL, *SHARING.values())
SINKS = "attention.sinks"
BLOCK_SCALE = "block.scale"  # a constant that multiplies what a block gives
OF_AN_EXPERT = "experts."  # what names of parameters begin with of which each expert has a part
SHARED_GATE = "shared_gate.weight"
ATTENTION_SUM = "attention residual"  # with another mixer beside, which is added after it
# Steps of an MLP beside the experts.
SHARED_UP, SHARED_ACTIVATION, SHARED_DOWN = "shared up", "shared activation", "shared down"
SHARED_SUM = "shared residual"
# Products of what experts read, where that is narrower than the residual stream, and of their sum.
NARROWING, WIDENING = "latent_down_proj", "latent_up_proj"
NARROWED = "expert latent"  # the step of the first

_OWN = ("expert", "router")  # what reads the residual stream by a norm of its own, by `each`
# Steps of others than attention.
_MIXING = {CONVOLUTION: convolution, DELTA_RULE: delta_rule, STATE_SPACE: state_space}


def block_kind(mixer: Mixer, *, dense: bool) -> str:
    """The kind of a block in a model with several; `dense`: without the experts of others."""
    return _KINDS[mixer, dense]


def described(model: Architecture) -> Mapping[str, tuple[LayerStep, ...]]:
    """Steps of each kind of layer, in the order of a forward; all blocks are alike."""
    own = {} if model.block_inputs is None else {carried.INPUTS: inputs(model)}
    return {"embedding": _embedding(model), **own, BLOCK: _block(model), "head": _head(model)}


def first_block(layers: Sequence[str]) -> int:
    """The place of the first block in a sequence of kinds of layers."""
    return next(place for place, kind in enumerate(layers) if kind in BLOCKS)


def _hidden(model: Architecture, name: str) -> StepValue:
    return StepValue(name, model.hidden, split=False)


def _embedding(model: Architecture) -> tuple[LayerStep, ...]:
    rows = _hidden(model, "rows")
    table = Parameter(TABLE, (model.vocab, model.hidden), "rows", True)
    steps = [LayerStep(StepOp.LOOK_UP, "look-up", (), (rows,), (table,))]
    if model.positions == "learned":
        shape = (model.max_sequence_length + model.position_offset, model.hidden)
        table = Parameter("embed_positions.weight", shape, "replicated", True)
        placed = _hidden(model, "placed rows")
        steps.append(LayerStep(StepOp.LOOK_UP, "positions", (rows,), (placed,), (table,)))
    if model.embedding_scale != 1:
        given = steps[-1].gives[0]
        scaled = _hidden(model, "scaled rows")
        steps.append(LayerStep(StepOp.SCALE, "embedding scale", (given,), (scaled,)))
    if model.embedding_norm:
        given = steps[-1].gives[0]
        steps.append(_norm(model, "embed_norm", "embedding norm", given, "normed rows"))
    return (*steps, *to_inputs(model, steps[-1].gives[0]))


def _block(model: Architecture) -> tuple[LayerStep, ...]:
    """Attention and MLP, each added to the residual stream, with norms before or after.

    Another mixer may stand in place of attention, or beside it. With a parallel residual attention
    and MLP read the block's input, normed for each or once for both. A block may be a mixer or an
    MLP alone.
    """
    x = _hidden(model, "input")
    if model.mixer == MLP:
        return _widening_half(model, x, x)
    first = _opening_norm(model, "input_norm", "input norm", x, "attention input")
    read = first[-1].gives[0] if first else x
    half, stream = [*first], x
    for mixer in model.mixers_of_a_block:
        half += _MIXING.get(mixer, _attention)(model, read)
        half += _closing(model, mixer, half[-1].gives[0])
        gives = "between" if model.has_mlp else "output"
        gives = gives if mixer == model.mixer else f"with {mixer}"
        half.append(_sum(f"{mixer} residual", stream, half[-1].gives[0], gives))
        stream = half[-1].gives[0]
    if not model.has_mlp:
        return tuple(half)
    read = x if model.parallel_residual and not model.shared_norm else read
    return (*half, *_widening_half(model, read, stream))


def _widening_half(
    model: Architecture, read: StepValue, stream: StepValue
) -> tuple[LayerStep, ...]:
    """The MLP or experts, of the stream or, with a parallel residual, of `read`, and their sum."""
    second = list[LayerStep]()
    if not model.shared_norm:
        read = read if model.parallel_residual else stream
        second = _opening_norm(model, "post_norm", "post norm", read, "mlp input")
        read = second[-1].gives[0] if second else read
    shared, by = _shared(model, read), (read, read)
    if model.expert_norms == "each":
        own = [_norm(model, f"{one}_norm", f"{one} norm", stream, f"{one} input") for one in _OWN]
        second, by = [*second, *own], (own[0].gives[0], own[1].gives[0])
    beside = shared[-1].gives[0] if shared else None
    if beside is not None and not model.closes("mlp"):
        shared.append(_sum(SHARED_SUM, stream, beside, "with shared"))
        stream = shared[-1].gives[0]
    if model.experts:  # whose weights hold the factor of what they add
        steps = _experts(model, *by)
        if model.closes("mlp"):  # by one norm of both
            if beside is not None:
                steps.append(_sum(SHARED_SUM, beside, steps[-1].gives[0], "with shared"))
            steps += _closing(model, "mlp", steps[-1].gives[0])
    else:
        steps = mlp(model, read)
        steps += _closing(model, "mlp", steps[-1].gives[0])
    last = _sum("mlp residual", stream, steps[-1].gives[0], "output")
    steps = [*second, *shared, *steps, last]
    if model.block_inputs is not None:
        steps[-1] = _sum("mlp residual", stream, last.reads[1], "with mlp")
        steps += _own_input(model, steps[-1].gives[0])
    return (*steps, *_block_scale(model, steps[-1]))


def _own_input(model: Architecture, x: StepValue) -> list[LayerStep]:
    """What the block adds of an input of its own, which it finds beside the residual stream."""
    assert model.block_inputs is not None
    gate = StepValue("own gate", model.block_inputs.width)
    given, inner = (gate._replace(name=name) for name in (carried.OWN_INPUT, "own inner"))
    first = product("own gate", x, {carried.OWN_GATE: gate}, bias=False)
    activation = LayerStep(
        StepOp.ACTIVATION,
        carried.OWN_ACTIVATION,
        (gate, given),
        (inner,),
        saves=(gate,),
        cheap=True,
    )
    output = {carried.OWN_DOWN: _hidden(model, "own output")}
    last = product("own down", inner, output, bias=False)
    closing = _closing(model, "own", last.gives[0])
    total = _sum("own residual", x, closing[-1].gives[0], "output")
    return [first, activation, last, *closing, total]


def _block_scale(model: Architecture, last: LayerStep) -> list[LayerStep]:
    """A number of the block's own that multiplies what it gives, where the model has one."""
    if not model.block_scale:
        return []
    scale = Parameter(BLOCK_SCALE, (TERMS, 1), "replicated", False, constant=True)
    (given,) = last.gives
    scaled = given._replace(name="scaled output")
    return [LayerStep(StepOp.SCALE, "block scale", (given,), (scaled,), (scale,))]


def _opening_norm(
    model: Architecture, module: str, name: str, x: StepValue, gives: str
) -> list[LayerStep]:
    """The norm before a part of a block, where the model has one."""
    return [] if model.norms == "after" else [_norm(model, module, name, x, gives)]


def _closing(model: Architecture, part: str, given: StepValue) -> list[LayerStep]:
    """What becomes of a part's product before it is added; nobody saves the results."""
    steps = []
    if model.closes(part):
        module, name = f"{part}_closing_norm", f"{part} closing norm"
        norm = _norm(model, module, name, given, f"normed {part}")
        steps.append(replace(norm, cheap=False))
        given = norm.gives[0]
    if model.scale_of(part) != 1:
        scaled = given._replace(name=f"scaled {part}")
        steps.append(LayerStep(StepOp.SCALE, f"{part} scale", (given,), (scaled,)))
    return steps


def _norm(model: Architecture, module: str, name: str, x: StepValue, gives: str) -> LayerStep:
    """A norm of the residual stream; it saves its input and each token's scale, and mean if any."""
    centred = model.norm == "layernorm"
    named = {"weight": model.weightless_norms != "all", "bias": centred and model.norm_bias}
    parts = [part for part, there in named.items() if there]
    statistics = ("scales", "means") if centred else ("scales",)
    return LayerStep(
        StepOp.NORM,
        name,
        (x,),
        (_hidden(model, gives),),
        tuple(
            Parameter(f"{module}.{part}", (model.hidden,), "replicated", False) for part in parts
        ),
        saves=(x,),
        statistics=tuple(StepValue(f"{one} of {name}", 1, split=False) for one in statistics),
        cheap=True,
    )


def _sum(name: str, x: StepValue, y: StepValue, gives: str) -> LayerStep:
    return LayerStep(StepOp.SUM, name, (x, y), (x._replace(name=gives),))


def _attention(model: Architecture, x: StepValue) -> list[LayerStep]:
    """Heads, how they mix values, and the product of what they give."""
    steps, heads = (latent_heads if model.latent_attention else grouped_heads)(model, x)
    mixed = StepValue("attention's values", model.heads, model.value_width)
    softmax = StepValue("sums of softmax", model.heads)
    saved = (heads[0], mixed) if model.keys_given else (*heads, mixed)
    sinks = (Parameter(SINKS, (model.heads,), "rows", False),) if model.attention_sinks else ()
    core = LayerStep(
        StepOp.ATTENTION, "attention", heads, (mixed,), sinks, saves=saved, statistics=(softmax,)
    )
    gated = _gated(steps[0], mixed) if model.attention_gate else []
    output, last = {"o_proj": _hidden(model, "attention output")}, (core, *gated)[-1].gives[0]
    closing = product("attention output", last, output, bias=model.attention_output_bias)
    return [*steps, core, *gated, closing]


def _gated(first: LayerStep, mixed: StepValue) -> list[LayerStep]:
    """What multiplies attention's values by the sigmoid of a gate, of the first product."""
    read = mixed, first.gives[1]
    gives = (mixed._replace(name="gated values"),)
    return [LayerStep(StepOp.GATE, "attention gate", read, gives, saves=read, cheap=True)]


def _shared(model: Architecture, x: StepValue) -> list[LayerStep]:
    """An MLP beside the experts that all tokens pass, if the model has one.

    Its gate, a sigmoid of a score, multiplies before the last product, as experts' weights do.
    """
    if not model.shared_ffn:
        return []
    names = entering(model)
    inputs = tuple(StepValue(f"shared {name}", model.shared_ffn) for name in names)
    modules = {f"shared.{name}_proj": v for name, v in zip(names, inputs, strict=True)}
    first = product(SHARED_UP, x, modules, bias=False)
    inner = inputs[0]._replace(name="shared inner")
    read: tuple[StepValue, ...] = inputs
    weights: tuple[StepValue, ...] = ()
    if model.shared_gate:
        score = StepValue("shared score", 1, split=False, whole=True)
        gate = Parameter(SHARED_GATE, (1, model.hidden), "replicated", True)
        first = replace(first, gives=(*inputs, score), parameters=(*first.parameters, gate))
        read, weights = (*inputs, score), (score._replace(name="shared weight"),)
    activation = LayerStep(
        StepOp.ACTIVATION,
        SHARED_ACTIVATION,
        read,
        (inner,),
        saves=inputs,
        statistics=weights,
        cheap=True,
    )
    output = {"shared.down_proj": _hidden(model, "shared output")}
    last = product(SHARED_DOWN, inner, output, bias=False)
    own = not model.closes("mlp") or model.expert_norms == "each"
    closing = _closing(model, "shared", last.gives[0]) if own else []
    return [first, activation, last, *closing]


def _experts(model: Architecture, x: StepValue, by: StepValue) -> list[LayerStep]:
    """A router, which reads `by`, and experts of x or of a narrow latent of it.

    The matrices around a latent are whole on every tensor-parallel rank, so that ranks gather, send
    and sum latents.
    """
    output = _hidden(model, "mlp output")
    if not model.expert_latent:
        return _routed(model, x, by, output)
    latent = StepValue("expert latent", model.expert_latent, split=False)
    summed = latent._replace(name="experts' sum")
    return [
        whole_product(NARROWED, x, {NARROWING: latent}),
        *_routed(model, latent, by, summed),
        whole_product("expert output", summed, {WIDENING: output}),
    ]


def _routed(model: Architecture, x: StepValue, by: StepValue, output: StepValue) -> list[LayerStep]:
    """A router, which reads `by`, and MLPs, gated or not, of which each token passes some.

    Every tensor-parallel rank routes all tokens and has a part of each expert. Values between ROUTE
    and COMBINE have a row for each expert that a token passes. An expert's result is weighted
    before its last product, so that the weights' gradients need no results of experts.

    Biases of all experts are one matrix with a column for each, by which a row's choice of an
    expert is multiplied; after the last product, a token's weights are.
    """
    routed = routing(model, x, by)
    sent, weights = routed[-1].gives
    each = model.experts_per_token
    names = entering(model)
    *entered, inner = (StepValue(name, model.ffn, each) for name in (*names, "inner"))
    opened, returned = tuple(entered), sent._replace(name="returned")
    first = of_experts(model, *(f"{name}_proj" for name in names))
    last = of_experts(model, "down_proj")
    activation = LayerStep(
        StepOp.ACTIVATION,
        "activation",
        (*opened, weights),
        (inner,),
        saves=opened,
        statistics=(weights,),
        cheap=True,
    )
    closing = _closing(model, "expert", output) if model.expert_norms == "each" else []
    return [
        *routed,
        LayerStep(StepOp.PRODUCT, "mlp up", (sent,), opened, first),
        activation,
        LayerStep(StepOp.PRODUCT, "mlp down", (inner,), (returned,), last, saves=(inner,)),
        LayerStep(StepOp.COMBINE, "combine", (returned,), (output,)),
        *closing,
    ]


def _head(model: Architecture) -> tuple[LayerStep, ...]:
    steps = [_norm(model, "norm", "final norm", _hidden(model, "input"), "normed")]
    if model.logit_scale != 1:  # of what the product reads, which has fewer columns than words
        scaled = _hidden(model, "scaled")
        steps.append(LayerStep(StepOp.SCALE, "logit scale", (steps[-1].gives[0],), (scaled,)))
    normed, logits = steps[-1].gives[0], StepValue("logits", model.vocab)
    if model.tied_embeddings:
        lm_head = LayerStep(
            StepOp.PRODUCT, "lm head", (normed,), (logits,), shared=TABLE, saves=(normed,)
        )
    else:
        lm_head = product("lm head", normed, {"lm_head": logits}, bias=model.head_bias)
    loss = LayerStep(StepOp.LOSS, "loss", (logits,), (), saves=(logits,))
    return (*steps, lm_head, loss)
