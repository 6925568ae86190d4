"""The layers of bigplan/spec/layers.py as pure functions of a dictionary of parameters.

Weights live in flat buffers that come and go, so no nn.Module owns them: a function takes views
of a layer's buffer under the names of ModelSpec.kinds().
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime import generated
from bigplan.runtime.experts import mlp as expert_mlp
from bigplan.runtime.experts.shared import gated_by_score
from bigplan.runtime.layers import latents
from bigplan.runtime.layers.activations import activation
from bigplan.runtime.mixers import attention as attention_mixer
from bigplan.runtime.mixers import convolution, delta_rule, state_space
from bigplan.runtime.mixers.norms import norm_alone, norm_of, norm_rule, norm_weights
from bigplan.runtime.mixers.positions import Positions
from bigplan.runtime.mixers.ways import PLAIN, Parameters, Ways
from bigplan.runtime.operators import (
    scaled_in_place,
    unread_sum,
)
from bigplan.runtime.parallel.context_parallel import WHOLE, ContextParallel
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.runtime.parallel.words import Words, cross_entropy, own_rows
from bigplan.spec.carried import OWN_DOWN, OWN_GATE, OWN_INPUT
from bigplan.spec.layers import BLOCK_SCALE, TABLE
from bigplan.spec.mixers import (
    ATTENTION,
    CONVOLUTION,
    DELTA_RULE,
    MLP,
    OUTPUTS,
    STATE_SPACE,
    Mixer,
)
from bigplan.spec.model import ModelSpec
from bigplan.spec.xielu import xielu_numbers


def embedding(
    p: Parameters,
    tokens: Tensor,
    model: ModelSpec,
    ranks: TensorParallel = ONE,
    context: ContextParallel = WHOLE,
    begins: Tensor | None = None,
) -> Tensor:
    """Rows of embed_tokens.weight [V, h] for int64 tokens [b, s]: [b, s, h], the table's dtype.

    They are multiplied by the model's embedding_scale. Learned positions add row
    `position_offset + i` of embed_positions.weight to token i of a sequence, of which `context` has
    a part; with `begins`, as in `looked_up`, to token i of a document. If ranks share out the
    table, each looks up its own words, and one adds the positions. If the model has a norm of the
    sum, that is `embedding_norm`.
    """
    table = p[TABLE]
    if ranks.alone:
        output = F.embedding(tokens, table)
    else:
        rows, others = own_rows(tokens, len(table), ranks)
        output = F.embedding(rows, table).masked_fill_(others[..., None], 0.0)
    if model.positions == "learned" and ranks.first:
        table = p["embed_positions.weight"]
        if begins is None:
            start = model.position_offset + context.first(tokens.shape[1])
            output = output + table[start : start + tokens.shape[1]]
        else:
            output = output + F.embedding(_places(tokens, model, context, begins), table)
    if not ranks.alone:
        output = ranks.sum(output)()
    return scaled(output, model)


def scaled(rows: Tensor, model: ModelSpec) -> Tensor:
    """Rows of the token table times the model's factor, which Gemma rounds to the rows' dtype."""
    if model.embedding_scale == 1:
        return rows
    return rows * float(torch.tensor(model.embedding_scale, dtype=rows.dtype))


def embedding_norm(p: Parameters, x: Tensor, model: ModelSpec, ways: Ways | None = None) -> Tensor:
    """What the first block reads, of `embedding`'s x [..., h]: its norm, where there is one."""
    return norm_of(p, "embed_norm", x, model, ways or PLAIN)[0] if model.embedding_norm else x


def looked_up(
    tokens: Tensor,
    model: ModelSpec,
    context: ContextParallel = WHOLE,
    begins: Tensor | None = None,
) -> dict[str, Tensor]:
    """The rows that `embedding` reads of each of its tables, int64 [b * s].

    `begins`, where documents are kept apart: the first token of each token's document, int32 [b, s]
    of whole sequences.
    """
    rows = {TABLE: tokens.flatten()}
    if model.positions == "learned":
        rows["embed_positions.weight"] = _places(tokens, model, context, begins).flatten()
    return rows


def _places(
    tokens: Tensor, model: ModelSpec, context: ContextParallel, begins: Tensor | None
) -> Tensor:
    """Rows of the table of positions, int64 [b, s] as tokens."""
    length = tokens.shape[1]
    first = context.first(length)
    places = (torch.arange(length, device=tokens.device) + first).expand_as(tokens)
    if begins is not None:
        places = places - begins[:, first : first + length]
    return places + model.position_offset


def block(
    p: Parameters,
    x: Tensor,
    model: ModelSpec,
    positions: Positions,
    ways: Ways = PLAIN,
) -> Tensor:
    """One transformer block: x [b, s, h] -> [b, s, h] in the dtype of x and weights.

    It may be a mixer or an MLP alone. What it gives may be multiplied by a number of its own.

    `positions` are position_tables for this s and this block's attention. Ways of tensor-parallel
    ranks take x as a rank has it, and p with its heads and its part of the MLP. Those of
    context-parallel ranks take a part of s.
    """
    if model.block_inputs is None:
        output = _block(p, x, model, positions, ways)
    else:  # which reads what the MLP gives
        between = _block(p, x, model, positions, ways._replace(unread=False))
        output = _with_own_input(p, between, model, ways)
    if not model.block_scale:
        return output
    return scaled_in_place(output, p[BLOCK_SCALE], unread=ways.unread)


def _block(p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways) -> Tensor:
    if model.mixer == MLP:
        return _widened(p, *norm_of(p, "post_norm", x, model, ways), model, ways)
    last = ways.last or ways.close
    normed = x
    if model.norms != "after":
        # With one norm for both, or for a mixer alone, the gradient beside it is the caller's.
        over = model.has_mlp and not model.shared_norm
        normed, x = norm_of(p, "input_norm", x, model, ways, over=over)
    *beside, mixer = model.mixers_of_a_block
    for one in beside:
        x = _with_mixer(p, x, one, _MIXERS[one](p, normed, model, positions, ways), model, ways)
    mixed = _MIXERS[mixer](p, normed, model, positions, ways)
    if not model.has_mlp:
        return last(p, OUTPUTS[mixer], x, mixed)
    if model.parallel_residual:
        if not model.shared_norm:
            normed, x = norm_of(p, "post_norm", x, model, ways)
        x = last(p, "o_proj", x, mixed)
    else:
        normed, x = _closed_and_normed(p, x, mixed, model, ways)
    return _widened(p, normed, x, model, ways)


def _widened(p: Parameters, normed: Tensor, x: Tensor, model: ModelSpec, ways: Ways) -> Tensor:
    """Add to x what the MLP or the experts give of `normed`."""
    if model.experts:
        if not model.closes("mlp"):
            if model.shared_ffn:
                x = _shared(p, x, normed, model, ways)
            return latents.mlp(p, x, normed, model, ways)
        beside = _shared(p, None, normed, model, ways) if model.shared_ffn else None
        if model.expert_norms == "each":
            given, x = _normed_each(p, beside, x, model, ways)
        else:
            read = ways._replace(experts=ways.experts._replace(unread=False))
            given = latents.mlp(p, beside, normed, model, read)
        added = _closed(p, "mlp", given, model, ways)
        return unread_sum(x, added) if ways.unread else x + added
    inputs = _mlp_inputs(p, normed, model, ways)
    if not model.adds_product_of("mlp"):
        return _closed_and_added(p, "down_proj", x, inputs, model, ways)
    if ways.gated and model.mlp in ("swiglu", "geglu"):
        return ways.gated(p, "down_proj", x, inputs, model.mlp)
    return (ways.last or ways.close)(p, "down_proj", x, activation(inputs, model, ways))


def _with_own_input(p: Parameters, x: Tensor, model: ModelSpec, ways: Ways) -> Tensor:
    """Add to x what the block makes of an input of its own: a gated MLP whose `up` is that."""
    (gate,) = (ways.widening or ways.linears)(p, (OWN_GATE,), x)
    inputs = gate, p[OWN_INPUT]
    if ways.gated:
        product = ways.gated(p, OWN_DOWN, None, inputs, "geglu")
    else:
        product = _alone(p, OWN_DOWN, activation(inputs, model, ways), ways)
    added = _closed(p, "own", product, model, ways)
    return unread_sum(x, added) if ways.unread else x + added


def _normed_each(
    p: Parameters, beside: Tensor | None, x: Tensor, model: ModelSpec, ways: Ways
) -> tuple[Tensor, Tensor]:
    """The sum of what the MLP `beside` and experts of x give, each normed, and x for others.

    Experts and their router read x by norms of their own.
    """
    assert beside is not None
    read, x = norm_of(p, "expert_norm", x, model, ways)
    by, x = norm_of(p, "router_norm", x, model, ways)
    mixture = ways.experts._replace(unread=False)
    given = expert_mlp.mlp(p, None, read, model, mixture, by)
    normed = _closed(p, "shared", beside, model, ways)
    return normed + _closed(p, "expert", given, model, ways), x


_MIXERS: Mapping[Mixer, Callable[..., Tensor]] = {
    ATTENTION: attention_mixer.mixed,
    CONVOLUTION: convolution.mixed,
    DELTA_RULE: delta_rule.mixed,
    STATE_SPACE: state_space.mixed,
}


def head_loss(
    p: Parameters,
    x: Tensor,
    targets: Tensor,
    model: ModelSpec,
    ways: Ways = PLAIN,
    ranks: TensorParallel = ONE,
) -> Tensor:
    """Sum of the targets' cross-entropies, an fp32 scalar: x [..., h], targets int64 [...].

    `ways.loss` may give another value of these logits and targets.

    A target of -100 counts nothing.

    p holds the final norm and lm_head.weight [V, h], or embed_tokens.weight where they are tied.
    Logits are in the dtype of x, softmax and loss in fp32. `ranks` that share out the table have
    parts of x, but all its targets, and each returns the whole loss.
    """
    scores = logits(p, x, model, ways, ranks).flatten(0, -2)
    if ways.loss is not None:
        return ways.loss(scores, targets.flatten())
    return cross_entropy(scores, targets.flatten(), Words(model.vocab, model.logit_cap), ranks)


def logits(
    p: Parameters,
    x: Tensor,
    model: ModelSpec,
    ways: Ways = PLAIN,
    ranks: TensorParallel = ONE,
) -> Tensor:
    """Scores of every word, [..., V] in the dtype of x [..., h]; p and `ranks` as in head_loss.

    They are not capped yet.
    """
    table = "embed_tokens" if model.tied_embeddings else "lm_head"
    normed = norm_of(p, "norm", x, model, ways)[0]
    if model.logit_scale != 1:
        normed = normed * model.logit_scale
    return ways.linears(p, (table,), ranks.gathered(normed))[0]


def _mlp_inputs(p: Parameters, x: Tensor, model: ModelSpec, ways: Ways) -> tuple[Tensor, ...]:
    """The inputs of the MLP's activation, [b, s, f] each, for x [b, s, h], and its numbers."""
    if model.mlp == "relu":
        return ways.linears(p, ("up_proj",), x)  # nobody reads it once its ReLU is there
    names = ("gate_proj", "up_proj") if model.gated else ("up_proj",)
    inputs = (ways.widening or ways.linears)(p, names, x)
    if model.mlp == "xielu":
        return (*inputs, *(p[number.name] for number in xielu_numbers()))
    if model.gate_scale == 1:
        return inputs
    gate, up = inputs
    scaled = gate * model.gate_scale  # kept in place of the product, or made again of it
    if ways.widening:
        ways.forget(scaled, partial(torch.mul, other=model.gate_scale), gate)
    return scaled, up


def _shared(
    p: Parameters, x: Tensor | None, normed: Tensor, model: ModelSpec, ways: Ways
) -> Tensor:
    """Add to x what the MLP beside the experts gives of `normed`; None: that alone."""
    last, names = ways.last or ways.close, ["shared.up_proj"]
    if model.gated:
        names.insert(0, "shared.gate_proj")
    if model.shared_gate:
        names.append("shared_gate")
    inputs = (ways.widening or ways.linears)(p, tuple(names), normed)
    if model.shared_gate:
        gate, up, score = inputs
        weighted = ways.experts.rows.activation(model.mlp, "outputs")
        inner = gated_by_score(weighted, (gate, up), score, ways.forget)
    elif x is not None and not model.adds_product_of("shared"):
        return _closed_and_added(p, "shared.down_proj", x, inputs, model, ways)
    elif ways.gated and model.mlp in ("swiglu", "geglu"):
        return ways.gated(p, "shared.down_proj", x, inputs, model.mlp)
    else:
        inner = activation(inputs, model, ways)
    if x is None:
        return _alone(p, "shared.down_proj", inner, ways)
    return last(p, "shared.down_proj", x, inner)


def _alone(p: Parameters, name: str, inner: Tensor, ways: Ways) -> Tensor:
    """The product that is added to the residual stream, before it is."""
    return ways.alone(p, name, inner) if ways.alone else ways.linears(p, (name,), inner)[0]


def _with_mixer(
    p: Parameters, x: Tensor, mixer: Mixer, mixed: Tensor, model: ModelSpec, ways: Ways
) -> Tensor:
    """The sum of x and of what one of several mixers adds."""
    if model.adds_product_of(mixer):
        return ways.close(p, OUTPUTS[mixer], x, mixed)
    return x + _closed(p, mixer, _alone(p, OUTPUTS[mixer], mixed, ways), model, ways)


def _closed_and_normed(
    p: Parameters, x: Tensor, mixed: Tensor, model: ModelSpec, ways: Ways
) -> tuple[Tensor, Tensor]:
    """What the MLP reads, and the sum of x and of what attention adds.

    A generated kernel adds and norms in one pass.
    """
    mixer = model.mixer
    if ways.kernels is None and model.adds_product_of(mixer):
        return norm_of(p, "post_norm", ways.close(p, OUTPUTS[mixer], x, mixed), model, ways)
    added = _closed(p, mixer, _alone(p, OUTPUTS[mixer], mixed, ways), model, ways)
    if model.norms == "after":
        x = x + added
        return x, x
    if ways.kernels is None:
        return norm_of(p, "post_norm", x + added, model, ways)
    weights, rule = norm_weights(p, "post_norm"), norm_rule(model, ways.kernels)
    normed, x = generated.added_norm(rule, x, added, *weights)
    ways.forget(normed, partial(generated.normed, rule), x, *weights)
    return normed, x


def _closed(p: Parameters, part: str, x: Tensor, model: ModelSpec, ways: Ways) -> Tensor:
    """What a part of the block adds, of its product x: normed and scaled as the model has it."""
    if model.closes(part):
        x = norm_alone(p, f"{part}_closing_norm", x, model, ways)
    scale = model.scale_of(part)
    return x if scale == 1 else x * scale


def _closed_and_added(
    p: Parameters,
    down: str,
    x: Tensor,
    inputs: tuple[Tensor, ...],
    model: ModelSpec,
    ways: Ways,
) -> Tensor:
    """The sum of x and of what an MLP adds, by its activation's inputs and its last product.

    Where nothing reads that sum, nothing reads a product that is scaled alone.
    """
    idle = ways.unread and not model.closes("mlp")
    into = x.detach() if idle else None
    if ways.gated and model.mlp in ("swiglu", "geglu"):
        product = ways.gated(p, down, into, inputs, model.mlp)
    elif into is not None:
        product = (ways.last or ways.close)(p, down, into, activation(inputs, model, ways))
    else:
        product = _alone(p, down, activation(inputs, model, ways), ways)
    if idle:
        return unread_sum(x, product, model.scale_of("mlp"))
    added = _closed(p, "mlp", product, model, ways)
    return unread_sum(x, added) if ways.unread else x + added
