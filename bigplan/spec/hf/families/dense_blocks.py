"""Which blocks of a mixture have one MLP for all tokens in place of experts, in a config.json.

Families say it in different keys. Each becomes a flag of every block, whether it is dense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bigplan.spec.experts import DENSE, ROUTED
from bigplan.spec.hf.families.parts import Part
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact_words

_DENSE, _SPARSE = "dense", "sparse"
FIRST = "first_k_dense_replace"
Dense = Sequence[bool]


def first_ones(count: int, blocks: int) -> Dense:
    """So many first blocks are."""
    return [block < count for block in range(blocks)]


def first_fields(
    reader: ConfigReader, count: int, width: str = "intermediate_size"
) -> dict[str, Any]:
    """Fields of ModelSpec where so many first blocks are; `width`: as below."""
    return {"dense_ffn": reader.count(width), "dense_blocks": count} if count else {}


def dense_fields(
    reader: ConfigReader, dense: Dense, width: str = "intermediate_size"
) -> dict[str, Any]:
    """Fields of ModelSpec; `width`: the key of these MLPs' inner width, read where there are some.

    First blocks are a number, any others a pattern.
    """
    count = sum(dense)
    fields = first_fields(reader, count, width)
    if all(dense[:count]):
        return fields
    pattern = compact_words([DENSE if one else ROUTED for one in dense])
    return {"dense_ffn": fields["dense_ffn"], "expert_pattern": pattern}


def _read_listed(reader: ConfigReader) -> dict[str, Any]:
    """As Qwen's files say it: each so-many-th block has experts, and listed ones have not."""
    blocks, every = reader.count("num_hidden_layers"), reader.count("decoder_sparse_step")
    listed = reader.places("mlp_only_layers", blocks)
    return dense_fields(reader, [n in listed or (n + 1) % every > 0 for n in range(blocks)])


def _write_listed(model: ModelSpec) -> dict[str, Any]:
    return {
        "intermediate_size": model.dense_ffn or model.ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number, dense in enumerate(model.dense) if dense],
    }


_WIDTH = {"dense_ffn": ("intermediate_size",)}
_LISTED = ("mlp_only_layers",)
DENSE_BLOCKS = Part(
    _read_listed,
    _write_listed,
    {"dense_blocks": _LISTED, "expert_pattern": (*_LISTED, "decoder_sparse_step"), **_WIDTH},
)


def by_types(reader: ConfigReader, otherwise: Dense) -> Dense:
    """By `mlp_layer_types`, or `otherwise` without it."""
    kinds = reader.texts("mlp_layer_types")
    if not kinds:
        return otherwise
    if any(kind not in (_DENSE, _SPARSE) for kind in kinds) or len(kinds) != len(otherwise):
        reader.refuse("mlp_layer_types", f"{_DENSE} or {_SPARSE} for each of num_hidden_layers")
    return [kind == _DENSE for kind in kinds]


def write_types(model: ModelSpec) -> list[str]:
    """The `mlp_layer_types` of a config.json."""
    return [_DENSE if dense else _SPARSE for dense in model.dense]


def mlp_types(first: Callable[[ConfigReader], int], *others: str) -> Part:
    """Blocks without experts by `mlp_layer_types`; `first`: how many first ones without a list.

    `others`: keys by which `first` says it.
    """

    def read(reader: ConfigReader) -> dict[str, Any]:
        usual = first_ones(first(reader), reader.count("num_hidden_layers"))
        none = {"dense_blocks": 0, "dense_ffn": 0, "expert_pattern": ()}  # whatever other keys say
        return none | dense_fields(reader, by_types(reader, usual))

    def write(model: ModelSpec) -> dict[str, Any]:
        width = model.dense_ffn or model.ffn
        return {"intermediate_size": width, "mlp_layer_types": write_types(model)}

    types = ("mlp_layer_types",)
    return Part(read, write, {"dense_blocks": (*types, *others), "expert_pattern": types, **_WIDTH})


def by_frequency(reader: ConfigReader) -> Dense:
    """As DeepSeek's files say it: first blocks, and of others all but each so-many-th.

    DeepSeek's own code (modeling_deepseek.py of its files) counts blocks from 0, as that of A.X-K1
    in transformers does; transformers' code of DeepSeek reads `first_k_dense_replace` alone.
    """
    blocks, first = reader.count("num_hidden_layers"), reader.count(FIRST, least=0)
    every = reader.optional_count("moe_layer_freq") or 1
    return [number < first or number % every > 0 for number in range(blocks)]
