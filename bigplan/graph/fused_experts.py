"""Experts as Transformer Engine's fused grouped MLP runs them in 8 bits (MXFP8, Blackwell).

Counted on transformer_engine/pytorch/ops/fused/grouped_mlp.py (d0067d0): each product of all
experts is one kernel of cuDNN's, which reads the numbers of rows on the GPU. The one by gate and up
computes the activation, too, and writes it in 8 bits, as it is and transposed, beside gate and up,
which the backward reads. The backward's product by down's weight does the same with the gradients
by gate and up. So neither is cast apart. Biases are added there, too, and their gradients read once
what down's products gave.

A step that is one CUDA graph has room for more rows than come. What the backward needs of them is
therefore copied into pages, and back before it (`moe_paged_stash`; Megatron-LM's
docs/user-guide/features/paged_stash.md): rows in 8 bits, gate and up, and the activation in 8 bits.
"""

from __future__ import annotations

from dataclasses import replace

from bigplan.graph.eight_bits import name_of_cast
from bigplan.graph.expert_biases import biases_of
from bigplan.graph.graph import Graph, LayerKind
from bigplan.graph.operators import Attention, Gemm, Operator, Stream
from bigplan.spec.layers import BLOCKS

ACTIVATION = "activation"  # the step between the products
# Bytes of the activation's streams, an element of gate: forward two forms in 8 bits; backward gate
# and up are read and their gradients written so, in place of one gradient in 16 bits.
FUSED_BYTES, FUSED_BACK_BYTES = 2, 4 + 4 - 2


def fusing_experts(graph: Graph, *, mxfp8_attention: bool) -> Graph:
    """The graph whose blocks with experts run them so, with attention in 8 bits or not."""
    changed = {
        name: _fused(kind, mxfp8_attention)
        for name, kind in graph.kinds.items()
        if name in BLOCKS and _grouped(kind.forward)
    }
    return replace(graph, kinds={**graph.kinds, **changed})


def _fused(kind: LayerKind, mxfp8_attention: bool) -> LayerKind:
    up, down = _grouped(kind.forward)
    rows, inner = up.m * up.k, down.m * down.k  # elements of rows, of gate
    stashed = Stream("paged stash", 2 * (rows + 5 * inner), 3)
    forward = {
        ACTIVATION: FUSED_BYTES * inner,
        name_of_cast(down.name): 4 * down.n * down.k * down.groups,  # its weights alone
        biases_of(down.name): 0,
    }
    backward = {
        ACTIVATION: FUSED_BACK_BYTES * inner,
        name_of_cast(up.name): 0,
        biases_of(down.name): 2 * down.m * down.n,
    }
    return replace(
        kind,
        forward=(*_changed(kind.forward, forward, mxfp8_attention), stashed),
        backward=(*_changed(kind.backward, backward, mxfp8_attention), stashed),
        waits=False,
        in_turn=False,
    )


def _grouped(operators: tuple[Operator, ...]) -> tuple[Gemm, ...]:
    """The products of experts, those by gate and up as one."""
    return tuple(one for one in operators if isinstance(one, Gemm) and one.groups > 1)


def _changed(
    operators: tuple[Operator, ...], moved: dict[str, int], mxfp8_attention: bool
) -> tuple[Operator, ...]:
    """The operators, with products of experts in one launch and streams of other bytes."""

    def changed(one: Operator) -> Operator:
        if isinstance(one, Gemm):
            return replace(one, apart=False)
        if isinstance(one, Attention):
            return replace(one, fp8=mxfp8_attention)
        if isinstance(one, Stream) and one.name in moved:
            return replace(one, nbytes=moved[one.name])
        return one

    return tuple(changed(one) for one in operators)
