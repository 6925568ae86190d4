"""What Muon computes of a layer: products that make an update of a matrix about orthogonal.

An iteration of X [m, n] with m <= n computes A = X X^T, B = b A + c A A and a X + B X: 4 m^2 n +
2 m^3 FLOPs. It needs whole matrices. Where ZeRO shards a layer, a rank orthogonalises the matrices
that its part of the flat layer has elements of. Of one that tensor-parallel ranks split, each of
them gathers the parts and orthogonalises all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from bigplan.graph.graph import Graph, LayerKind, Tensor
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import local_tensor
from bigplan.mechanics import EXPERTS_AT_ONCE, WIDENED_ELEMENTS
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer, orthogonalised

ELEMENT = 2  # bytes: bf16, whatever the precision of the training
# Bytes that an iteration moves of an element beside its products' own: an addition reads X or A.
ADDED = ELEMENT
# Of an element, once: read for the norm, divided by it. What writes and reads a direction otherwise
# is in ElementSizes.update_bytes.
ONCE = 3 * ELEMENT


def by_muon(kind: LayerKind, model: ModelSpec, optimizer: Optimizer) -> LayerKind:
    """The kind with the tensors that Muon updates, if any."""
    every = {p.name: p for p in model.kinds()[kind.name] if orthogonalised(optimizer, kind.name, p)}
    parts = tuple(t for t in kind.tensors if t.name in every)
    whole = tuple(local_tensor(every[part.name], 1) for part in parts)
    return replace(kind, orthogonalised=parts, directions=whole)


def shape_of(tensor: Tensor) -> tuple[int, int, int]:
    """Matrices side by side in a tensor: their number, their rows and their columns."""
    number = max(1, tensor.experts)
    return number, tensor.rows, tensor.columns // number


def at_once(tensor: Tensor) -> int:
    """Of the matrices in a tensor, how many are orthogonalised together."""
    number, rows, columns = shape_of(tensor)
    return max(1, min(number, EXPERTS_AT_ONCE // (rows * columns)))


def touched(kind: LayerKind, elements: range) -> Iterator[Tensor]:
    """Tensors that Muon updates, of which these elements of the flat layer are some."""
    ends = accumulate(tensor.elements for tensor in kind.tensors)
    for tensor, end in zip(kind.tensors, ends, strict=True):
        if tensor in kind.orthogonalised and (
            max(elements.start, end - tensor.elements) < min(elements.stop, end)
        ):
            yield tensor


@lru_cache(maxsize=256)  # a search prices thousands of strategies
def parts(tensors: tuple[Tensor, ...], owned: int) -> tuple[range, ...]:
    """Parts of a flat layer that have to do the most: one with the first element of each tensor.

    Any other part lies within one tensor. `owned`: elements of each.
    """
    starts = accumulate((tensor.elements for tensor in tensors[:-1]), initial=0)
    first = dict.fromkeys(start // owned * owned for start in starts)
    return tuple(range(start, start + owned) for start in first)


def gathered_elements(part: Tensor, whole: Tensor, tp: int) -> int:
    """Elements that tensor-parallel ranks gather of a tensor; 0: each has all of it."""
    return 0 if part.elements == whole.elements else tp * part.elements


def products(tensors: Sequence[Tensor], steps: int) -> Iterator[Operator]:
    """What orthogonalising these tensors takes, each in `steps` iterations."""
    for tensor in tensors:
        number, rows, columns = shape_of(tensor)
        short, long = min(rows, columns), max(rows, columns)
        batch = at_once(tensor)
        count = steps * -(-number // batch)
        name = f"orthogonalise {tensor.name}"
        yield Gemm(name, short, short, long, batch=batch, count=count)
        yield Gemm(name, short, short, short, batch=batch, count=count)
        yield Gemm(name, short, long, short, batch=batch, count=count)
        added = steps * ADDED * number * (short * short + short * long)
        yield Stream(name, added + ONCE * tensor.elements)


def workspace(graph: Graph) -> int:
    """Bytes that the update of the layer with the most of them makes and drops.

    X and the next X, A and B, and where ZeRO shards layers what all ranks have of one. Of a matrix
    that tensor-parallel ranks split also their parts, and a copy of its own part of the direction.
    Gradients are cast, and directions made, some elements at a time.
    """
    return max(_workspace(graph, kind) for kind in graph.kinds.values())


def _workspace(graph: Graph, kind: LayerKind) -> int:
    if not kind.orthogonalised:
        return 0
    each = []
    for part, tensor in zip(kind.orthogonalised, kind.directions, strict=True):
        _, rows, columns = shape_of(tensor)
        short, long = min(rows, columns), max(rows, columns)
        products_of = 2 * short * long + 2 * short * short
        turned = 3 * short * long  # a result whose transpose is copied, beside what it is of
        each.append(at_once(tensor) * ELEMENT * max(products_of, turned))
        if tensor.experts:  # rows of experts take turns: directions and results of all
            each[-1] += ELEMENT * 2 * tensor.elements
        if gathered := gathered_elements(part, tensor, graph.strategy.tp):
            each[-1] += ELEMENT * (gathered + part.elements)
    shards = graph.strategy.zero_ranks
    of_all = 0 if shards == 1 else ELEMENT * (kind.padded(shards) + kind.owned(shards))
    temporary = 3 * 4 * min(WIDENED_ELEMENTS, kind.parameters)
    return max(each) + of_all + temporary
