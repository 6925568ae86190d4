"""What attention knows positions by: tables of rope's angles, or linear biases."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.runtime.attention import alibi
from bigplan.runtime.parallel.context_parallel import WHOLE, ContextParallel
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import BlockAttention
from bigplan.spec.rope_scaling import RopeScaling


class Positions(NamedTuple):
    """Tables of position_tables, and the attention of the blocks that they are for."""

    # The first has a row for each position; of queries that grow, two of their own come last, or
    # one of factors where rope turns nothing, or not all columns of latent attention's heads.
    tables: tuple[Tensor, ...]
    attends: BlockAttention
    bounds: Tensor | None = None  # of documents that are kept apart, int32 [b, 2, s]


class Sharing(NamedTuple):
    """Ranks that share out heads, and those that share out sequences."""

    ranks: TensorParallel = ONE
    context: ContextParallel = WHOLE


ALONE = Sharing()


def position_tables(
    model: ModelSpec,
    sequence_length: int,
    device: torch.device | str,
    dtype: torch.dtype,
    sharing: Sharing = ALONE,
    attends: BlockAttention | None = None,
) -> Positions:
    """What attention knows positions by: rope_table's pair, or linear biases (ALiBi).

    Where queries grow with their position, a pair for them follows, whose cos and sin are
    multiplied, so that turning a query multiplies it.

    Those of blocks with the attention `attends`, by default the first block's.

    Pairs are of this rank's tokens of a sequence among those that share it. Biases are those of the
    heads that this rank has within attention. If positions are learned, a table only tells how many
    tokens there are.
    """
    attends, (ranks, context) = attends or model.attentions[0], sharing
    if model.positions != "alibi":
        # Whole sequences' tables would lie on the GPU until this rank's part is cut out.
        tables = rope_table(model, sequence_length, "cpu", dtype, attends)
        tables += _of_queries(model, sequence_length, dtype, attends)
        own = tuple(context.group.own(table).clone().to(device) for table in tables)
        return Positions(own, attends)
    found = alibi.biases(model.heads, model.head_dim, sequence_length, device, dtype)
    parts = context.group.size
    rank = ranks.group.place * parts + context.group.place
    return Positions(found.of_rank(rank, ranks.group.size * parts), attends)


def _of_queries(
    model: ModelSpec, sequence_length: int, dtype: torch.dtype, attends: BlockAttention
) -> tuple[Tensor, ...]:
    """Cos and sin of queries that grow with their position; empty: they turn as keys do.

    Where rope turns nothing, and of latent attention, the factors of queries [s].
    """
    growth = attends.growth
    if growth is not None and growth.grows_within(sequence_length):
        places = torch.arange(1, sequence_length + 1, dtype=torch.float32)
        return ((1.0 + growth.factor * (places / growth.length).floor().log1p()).to(dtype),)
    scaling = model.rope_scaling if attends.scaled else None
    if scaling is None or not scaling.grows_within(sequence_length):
        return ()
    assert scaling.query_growth and scaling.original_length, scaling
    positions = torch.arange(sequence_length, dtype=torch.float32)
    grown = 1.0 + scaling.query_growth * (positions / scaling.original_length).floor().log1p()
    if model.latent_attention is not None:
        return (grown.to(dtype),)
    cos, sin = rope_table(model, sequence_length, "cpu", torch.float32, attends)
    return (cos * grown[:, None]).to(dtype), (sin * grown[:, None]).to(dtype)


def rope_table(
    model: ModelSpec,
    sequence_length: int,
    device: torch.device | str,
    dtype: torch.dtype,
    attends: BlockAttention | None = None,
) -> tuple[Tensor, ...]:
    """Cos and sin of every position and frequency, [s, rotary_width / 2] each in `dtype`.

    Computed in fp32 on the CPU, so that every device rotates by the same angles. Both halves of the
    columns that are rotated, a head's first or latent attention's last, share frequencies (the
    rotate-half convention of Hugging Face's Llama), hence half a row.
    """
    attends = attends or model.attentions[0]
    theta = attends.rope_theta or model.rope_theta  # a block without rope reads the length alone
    exponents = torch.arange(0, model.rotary_width, 2, dtype=torch.float32) / model.rotary_width
    positions = torch.arange(sequence_length, dtype=torch.float32)
    scaling = model.rope_scaling if attends.scaled else None
    frequencies = 1.0 / theta**exponents
    if scaling is not None and scaling.name == "longrope":
        frequencies = 1.0 / (_divisors(scaling, sequence_length) * theta**exponents)
    else:
        frequencies = _turned(frequencies, scaling, theta)
    angles, factor = torch.outer(positions, frequencies), scaling.angle_factor if scaling else 1.0
    return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def _divisors(scaling: RopeScaling, sequence_length: int) -> Tensor:
    """LongRoPE's divisors of frequencies: which of the two lists is the length's to say."""
    assert scaling.original_length, scaling
    long = sequence_length > scaling.original_length
    return torch.tensor(scaling.long_factors if long else scaling.short_factors)


def _turned(frequencies: Tensor, scaling: RopeScaling | None, theta: float) -> Tensor:
    """Angles a position by frequency, for longer texts where the model says so.

    As Llama 3.1's own code has it: with n = original_length f / (2 pi) waves in the length of the
    pre-training, frequencies of n <= low are divided by the factor, those of n >= high stay, and
    between them the part (n - low) / (high - low) of a frequency stays.
    """
    if scaling is None:
        return frequencies
    if scaling.turned is not None:  # the others' angles are 0, so their cos is 1 and their sin 0
        count = int(scaling.turned * len(frequencies))
        return frequencies * (torch.arange(len(frequencies)) < count)
    assert scaling.factor is not None, scaling
    if scaling.name == "linear":
        return frequencies / scaling.factor
    if scaling.name == "yarn":
        stays = _staying(scaling, theta, len(frequencies))
        return frequencies * (stays + (1.0 - stays) / scaling.factor)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert scaling.name == "llama3" and scaling.original_length and low and high, scaling
    waves = scaling.original_length * frequencies / (2 * math.pi)
    if low == high:  # as in Llama 4 Scout: none are between
        return torch.where(waves < low, frequencies / scaling.factor, frequencies)
    stays = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (stays + (1.0 - stays) / scaling.factor)


def _staying(scaling: RopeScaling, theta: float, count: int) -> Tensor:
    """The part of each of `count` frequencies that YaRN leaves (arXiv 2309.00071, section 3.2).

    Frequency i of r / 2 turns n times in the length L of the pre-training where
    i = r ln(L / (2 pi n)) / (2 ln theta). It stays up to the i of beta_fast, rounded down, and is
    divided from that of beta_slow on, rounded up, as in the authors' code; GPT-OSS rounds neither.
    """
    assert scaling.original_length, scaling

    def place(turns: float) -> float:
        length = scaling.original_length or 1
        return count * math.log(length / (2 * math.pi * turns)) / math.log(theta)

    fast, slow = scaling.turns
    first, last = place(fast), place(slow)
    if scaling.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    width = last - first if last != first else 0.001
    divided = (torch.arange(count, dtype=torch.float32) - first) / width
    return 1.0 - divided.clamp(0.0, 1.0)
