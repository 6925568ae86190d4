"""Blocks of other tools whose products have a precision that the native runtime does not train in.

Frozen products in 8 bits beside adapters: weights were cast once and stay so (`fp8_params` of
NVIDIA's MLPerf runs). Forward and backward cast what they multiply them by, without a transpose, as
no weight has a gradient: 2 bytes of an element are read and 1 is written.

NVFP4 as Transformer Engine's recipe has it (`NVFP4BlockScaling` of common/recipe): all three
products of a linear layer are in 4 bits. Each tensor has a scale in fp32, so its largest value is
looked for first (2 bytes read); then both directions are cast from 16 bits (2 bytes read, twice
half a byte and a scale of 8 bits for 16 elements written). Random Hadamard transforms and
stochastic rounding are part of that cast's kernel. Attention and the head stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bigplan.graph.adapters import adapters_of
from bigplan.graph.eight_bits import LAUNCHES, name_of_cast
from bigplan.graph.graph import Graph
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.spec.layers import BLOCKS

# Bytes that a cast moves for an element.
CAST_ONCE = 2 + 1  # to 8 bits, without a transpose
CAST_TO_FP4 = 2 + 2 + 2 * (1 / 2 + 1 / 16)  # two reads; in each direction codes and scales
CAST_TO_FP8 = 4, 6  # as `casts` of eight_bits.py has them, known scales or not


def frozen_in_fp8(graph: Graph) -> Graph:
    """The graph where frozen products of blocks are in 8 bits, and adapters' are not."""

    def narrowed(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        found: list[Operator] = []
        for one in operators:
            if not isinstance(one, Gemm) or adapters_of("") in one.name:
                found.append(one)
                continue
            cast = Stream(name_of_cast(one.name), CAST_ONCE * one.m * one.k, one.launches)
            found += [replace(one, fp8=True), cast]
        return tuple(found)

    return _of_blocks(graph, narrowed)


def in_fp4(graph: Graph, *, looks_first: bool) -> Graph:
    """The graph where products of blocks that are in 8 bits are in NVFP4.

    `looks_first`: the casts to 8 bits were priced with a look for the largest value.
    """
    of_eight = CAST_TO_FP8[looks_first]

    def narrow(one: Operator) -> Operator:
        if isinstance(one, Gemm) and one.fp8:
            return replace(one, fp8=False, fp4=True)
        if isinstance(one, Stream) and one.name.endswith(name_of_cast("")):
            launches = one.launches * (1 if looks_first else LAUNCHES)
            return replace(one, nbytes=one.nbytes * CAST_TO_FP4 / of_eight, launches=launches)
        return one

    return _of_blocks(graph, lambda operators: tuple(map(narrow, operators)))


def _of_blocks(
    graph: Graph, change: Callable[[tuple[Operator, ...]], tuple[Operator, ...]]
) -> Graph:
    kinds = dict(graph.kinds)
    for name, kind in graph.kinds.items():
        if name not in BLOCKS:
            continue
        reruns = {k: v._replace(operators=change(v.operators)) for k, v in kind.reruns.items()}
        forward, backward = change(kind.forward), change(kind.backward)
        kinds[name] = replace(kind, forward=forward, backward=backward, reruns=reruns)
    return replace(graph, kinds=kinds)
