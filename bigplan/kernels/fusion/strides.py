"""How the dimensions of a tensor lie in memory, and which of them a kernel may take as one."""

from __future__ import annotations

from math import gcd

from bigplan.kernels.fusion.graph import Argument, KernelNode


class Unfusable(Exception):
    """These operators cannot be one kernel; the message says why."""


def collapsed(
    sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same rows by as few dimensions as their strides allow."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == stride * size:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(size for size, _ in found), tuple(stride for _, stride in found)


LAST = (0, 2, 3, 1)  # dimensions of [n, c, h, w] with the channels last


def channels_moved(node: KernelNode) -> bool:
    """Whether a node is a view of [n, c, h, w] as [n, h, w, c]."""
    return node.op == "permute" and node.arguments.get("dims") == LAST


def together(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The stride of dimensions as one. Raises Unfusable where they are none."""
    if len(sizes) == 1:
        return strides[0]
    _, found = collapsed(sizes, strides)
    if len(found) > 1:
        raise Unfusable("its last dimensions do not lie one behind the other")
    return found[0] if found else 0


def bounds(node: KernelNode, size: int) -> tuple[int, int]:
    """First and past the last of what a slice takes of a dimension of so many."""
    start, end = node.arguments.get("start") or 0, node.arguments.get("end")
    assert isinstance(start, int)
    last = size if not isinstance(end, int) else min(size, end if end >= 0 else end + size)
    return (start if start >= 0 else start + size), last


PARTS = frozenset(("slice", "split", "split_with_sizes"))  # views of a part of one dimension


def part(node: KernelNode, name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Of one of PARTS that reads this shape: the dimension, and first and past the last of `name`.

    A slice has one result; a split has several, one behind the other.
    """
    dim = dimension(node.arguments.get("dim") or 0, len(shape))
    if node.op == "slice":
        return dim, *bounds(node, shape[dim])
    end = 0
    for value in node.outputs:
        start, end = end, end + value.shape[dim]
        if value.name == name:
            return dim, start, end
    raise AssertionError(f"{name} is no result of {node.name}")


def dimension(dim: Argument, count: int) -> int:
    """A dimension's number, counted from the first; -1 is the last of `count`."""
    assert isinstance(dim, int)
    return dim % count


def still(node: KernelNode, shape: tuple[int, ...]) -> bool:
    """Whether a transposition moves only dimensions of size 1."""
    order = list(range(len(shape)))
    if node.op == "permute":
        dims = node.arguments["dims"]
        assert isinstance(dims, tuple)
        order = [dimension(dim, len(shape)) for dim in dims]
    elif len(shape) > 1:
        ends = (0, 1) if node.op == "t" else (node.arguments["dim0"], node.arguments["dim1"])
        a, b = (dimension(dim, len(shape)) for dim in ends)
        order[a], order[b] = order[b], order[a]
    wide = [i for i in order if shape[i] > 1]
    return wide == sorted(wide)


def unit(sizes: list[int]) -> int:
    """The widest piece that all of these columns are whole multiples of."""
    return gcd(*sizes)
