"""Tables of operators, each with the function that writes it as arithmetic; their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigplan.kernels.fusion.body import Val
from bigplan.kernels.fusion.builder import Builder
from bigplan.kernels.fusion.graph import Arg, KernelNode
from bigplan.kernels.fusion.strides import Unfusable

Expansion = Callable[[Builder, KernelNode], tuple[Val, ...]]


class Expansions(dict[str, Expansion]):
    """Expansions by the operator's name in ATen."""

    def of(self, *names: str) -> Callable[[Expansion], Expansion]:
        """A decorator that enters a function under these names."""

        def enter(function: Expansion) -> Expansion:
            self.update(dict.fromkeys(names, function))
            return function

        return enter

    def plain(self, op: str, *arguments: str, names: tuple[str, ...] = ()) -> None:
        """Enter, under `names` or its own, an operation on these arguments as they are."""

        def expand(b: Builder, node: KernelNode) -> tuple[Val, ...]:
            return (b.apply(op, *(b.argument(node, name) for name in arguments)),)

        self.update(dict.fromkeys(names or (op,), expand))


def number_of(node: KernelNode, name: str, default: float) -> float:
    """A number among the arguments."""
    given = node.arguments.get(name, default)
    if not isinstance(given, bool | int | float):
        raise Unfusable(f"its {name} is no number")
    return float(given)


def whole_of(node: KernelNode, name: str, default: int) -> int:
    """A whole number among the arguments."""
    given = node.arguments.get(name, default)
    assert isinstance(given, int)
    return given


def shape_of(b: Builder, node: KernelNode, name: str) -> tuple[int, ...]:
    """The shape of a tensor among the arguments."""
    ref = node.arguments[name]
    assert isinstance(ref, Arg)
    return b.graph.values[ref.name].shape


def normed_shape(b: Builder, node: KernelNode, name: str) -> tuple[int, ...]:
    """The shape of a norm's input, where it is over the last dimension alone."""
    over: Any = node.arguments["normalized_shape"]
    if len(over) != 1:
        raise Unfusable("it is a norm over several dimensions")
    return shape_of(b, node, name)


def dims_of(node: KernelNode, count: int) -> set[int]:
    """The dimensions that an operator reduces, of `count`; without any, all."""
    given = node.arguments.get("dim")
    if given is None or given == ():
        return set(range(count))
    dims = given if isinstance(given, tuple) else (given,)
    return {dim % max(1, count) for dim in dims if isinstance(dim, int)}  # a number has one, too


def require_last_dimension(node: KernelNode) -> None:
    """Raise Unfusable where the operator works over another dimension than the last."""
    count = max(1, len(node.outputs[0].shape))
    if whole_of(node, "dim", -1) % count != count - 1:
        raise Unfusable("it normalises over another dimension than the last")


def mask_of(node: KernelNode) -> tuple[bool, ...]:
    """Which outputs are wanted."""
    mask: Any = node.arguments["output_mask"]
    return tuple(bool(want) for want in mask)
