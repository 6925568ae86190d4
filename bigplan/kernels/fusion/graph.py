"""Operators and tensors of a forward and backward, as torch names them, without torch.

`capture.py` makes such a graph of any function; `families.py` of a shipped model's block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "bool": 1, "int64": 8, "int32": 4, "uint8": 1}
FLOATS = ("fp32", "bf16", "fp16")  # what generated kernels read and write, beside bool

# They compute nothing: torch makes a view of its input. Names of ATen without overloads.
LAYOUT = frozenset(
    ("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "squeeze", "t",
     "transpose", "unsqueeze", "view", "_unsafe_view", "reshape", "_reshape_alias", "split",
     "split_with_sizes", "unbind", "chunk")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelValue:
    """A tensor: shape, dtype, and strides in elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Positions, those that share memory counted each."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory: dimensions of stride 0 count once."""
        held = prod(n for n, s in zip(self.shape, self.strides, strict=True) if s or n == 0)
        return held * SIZES.get(self.dtype, 8)

    @property
    def contiguous(self) -> bool:
        """Whether it lies row by row without gaps."""
        return all(
            size == 1 or stride == dense
            for size, stride, dense in zip(
                self.shape, self.strides, dense_strides(self.shape), strict=True
            )
        )


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor that lies row by row."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def dense(name: str, shape: tuple[int, ...], dtype: str) -> KernelValue:
    """A tensor that lies row by row."""
    return KernelValue(name, shape, dtype, dense_strides(shape))


@dataclass(frozen=True, slots=True)
class Arg:
    """The value called so, as an argument."""

    name: str


Argument = Arg | float | int | bool | str | None | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class KernelNode:
    """One operator. `op` is ATen's name without overload, `arguments` go by the schema's names."""

    name: str
    op: str
    arguments: Mapping[str, Argument]
    outputs: tuple[KernelValue, ...]
    backward: bool = False
    refused: str = ""  # why no kernel can be generated, where the operator alone does not say it

    def refs(self) -> Iterator[str]:
        """Names of the tensors that it reads, in order, repeated where they are."""
        for argument in self.arguments.values():
            yield from _refs(argument)

    @property
    def layout(self) -> bool:
        """Whether it is a view of its first input."""
        return self.op in LAYOUT


def _refs(argument: Argument) -> Iterator[str]:
    if isinstance(argument, Arg):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _refs(item)


def frozen(arguments: Mapping[str, Argument]) -> Mapping[str, Argument]:
    """Arguments that nobody changes."""
    return MappingProxyType(dict(arguments))


@dataclass(frozen=True)
class KernelGraph:
    """Nodes in an order that they can run in; outputs are names of values."""

    inputs: tuple[KernelValue, ...]
    nodes: tuple[KernelNode, ...]
    outputs: tuple[str, ...]
    forward_outputs: int  # so many of the outputs are the forward's; the others are gradients

    @cached_property
    def values(self) -> Mapping[str, KernelValue]:
        """Every tensor by its name."""
        made = (value for node in self.nodes for value in node.outputs)
        return {value.name: value for value in (*self.inputs, *made)}

    @cached_property
    def producer(self) -> Mapping[str, KernelNode]:
        """The node that makes a value; inputs have none."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    @cached_property
    def base(self) -> Mapping[str, str]:
        """The value whose memory a value is a view of; itself where it is none."""
        found: dict[str, str] = {value.name: value.name for value in self.inputs}
        for node in self.nodes:
            source = next(node.refs(), None) if node.layout else None
            for value in node.outputs:
                found[value.name] = found[source] if source is not None else value.name
        return found

    @cached_property
    def readers(self) -> Mapping[str, tuple[KernelNode, ...]]:
        """Nodes that compute with a value or a view of it, by its base, in order."""
        found: dict[str, list[KernelNode]] = {}
        for node in self.nodes:
            if not node.layout:
                for name in dict.fromkeys(self.base[ref] for ref in node.refs()):
                    found.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def given(self) -> frozenset[str]:
        """Bases of what the graph returns."""
        return frozenset(self.base[name] for name in self.outputs)
