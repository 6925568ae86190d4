"""The layers of bigplan/spec/layers.py as pure functions of a dictionary of parameters.

Weights live in flat buffers that come and go, so no nn.Module owns them: a function takes views
of a layer's buffer under the names of ModelSpec.kinds().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.mechanics import repeats_heads
from bigplan.runtime import alibi, generated, mixture
from bigplan.runtime.attention import attention
from bigplan.runtime.context_parallel import WHOLE, ContextParallel
from bigplan.runtime.generated import NormRule
from bigplan.runtime.mixture import Mixture
from bigplan.runtime.operators import layer_norm, rms_norm, rotary, swiglu
from bigplan.runtime.tensor_parallel import ONE, TensorParallel
from bigplan.runtime.words import cross_entropy, own_rows
from bigplan.spec.architecture import RopeScaling
from bigplan.spec.layers import TABLE
from bigplan.spec.model import ModelSpec

if TYPE_CHECKING:
    from bigplan.kernels.library import Library

Parameters = Mapping[str, Tensor]
Tables = tuple[Tensor, ...]  # of position_tables; the first has a row for each position
Forget = Callable[..., None]  # told a result, and the function and inputs that give it again
# Runs products of one tensor as plain_linears does.
Linears = Callable[[Parameters, tuple[str, ...], Tensor], tuple[Tensor, ...]]
# Adds a product to a tensor, as Ways.close does; the second that of silu(gate) * up.
Closing = Callable[[Parameters, str, Tensor, Tensor], Tensor]
Alone = Callable[[Parameters, str, Tensor], Tensor]  # the product by itself
Gated = Callable[[Parameters, str, Tensor, Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # the sum of cross-entropies of logits [n, V] by targets


def embedding(
    p: Parameters,
    tokens: Tensor,
    model: ModelSpec,
    ranks: TensorParallel = ONE,
    context: ContextParallel = WHOLE,
) -> Tensor:
    """Rows of embed_tokens.weight [V, h] for int64 tokens [b, s]: [b, s, h], the table's dtype.

    Learned positions add row `position_offset + i` of embed_positions.weight to token i of a
    sequence, of which `context` has a part. If ranks share out the table, each looks up its own
    words, and one adds the positions. If the model has a norm of the sum, that is `embedding_norm`.
    """
    table = p[TABLE]
    if ranks.alone:
        output = F.embedding(tokens, table)
    else:
        rows, others = own_rows(tokens, len(table), ranks)
        output = F.embedding(rows, table).masked_fill_(others[..., None], 0.0)
    if model.positions == "learned" and ranks.first:
        start = model.position_offset + context.first(tokens.shape[1])
        output = output + p["embed_positions.weight"][start : start + tokens.shape[1]]
    return output if ranks.alone else ranks.sum(output)()


def embedding_norm(p: Parameters, x: Tensor, model: ModelSpec, ways: Ways | None = None) -> Tensor:
    """What the first block reads, of `embedding`'s x [..., h]: its norm, where there is one."""
    return _norm(p, "embed_norm", x, model, ways or PLAIN)[0] if model.embedding_norm else x


def looked_up(
    tokens: Tensor, model: ModelSpec, context: ContextParallel = WHOLE
) -> dict[str, Tensor]:
    """The rows that `embedding` reads of each of its tables, int64 [b * s]."""
    rows = {TABLE: tokens.flatten()}
    if model.positions == "learned":
        start = model.position_offset + context.first(tokens.shape[1])
        places = torch.arange(tokens.shape[1], device=tokens.device) + start
        rows["embed_positions.weight"] = places.expand_as(tokens).flatten()
    return rows


def keep(output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Keep `output`, which is function(*inputs)."""


def plain_linears(p: Parameters, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
    """The products of x [..., in] and each `name`.weight [out, in], plus `name`.bias."""
    return tuple(F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias")) for name in names)


class Ways(NamedTuple):
    """How a block runs what can be run in several ways; bigplan/runtime/products.py has others."""

    linears: Linears = plain_linears  # products with weights
    forget: Forget = keep  # told what selective recomputation runs again: norms and the activation
    widening: Linears | None = None  # the MLP's first products; None: by `linears`
    closing: Closing | None = None  # products added to the residual stream; None: by `linears`
    last: Closing | None = None  # as `closing`; nothing in the block reads this sum; None: closing
    gated: Gated | None = None  # the last product with its gated activation; None: separately
    kernels: Library | None = None  # generated kernels; None: torch's operators
    alone: Alone | None = None  # the product without the sum; None: by `linears`
    loss: Loss | None = None  # None: by words.cross_entropy
    context: ContextParallel = WHOLE  # ranks that have parts of the sequences
    experts: Mixture = mixture.PLAIN  # of the MLP, where the model has them

    def close(self, p: Parameters, name: str, x: Tensor, inner: Tensor) -> Tensor:
        """Add to x [..., out] the product of inner [..., in] and `name`.weight [out, in]."""
        if self.closing is None:
            return x + self.linears(p, (name,), inner)[0]
        return self.closing(p, name, x, inner)


PLAIN = Ways()


def block(p: Parameters, x: Tensor, model: ModelSpec, tables: Tables, ways: Ways = PLAIN) -> Tensor:
    """One pre-norm transformer block: x [b, s, h] -> [b, s, h] in the dtype of x and weights.

    `tables` are position_tables for this s. Ways of tensor-parallel ranks take x as a rank has it,
    and p with its heads and its part of the MLP. Those of context-parallel ranks take a part of s.
    """
    last = ways.last or ways.close
    normed, x = _norm(p, "input_norm", x, model, ways, over=True)
    mixed = _attention(p, normed, model, tables, ways)
    if model.parallel_residual:
        normed, x = _norm(p, "post_norm", x, model, ways)
        x = last(p, "o_proj", x, mixed)
    else:
        normed, x = _closed_and_normed(p, x, mixed, model, ways)
    if model.experts:
        return mixture.mlp(p, x, normed, model, ways.experts)
    inputs = _mlp_inputs(p, normed, model, ways)
    if ways.gated and model.mlp == "swiglu":
        return ways.gated(p, "down_proj", x, *inputs)
    return last(p, "down_proj", x, _activation(inputs, model, ways))


def head_loss(
    p: Parameters,
    x: Tensor,
    targets: Tensor,
    model: ModelSpec,
    ways: Ways = PLAIN,
    ranks: TensorParallel = ONE,
) -> Tensor:
    """Sum of the targets' cross-entropies, an fp32 scalar: x [..., h], targets int64 [...].

    A target of -100 counts nothing.

    p holds the final norm and lm_head.weight [V, h], or embed_tokens.weight where they are tied.
    Logits are in the dtype of x, softmax and loss in fp32. `ranks` that share out the table have
    parts of x, but all its targets, and each returns the whole loss.
    """
    scores = logits(p, x, model, ways, ranks).flatten(0, -2)
    if ways.loss is not None:
        return ways.loss(scores, targets.flatten())
    return cross_entropy(scores, targets.flatten(), model.vocab, ranks)


def logits(
    p: Parameters,
    x: Tensor,
    model: ModelSpec,
    ways: Ways = PLAIN,
    ranks: TensorParallel = ONE,
) -> Tensor:
    """Scores of every word, [..., V] in the dtype of x [..., h]; p and `ranks` as in head_loss."""
    table = "embed_tokens" if model.tied_embeddings else "lm_head"
    normed = _norm(p, "norm", x, model, ways)[0]
    return ways.linears(p, (table,), ranks.gathered(normed))[0]


def position_tables(
    model: ModelSpec,
    sequence_length: int,
    device: torch.device | str,
    dtype: torch.dtype,
    ranks: TensorParallel = ONE,
    context: ContextParallel = WHOLE,
) -> Tables:
    """What attention knows positions by: rope_table's pair, or linear biases (ALiBi).

    Pairs are of this rank's tokens of a sequence among `context`. Biases are those of the heads
    that this rank has within attention. If positions are learned, a table only tells how many
    tokens there are.
    """
    if model.positions != "alibi":
        # Whole sequences' tables would lie on the GPU until this rank's part is cut out.
        pair = rope_table(model, sequence_length, "cpu", dtype)
        return tuple(context.group.own(table).clone().to(device) for table in pair)
    found = alibi.biases(model.heads, model.head_dim, sequence_length, device, dtype)
    parts = context.group.size
    return found.of_rank(ranks.group.place * parts + context.group.place, ranks.group.size * parts)


def rope_table(
    model: ModelSpec, sequence_length: int, device: torch.device | str, dtype: torch.dtype
) -> Tables:
    """Cos and sin of every position and frequency, [s, rotary_width / 2] each in `dtype`.

    Computed in fp32 on the CPU, so that every device rotates by the same angles. Both halves of the
    columns that are rotated, a head's first, share frequencies (the rotate-half convention of
    Hugging Face's Llama), hence half a row.
    """
    exponents = torch.arange(0, model.rotary_width, 2, dtype=torch.float32) / model.rotary_width
    positions = torch.arange(sequence_length, dtype=torch.float32)
    angles = torch.outer(positions, _scaled(1.0 / model.rope_theta**exponents, model.rope_scaling))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Angles a position by frequency, for longer texts where the model says so.

    As Llama 3.1's own code has it: with n = original_length f / (2 pi) waves in the length of the
    pre-training, frequencies of n <= low are divided by the factor, those of n >= high stay, and
    between them the part (n - low) / (high - low) of a frequency stays.
    """
    if scaling is None:
        return frequencies
    assert scaling.factor is not None, scaling
    if scaling.name == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert scaling.name == "llama3" and scaling.original_length and low and high, scaling
    waves = scaling.original_length * frequencies / (2 * math.pi)
    stays = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (stays + (1.0 - stays) / scaling.factor)


def _attention(p: Parameters, x: Tensor, model: ModelSpec, tables: Tables, ways: Ways) -> Tensor:
    """Causal attention of x [b, s, h] with grouped key and value heads, before o_proj."""
    # Linear biases are for whole sequences, other tables for the tokens that this rank has.
    parts = ways.context.group.size if model.positions == "alibi" else 1
    shape = len(tables[0]) // parts, model.head_dim
    q, k, v = (_heads(y, *shape) for y in ways.linears(p, ("q_proj", "k_proj", "v_proj"), x))
    if model.qk_norm:
        q = _rms_normed(q, p["q_norm.weight"], model.norm_epsilon, ways.kernels)
        k = _rms_normed(k, p["k_norm.weight"], model.norm_epsilon, ways.kernels)
    if model.positions == "rope":
        turned = rotary if ways.kernels is None else partial(generated.rotary, ways.kernels)
        q, k = turned(q, *tables), turned(k, *tables)
    q, k, v = map(ways.context.whole_sequences, (q, k, v))
    if repeats_heads(x.element_size(), model.heads, model.kv_heads):
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    window = model.sliding_window
    if model.positions == "alibi":
        by_kernel, biases = ways.kernels is not None, alibi.Biases(*tables)
        mixed = alibi.attention(q, k, v, biases, window, generated=by_kernel)
    else:
        mixed = attention(q, k, v, window)
    return ways.context.own_tokens(mixed).flatten(2)


def _heads(x: Tensor, length: int, head_dim: int) -> Tensor:
    """[..., heads * head_dim], the tokens of sequences of so many, as [b, s, heads, head_dim]."""
    heads = x.shape[-1] // head_dim
    return x.view(-1, length, heads, head_dim)


def _mlp_inputs(p: Parameters, x: Tensor, model: ModelSpec, ways: Ways) -> tuple[Tensor, ...]:
    """The inputs of the MLP's activation, [b, s, f] each, for x [b, s, h]."""
    if model.mlp == "relu":
        return ways.linears(p, ("up_proj",), x)  # nobody reads it once its ReLU is there
    names = ("gate_proj", "up_proj") if model.mlp == "swiglu" else ("up_proj",)
    return (ways.widening or ways.linears)(p, names, x)


def _activation(inputs: tuple[Tensor, ...], model: ModelSpec, ways: Ways) -> Tensor:
    """The MLP's activation, [b, s, f] as its inputs."""
    if ways.kernels is not None:
        made = partial(generated.activation, ways.kernels, model.mlp)
        output = made(*inputs)
        if model.mlp != "relu":
            ways.forget(output, made, *inputs)
        return output
    if model.mlp == "relu":
        return F.relu(inputs[0])  # its output is all that it needs itself
    approximation = "tanh" if model.mlp == "gelu_tanh" else "none"
    function = swiglu if model.mlp == "swiglu" else partial(F.gelu, approximate=approximation)
    output = function(*inputs)
    ways.forget(output, function, *inputs)
    return output


def _norm(
    p: Parameters,
    name: str,
    x: Tensor,
    model: ModelSpec,
    ways: Ways,
    *,
    over: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm called `name` of x [..., h], as the model has it, and x for all others to read.

    An RMSNorm, and any norm by a generated kernel, adds the gradient by that x to its own. With
    `over` it writes the sum over that gradient, so nothing else may hold the gradient then. A
    block's caller may hold a block's gradient.
    """
    weight, epsilon, forget = p[f"{name}.weight"], model.norm_epsilon, ways.forget
    if ways.kernels is not None:
        weights = _norm_weights(p, name)
        rule = NormRule(ways.kernels, model.norm, epsilon)
        normed, x = generated.norm(rule, x, *weights, over=over)
        forget(normed, partial(generated.normed, rule), x, *weights)
        return normed, x
    if model.norm == "rmsnorm":
        normed, x = rms_norm(x, weight, epsilon, over=over)
        forget(normed, partial(_rms_normed, epsilon=epsilon), x, weight)
        return normed, x
    inputs = (x, *_norm_weights(p, name))
    norm = partial(layer_norm, epsilon=epsilon)
    normed = norm(*inputs)
    forget(normed, norm, *inputs)
    return normed, x


def _norm_weights(p: Parameters, name: str) -> tuple[Tensor, ...]:
    """Weight and, where it has one, bias."""
    bias = p.get(f"{name}.bias")
    return (p[f"{name}.weight"],) if bias is None else (p[f"{name}.weight"], bias)


def _closed_and_normed(
    p: Parameters, x: Tensor, mixed: Tensor, model: ModelSpec, ways: Ways
) -> tuple[Tensor, Tensor]:
    """The norm after attention, and the sum that it reads: x and the product of `mixed`.

    A generated kernel adds and norms in one pass.
    """
    if ways.kernels is None:
        return _norm(p, "post_norm", ways.close(p, "o_proj", x, mixed), model, ways)
    weights = _norm_weights(p, "post_norm")
    rule = NormRule(ways.kernels, model.norm, model.norm_epsilon)
    product = (
        ways.alone(p, "o_proj", mixed) if ways.alone else ways.linears(p, ("o_proj",), mixed)[0]
    )
    normed, x = generated.added_norm(rule, x, product, *weights)
    ways.forget(normed, partial(generated.normed, rule), x, *weights)
    return normed, x


def _rms_normed(
    x: Tensor, weight: Tensor, epsilon: float, kernels: Library | None = None
) -> Tensor:
    if kernels is not None:
        return generated.normed(NormRule(kernels, "rmsnorm", epsilon), x, weight)
    return rms_norm(x, weight, epsilon)[0]
