"""What a block's mixer adds to its operators and bytes, besides the steps that all blocks have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bigplan.graph import convolution, delta_rule, latent, state_space
from bigplan.graph.attention import Passes, attention, flash_gradients, heads, widened_bytes
from bigplan.graph.exchanged_heads import Columns, exchange_bytes
from bigplan.graph.exchanged_heads import exchanges as exchanges_of
from bigplan.graph.operators import Collective, Operator
from bigplan.graph.shape import RankShape
from bigplan.graph.sums import into_matrix, out_of_matrix
from bigplan.spec.mixers import ATTENTION, CONVOLUTION, DELTA_RULE, MLP, STATE_SPACE, Mixer
from bigplan.spec.step import LayerStep, StepOp


def _nothing(shape: RankShape) -> tuple[()]:
    return ()


def _no_bytes(shape: RankShape) -> int:
    return 0


def _no_core(shape: RankShape) -> Passes:
    return (), ()


@dataclass(frozen=True, slots=True)
class Mixing:
    """Of a rank's block with this mixer."""

    into: Callable[[RankShape, str], Sequence[Collective]]  # before its first products
    out_of: Callable[[RankShape], Sequence[Collective]]  # in the backward, after their gradients
    forward_bytes: Callable[[RankShape], int]  # beside what is saved
    backward_bytes: Callable[[RankShape], int]  # beyond what was saved
    core: Callable[[RankShape], Passes] = _no_core  # operators that no step of its own names
    # What context-parallel ranks do: they exchange heads for tokens, or something of their own.
    heads: Callable[[RankShape], Columns] | None = None
    neighbours: Callable[[RankShape], Sequence[Operator]] = _nothing

    def exchanges(self, shape: RankShape) -> Sequence[Operator]:
        """Of parts of sequences, forward; the backward does the same back."""
        return exchanges_of(shape, self.heads(shape)) if self.heads else self.neighbours(shape)


def _forward_bytes(shape: RankShape) -> int:
    exchanged = exchange_bytes(shape, heads(shape))
    return widened_bytes(shape) // 2 + latent.forward_bytes(shape) + exchanged


def _backward_bytes(shape: RankShape) -> int:
    widened = widened_bytes(shape) + latent.backward_bytes(shape)
    return flash_gradients(shape) + widened + exchange_bytes(shape, heads(shape))


def _into_mixer(shape: RankShape, again: str = "") -> tuple[Collective, ...]:
    """Before the first products: with sequence parallelism what they read is gathered.

    `again`: a word after the name of that of the backward, which gathers inputs that are kept.
    """
    first = _first_product(shape)
    return into_matrix(shape, f"{first.name} {again}".strip()) if first.saves or not again else ()


def _out_of_mixer(shape: RankShape) -> tuple[Collective, ...]:
    """In the backward: the sum over ranks of the gradient by what was gathered."""
    first = _first_product(shape)
    return out_of_matrix(shape, first.name, beside=f"{first.name} by weight")


def _first_product(shape: RankShape) -> LayerStep:
    """Of a mixer other than attention, which may stand before it."""
    name = f"{shape.model.mixer} input"
    return next(step for step in shape.steps(StepOp.PRODUCT) if step.name == name)


_MIXERS: Mapping[Mixer, Mixing] = {
    ATTENTION: Mixing(
        latent.into_heads,
        latent.out_of_heads,
        _forward_bytes,
        _backward_bytes,
        attention,
        heads,
    ),
    CONVOLUTION: Mixing(
        _into_mixer,
        _out_of_mixer,
        convolution.forward_bytes,
        convolution.backward_bytes,
        neighbours=convolution.exchanges,
    ),
    DELTA_RULE: Mixing(
        _into_mixer,
        _out_of_mixer,
        delta_rule.forward_bytes,
        delta_rule.backward_bytes,
        delta_rule.delta_rule,
        delta_rule.heads,
    ),
    STATE_SPACE: Mixing(
        _into_mixer,
        _out_of_mixer,
        state_space.forward_bytes,
        state_space.backward_bytes,
        state_space.state_space,
        state_space.heads,
    ),
    MLP: Mixing(lambda shape, again: (), _nothing, _no_bytes, _no_bytes),
}


def mixing(shape: RankShape) -> Mixing:
    """Of the mixer that all blocks have, or two, as a kind of block sees its model."""
    found, *others = (_MIXERS[mixer] for mixer in shape.model.mixers_of_a_block)
    return _side_by_side(found, *others) if others else found


def _side_by_side(first: Mixing, second: Mixing) -> Mixing:
    """Of two that read the same; the backward of the second comes first.

    Its gradient by what both read lives beside the other's.
    """

    def core(shape: RankShape) -> Passes:
        pairs = zip(first.core(shape), second.core(shape), strict=True)
        ahead, back = ((*one, *two) for one, two in pairs)
        return ahead, back

    def backward_bytes(shape: RankShape) -> int:
        beside = first.backward_bytes(shape) + shape.whole_hidden
        return max(beside, second.backward_bytes(shape))

    return Mixing(
        lambda shape, again: (*first.into(shape, again), *second.into(shape, again)),
        lambda shape: (*first.out_of(shape), *second.out_of(shape)),
        lambda shape: max(first.forward_bytes(shape), second.forward_bytes(shape)),
        backward_bytes,
        core,
        neighbours=lambda shape: (*first.exchanges(shape), *second.exchanges(shape)),
    )


def output_of(shape: RankShape) -> str:
    """The name of the last product that leads from a mixer back to the residual stream."""
    return f"{shape.model.mixer} output"


def into_output(shape: RankShape) -> tuple[Collective, ...]:
    """As `into_matrix` of such products' gradients, where the block mixes tokens."""
    return tuple(one for name in _outputs(shape) for one in into_matrix(shape, name))


def out_of_output(shape: RankShape) -> tuple[Collective, ...]:
    """As `out_of_matrix` of these products, likewise."""
    return tuple(one for name in _outputs(shape) for one in out_of_matrix(shape, name))


def _outputs(shape: RankShape) -> list[str]:
    return [f"{mixer} output" for mixer in shape.model.mixers_of_a_block if mixer != MLP]
