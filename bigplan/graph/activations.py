"""Bytes of activations that one rank keeps between a layer's forward and its backward.

The runtime's blocks are written so that these formulas are exact (bigplan/runtime/blocks.py);
tests/graph/test_activations.py measures what autograd saves and compares to the byte.
"""

from __future__ import annotations

from bigplan.spec.model import ModelSpec

STATISTIC = 4  # norm and softmax statistics are fp32 in every precision


def boundary_bytes(model: ModelSpec, tokens: int, element_size: int) -> int:
    """Bytes of a block's input, [tokens, hidden]: all that full recomputation keeps.

    Every tensor-parallel rank holds all of it.
    """
    return tokens * model.hidden * element_size


def block_saved_bytes(
    model: ModelSpec,
    tokens: int,
    sequence_length: int,
    element_size: int,
    tensor_parallel: int = 1,
    expanded_kv: bool = False,
) -> int:
    """Bytes that autograd saves for one block and `tokens` tokens, each storage counted once.

    Parameters and the rope tables, which all blocks share, are not counted. The block's input is
    (its first norm saves it); its output is not, which is the next layer's input. So the sum over
    layers counts each once. With T tokens, hidden h, heads a, kv heads k, head width d, MLP width
    f, e bytes an element and t-way tensor parallelism:

        saved by              tensor                    bytes
        input norm            block input [T, h]        T h e        (= boundary_bytes)
        input norm            rstd [T, 1]               4 T          (LayerNorm: mean too, 8 T)
        q, k, v projections   normed input [T, h]       T h e
        q, k norm (qk_norm)   projections               T (a + k) d e / t
        q, k norm (qk_norm)   rstd                      4 T (a + k) / t
        attention             rotated q, k, and v       T (a + 2 k) d e / t
        attention, o_proj     attention output [T, a d] T a d e / t  (one storage, saved by both)
        attention             logsumexp [T, a]          4 T a / t
        post norm             residual stream [T, h]    T h e
        post norm             rstd [T, 1]               4 T          (LayerNorm: 8 T)
        gate, up projections  normed [T, h]             T h e
        SwiGLU                gate, up [T, f]           2 T f e / t  (GELU: its input, T f e / t)
        down projection       SwiGLU's output [T, f]    T f e / t

    Attention is flash attention: nothing grows with sequence_length squared, and
    `sequence_length` must only divide `tokens`. Kv heads that t does not divide are replicated.
    `expanded_kv`: k and v are saved once for each query head, which fp32 on CUDA needs (its only
    fused kernel there has no grouped heads). LayerNorm and GELU models are not executed natively;
    for them the table holds plain torch operators.
    """
    assert tokens % sequence_length == 0, (tokens, sequence_length)
    heads = model.heads // tensor_parallel
    kv_heads = heads if expanded_kv else -(-model.kv_heads // tensor_parallel)
    ffn = model.ffn // tensor_parallel
    norm_statistics = 2 if model.norm == "layernorm" else 1
    attention = (2 * heads + 2 * kv_heads) * model.head_dim
    mlp = (3 if model.mlp == "swiglu" else 2) * ffn
    elements = 4 * model.hidden + attention + mlp
    statistics = 2 * norm_statistics + heads
    if model.qk_norm:
        normed_heads = heads + -(-model.kv_heads // tensor_parallel)
        elements += normed_heads * model.head_dim
        statistics += normed_heads
    return tokens * (elements * element_size + statistics * STATISTIC)
