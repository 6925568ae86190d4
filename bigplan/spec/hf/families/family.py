"""A family of Hugging Face models: its config.json, and the tensors in its files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bigplan.spec.hf.families.parts import Part, joined, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Tensors:
    """How a family's files name and store the modules of bigplan/spec/layers.py.

    `{}` in a name is the block's number, from 0. Files of most families keep a matrix [out, in].
    `{expert}` is an expert's number, from 0: each has a tensor of its own, [out, in]. If experts'
    parameters have names, not their modules, each is one tensor, by expert first.
    """

    names: Mapping[str, str]  # module, or a parameter -> its name in the files
    transposed: tuple[str, ...] = ()  # modules whose matrices are [in, out], and parameters
    fused: tuple[tuple[str, ...], ...] = ()  # modules stored as one matrix, one below another
    by_head: tuple[str, ...] = ()  # those whose rows are grouped by key head, not by module
    # Those whose rows are grouped by other heads, with the number of these.
    grouped: Mapping[str, Callable[[ModelSpec], int]] = field(default_factory=dict)
    in_turns: tuple[str, ...] = ()  # those whose rows take turns, not stand below another
    # Modules whose files have the two rows of each pair that rope turns beside each other. Ours are
    # half of the turned columns apart; scores are the same, since queries and keys both are so.
    paired: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()  # those whose halves stand the other way: rope turns backwards
    as_row: tuple[str, ...] = ()  # parameters of n numbers of which the files make a matrix [1, n]
    absent: tuple[str, ...] = ()  # constants that are zeros where files do not have them
    longer: tuple[str, ...] = ()  # parameters of which files may have more rows, left unread
    as_number: tuple[str, ...] = ()  # parameters of one number that the files have without a shape
    # Last words of names of tensors that files have in parts, by torch.chunk's rule, and of these.
    in_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Names of modules of models with one norm for attention and MLP, where these differ.
    with_shared_norm: Mapping[str, str] = field(default_factory=dict)

    def but(
        self, names: Mapping[str, str], *, without: Collection[str] = (), **changes: Any
    ) -> Tensors:
        """With other names of modules, or of more; `without` some; `changes` of other fields."""
        kept = {name: place for name, place in self.names.items() if name not in without}
        return replace(self, names={**kept, **names}, **changes)


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model_type of config.json."""

    read: Callable[[ConfigReader], dict[str, Any]]  # a config.json's values for fields of ModelSpec
    defaults: Mapping[str, Any]  # for absent keys, as transformers' own config class has them
    write: Callable[[ModelSpec], dict[str, Any]]  # a config.json that `read` takes back
    tensors: Tensors
    keys: Mapping[str, tuple[str, ...]]
    """field of ModelSpec -> its key in a config.json, dotted; of several the first that is there"""
    other_tensors: tuple[Tensors, ...] = ()  # of files that have them otherwise; never written
    in_transformers: int = 0
    """the layout with the names of transformers' modules, by which peft names adapters"""

    @property
    def layouts(self) -> tuple[Tensors, ...]:
        """How files may have the tensors, by how likely that is."""
        return self.tensors, *self.other_tensors

    def published_as(self, tensors: Tensors) -> ModelFamily:
        """The family, whose files have `tensors` in place of those of transformers' modules."""
        return replace(self, tensors=tensors, other_tensors=(self.tensors,), in_transformers=1)

    def by_old_names(self, names: Mapping[str, str]) -> ModelFamily:
        """The family, whose published files may have `names` of their own for keys."""
        keys = {
            name: (*known, *(names[key] for key in known if key in names))
            for name, known in self.keys.items()
        }
        return replace(self, read=lambda reader: self.read(reader.by_old_names(names)), keys=keys)

    def like(
        self,
        model_type: str,
        architecture: str,
        defaults: Mapping[str, Any],
        *parts: Part,
        tensors: Tensors | None = None,
        without: Collection[str] = (),
    ) -> ModelFamily:
        """A family as this one, but for its defaults, parts and tensors.

        `without`: keys of this one that its files do not have.
        """
        named = {"architectures": [architecture], "model_type": model_type}
        whole = joined(written(named), Part(self.read, self.write, self.keys), *parts)

        def write(model: ModelSpec) -> dict[str, Any]:
            config = whole.write(model) | named
            return {key: value for key, value in config.items() if key not in without}

        known = {**self.defaults, **defaults}
        return ModelFamily(whole.read, known, write, tensors or self.tensors, whole.keys)


def family(
    model_type: str,
    architecture: str,
    defaults: Mapping[str, Any],
    *parts: Part,
    tensors: Tensors,
) -> ModelFamily:
    """One that is like no other."""
    nothing = Part()
    bare = ModelFamily(nothing.read, {}, nothing.write, tensors, {})
    return bare.like(model_type, architecture, defaults, *parts)


# transformers' names; three of them mean the tanh approximation.
GELUS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Of a config.json that is written: transformers' defaults are words that a small vocabulary lacks.
NO_TOKENS: Mapping[str, None] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
