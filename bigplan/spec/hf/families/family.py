"""What is known of a family of Hugging Face models: its config.json, and its files' tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Tensors:
    """How a family's files name and keep the modules of bigplan/spec/layers.py.

    `{}` in a name is the block's number, from 0. Files of most families keep a matrix [out, in].
    """

    names: Mapping[str, str]  # module -> its name there
    transposed: tuple[str, ...] = ()  # modules whose matrices are [in, out]
    fused: tuple[tuple[str, ...], ...] = ()  # modules that are one, one below another
    by_head: bool = False  # what goes with a key head of each below each other, not all of each


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model_type."""

    read: Callable[[ConfigReader], dict[str, Any]]  # a config.json's fields of ModelSpec
    defaults: Mapping[str, Any]  # those of transformers' own config class, for absent keys
    write: Callable[[ModelSpec], dict[str, Any]]  # such a config.json, to be read back
    tensors: Tensors
    keys: Mapping[str, tuple[str, ...]]
    """field of ModelSpec -> its key in a config.json, dotted; of several the first that is there"""


# transformers' names; the tanh approximation goes by three
GELUS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
