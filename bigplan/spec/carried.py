"""What passes from block to block beside the residual stream, as in Gemma 4 E2B and E4B.

A block may have an input of its own: rows of a table by token, with the norm of a product of the
embedded token. All blocks' tables are one parameter, a layer of its own behind the embedding, so
that it may live elsewhere than the words that a tied head reads; products and their norm belong to
the embedding. The last blocks may read keys and values that an earlier block has made, the last one
that sees as many tokens. They are kinds of blocks of their own.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec
from bigplan.spec.pattern import expanded

INPUTS = "inputs"  # the kind of layer that holds all blocks' tables
TABLES = "embed_inputs.weight"  # which it looks up
TO_INPUTS, INPUTS_NORM = "inputs_proj", "inputs_norm"  # of the embedding
OWN_GATE, OWN_DOWN = "own.gate_proj", "own.down_proj"  # of a block
OWN_ACTIVATION = "own activation"
# What a block finds beside its parameters, by name.
OWN_INPUT, KEYS, VALUES = "input of its own", "kept keys", "kept values"


class BlockInputs(Spec):
    """Each block's own input i of a token: (r + norm(W e / root of `hidden`)) / root of 2.

    e is the embedded token, as the first block reads it; r the token's row of the block's table,
    times the root of `width`. The block adds norm(U (act(V x) * i)) to its residual stream x, where
    `act` is that of its MLP.
    """

    width: int = Field(gt=0, le=10**5)
    """columns of one block's input"""


class KeySharing(Spec):
    """The last blocks have queries alone, and read the keys and values of an earlier block.

    It is the last block before them that sees as many tokens: one local and one global block.
    """

    blocks: int = Field(gt=0, le=1000)
    """how many last blocks"""
    ffn: int = Field(gt=0, le=10**7)
    """inner width of their MLPs"""


def inputs_width(model: Any) -> int:
    """Columns of all blocks' own inputs of a token together.

    `model`: an Architecture, typed as Any because that module imports this one.
    """
    width = 0 if model.block_inputs is None else model.block_inputs.width
    return int(model.layers * width)


def handed_width(model: Any) -> int:
    """Columns of a token that pass beside its hidden state: inputs, and kept keys and values.

    `model`: a ModelSpec.
    """
    kinds = model.block_kinds
    kept = sum(2 * model.seen_by(kinds[number]).kv_width for number in keepers(model))
    return inputs_width(model) + int(kept)


def shares_keys(model: Any) -> tuple[bool, ...]:
    """Of every block whether it reads an earlier one's keys and values; `model` as above."""
    sharing = 0 if model.key_sharing is None else model.key_sharing.blocks
    return tuple(number >= model.layers - sharing for number in range(model.layers))


def keepers(model: Any) -> frozenset[int]:
    """The numbers of blocks whose keys and values later ones read."""
    if model.key_sharing is None:
        return frozenset()
    last = {see: number for number, see in enumerate(_before(model))}
    return frozenset(last.values())


def _before(model: Any) -> tuple[bool, ...]:
    """Of every block with keys of its own whether it is local."""
    own = model.layers - model.key_sharing.blocks
    return expanded(model.attention_pattern, model.layers)[:own]


def check_carried(model: Any) -> None:
    """Inputs of blocks and shared keys go with plain attention, norms around and gated MLPs.

    Raises InputError.
    """
    for key in (key for key in ("block_inputs", "key_sharing") if getattr(model, key) is not None):
        if found := [f"`{name}`" for name in _OTHERS if getattr(model, name)]:
            raise InputError(
                f"`{key}` with {' and '.join(found)}, which blocks with it do not have; remove one"
            )
    if model.block_inputs is not None:
        usual = {"norm": "rmsnorm", "norms": "around", "mlp": "geglu", "positions": "rope"}
        own = {name: getattr(model, name) for name in usual}
        if odd := [f"`{name}: {value}`" for name, value in own.items() if value != usual[name]]:
            raise InputError(
                f"`block_inputs` with {' and '.join(odd)}: blocks with inputs of their own have "
                f"{', '.join(f'{name} {value}' for name, value in usual.items())}; state these"
            )
    _check_sharing(model)


def _check_sharing(model: Any) -> None:
    sharing = model.key_sharing
    if sharing is None or model.keys_given:  # as such blocks see their model
        return
    if model.positions != "rope":
        raise InputError(
            f"`key_sharing` with `positions: {model.positions}`, but keys that blocks share are "
            "turned by rope; use `positions: rope`"
        )
    if len({*_before(model)}) < 2:
        raise InputError(
            f"`key_sharing` of {sharing.blocks} of {model.layers} blocks, but a local and a global "
            "block before these have to keep keys and values for them; share fewer, or change "
            "`attention_pattern`"
        )


_OTHERS = (
    *("latent_attention", "mixer_pattern", "parallel_residual", "dense_blocks", "expert_pattern"),
    *("convolution", "delta_rule", "state_space", "experts", "attention_gate", "embedding_norm"),
    *("qk_norm_whole", "qk_norm_turned", "attention_sinks", "global_query_growth"),
)
