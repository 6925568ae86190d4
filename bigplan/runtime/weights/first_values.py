"""The weights that a run starts from: seeded random ones, or those of a Hugging Face folder.

A caller names a rectangle of a parameter, and only that rectangle is made or read. So a rank that
owns a part of a layer never has the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bigplan.content import ADAPTERS
from bigplan.rectangle import Rectangle, all_of
from bigplan.runtime.constants import terms_of
from bigplan.runtime.context import DTYPES
from bigplan.runtime.linear import four_bits
from bigplan.runtime.weights.hf import HfFolder
from bigplan.runtime.weights.peft import PeftFolder
from bigplan.spec import delta_rule_steps, state_space_steps
from bigplan.spec.expert_steps import EXPERT_SCALES
from bigplan.spec.four_bits import is_packed, packed_columns
from bigplan.spec.layers import BLOCK_SCALE, BLOCKS
from bigplan.spec.lora import inputs_of
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter
from bigplan.spec.training import Training
from bigplan.spec.xielu import EDGE, FIRST, SLOPE

# Of a kind, layer (index in layer_sequence()), parameter and rectangle of it: values on the CPU
# [rows, columns], fp32 or as a file has them. A vector is one row.
FirstValues = Callable[[str, int, Parameter, Rectangle], Tensor]

# Decays of heads: of a gated delta rule as in transformers, of a state space as in Mamba-2's own
# code (state-spaces/mamba, Mamba2: A_init_range, dt_min, dt_max).
DECAYS = {delta_rule_steps.LOG_DECAY: (0.01, 16.0), state_space_steps.LOG_DECAY: (1.0, 16.0)}
TIME_STEPS = 0.001, 0.1  # of a state space's heads, uniform in their logarithms, likewise
ONES = (
    EXPERT_SCALES,
    delta_rule_steps.DECAY_OFFSET,
    delta_rule_steps.NORM,
    state_space_steps.NORM,
    state_space_steps.SKIP,
)
STD = 0.02  # of every matrix, as in GPT-2 and Llama
# Elements that are drawn from one seed. A block takes 55 us of Python, in which other threads wait,
# and 5 ms to draw, in which they do not: about 100 cores can do it side by side. A rectangle that
# begins or ends amid a block, or has some columns of it, draws all of it.
BLOCK = 1 << 20
# Blocks of experts that are read at once out of files: in 16 bits as large as two in fp32. Of 128
# experts 2,048 wide each then has 16 rows, and of one block 4, whose reading is all overhead.
EXPERTS_BLOCKS = 4


def first_values(model: ModelSpec, training: Training) -> FirstValues:
    """What makes any rectangle of the model's parameters.

    `training.weights` is checked whole here, before any of it is read or memory is taken. Raises
    InputError, and RefusedError for what is not read.
    """
    norm = 0.0 if model.norm_plus_one else 1.0
    drawn = partial(random_values, seed=training.seed, norm=norm)
    if training.weights is None:
        return drawn
    folder = HfFolder.open(Path(training.weights).expanduser(), model)

    def read(kind: str, layer: int, parameter: Parameter, part: Rectangle) -> Tensor:
        if layer == ADAPTERS:
            return drawn(kind, layer, parameter, part)
        return folder.values(layer, parameter, part)

    return read


def frozen_fingerprint(model: ModelSpec, training: Training) -> str:
    """HfFolder.fingerprint of what adapters are trained beside; empty where nothing is read.

    Raises as first_values does.
    """
    if training.lora is None or training.weights is None:
        return ""
    return HfFolder.open(Path(training.weights).expanduser(), model).fingerprint()


def stored_values(model: ModelSpec, training: Training, *, resumed: bool = False) -> FirstValues:
    """As `first_values`, of what the training stores: blocks' matrices may be in 4 bits.

    `resumed`: nobody asks for adapters, which a checkpoint has.
    """
    first = first_values(model, training)
    if training.lora is not None and training.lora.weights is not None and not resumed:
        first = _with_adapters(first, PeftFolder.open(model, training))
    if training.lora is None or training.lora.frozen is None:
        return first
    kinds = {kind: {p.name: p for p in of if is_packed(p)} for kind, of in model.kinds().items()}
    dtype = DTYPES[training.precision]

    def stored(kind: str, layer: int, parameter: Parameter, part: Rectangle) -> Tensor:
        if kind not in BLOCKS or parameter.name not in kinds[kind]:
            return first(kind, layer, parameter, part)
        matrix, blocks = kinds[kind][parameter.name], four_bits.unstored(part, dtype)
        packed = torch.empty(
            blocks.rows, packed_columns(blocks.columns, dtype.itemsize), dtype=dtype
        )
        for band in blocks.bands(rows_to_make(matrix, training)):
            rows, _ = band.within(blocks)
            four_bits.packed(first(kind, layer, matrix, band), dtype, packed[rows])
        return four_bits.part_of(packed, part)

    return stored


def _with_adapters(first: FirstValues, folder: PeftFolder) -> FirstValues:
    def read(kind: str, layer: int, parameter: Parameter, part: Rectangle) -> Tensor:
        if layer == ADAPTERS:
            return folder.values(parameter.name, part)
        return first(kind, layer, parameter, part)

    return read


def whole_values(first: FirstValues, kind: str, layer: int, parameter: Parameter) -> Tensor:
    """The whole parameter, in its shape."""
    return first(kind, layer, parameter, all_of(parameter)).view(parameter.shape)


def random_values(
    kind: str, layer: int, parameter: Parameter, rectangle: Rectangle, seed: int, norm: float = 1.0
) -> Tensor:
    """Normal (std 0.02) matrices, norms' weights, zero biases and sinks: fp32 [rows, columns].

    Decays of delta rules and state spaces are uniform, a delta rule's offsets and the weights of
    their norms one, and so are what a state space adds of values and what multiplies a block. Its
    time steps begin small, and numbers of xIELU as in its paper.
    Of adapters A is uniform within +- 1 / sqrt(in), as torch.nn.Linear begins, and B is zero.

    The values depend on the arguments alone, so every plan starts from the same model. The value of
    an element does not depend on the rectangle: blocks of whole rows, of BLOCK elements or a little
    less, have their own seeds.
    """
    constant = _constant(parameter, rectangle, norm)
    if constant is not None:
        return constant
    values, everything = torch.empty(rectangle.rows, rectangle.columns), all_of(parameter)
    at_once = rows_at_once(everything.columns)
    for band in rectangle.bands(at_once):
        number = band.first_row // at_once
        generator = _generator(f"{seed}/{kind}/{layer}/{parameter.name}/{number}")
        last = min(everything.rows, (number + 1) * at_once)
        block = Rectangle(parameter.name, number * at_once, last, 0, everything.columns)
        place = values[band.within(rectangle)]
        drawn = place if band == block else torch.empty(block.rows, block.columns)
        _draw(parameter, drawn, generator)
        if drawn is not place:
            place.copy_(drawn[band.within(block)])
    return values


def _constant(parameter: Parameter, rectangle: Rectangle, norm: float) -> Tensor | None:
    """The values of a parameter that all begin alike; None: they are drawn."""
    name, shape = parameter.name, (rectangle.rows, rectangle.columns)
    if name.endswith((".bias", ".lora_B", ".sinks")):
        return torch.zeros(shape)
    if name in ONES:
        return torch.ones(shape)
    if name in (BLOCK_SCALE, SLOPE, EDGE):
        terms = terms_of(torch.tensor([FIRST.get(name, 1.0)]))
        return terms[rectangle.first_row : rectangle.last_row]
    if name in FIRST:
        return torch.full(shape, FIRST[name])
    drawn = len(parameter.shape) > 1 or name in (*DECAYS, state_space_steps.STEP_OFFSET)
    return None if drawn else torch.full(shape, norm)


def _draw(parameter: Parameter, values: Tensor, generator: torch.Generator) -> None:
    """Fill a block of a parameter's rows."""
    if (name := parameter.name).endswith(".lora_A"):
        bound = inputs_of(parameter) ** -0.5
        values.uniform_(-bound, bound, generator=generator)
    elif name in DECAYS:
        values.uniform_(*DECAYS[name], generator=generator).log_()
    elif name == state_space_steps.STEP_OFFSET:
        least, most = map(math.log, TIME_STEPS)
        values.uniform_(least, most, generator=generator).exp_().expm1_().log_()
    else:
        values.normal_(0.0, STD, generator=generator)


def rows_at_once(columns: int) -> int:
    """Rows of a matrix that are drawn from one seed; requests of multiples waste nothing."""
    return max(1, BLOCK // columns)


def rows_to_make(parameter: Parameter, training: Training) -> int:
    """Rows to ask for at once: several blocks where each expert's tensor has a few of them."""
    several = parameter.experts and training.weights is not None
    return rows_at_once(parameter.matrix[1]) * (EXPERTS_BLOCKS if several else 1)


def _generator(key: str) -> torch.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
