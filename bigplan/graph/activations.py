"""Bytes of activations that one rank keeps between a layer's forward and its backward.

The runtime's blocks are written so that these formulas are exact (bigplan/runtime/blocks.py);
tests/graph/test_activations.py measures what autograd saves and compares to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.spec.model import ModelSpec

MLP_WIDTHS = {"swiglu": 3, "gelu": 2, "gelu_tanh": 2, "relu": 1}  # tensors of width ffn saved
STATISTIC = 4  # norm and softmax statistics are fp32 in every precision


def boundary_bytes(model: ModelSpec, tokens: int, element_size: int) -> int:
    """Bytes of a block's input, [tokens, hidden]: all that full recomputation keeps.

    Every tensor-parallel rank holds all of it.
    """
    return tokens * model.hidden * element_size


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What decides the bytes that one rank saves for one block."""

    tokens: int
    sequence_length: int
    element_size: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expanded_kv: bool = False  # k and v are repeated for every query head
    materialised: bool = False  # attention scores are written to memory
    dropout: bool = False

    def __post_init__(self) -> None:
        assert self.tokens % self.sequence_length == 0, (self.tokens, self.sequence_length)


def score_bytes(model: ModelSpec, shape: BlockShape) -> int:
    """Bytes saved of materialised attention scores: a s per token; 0 for flash attention.

    The softmax's output, and with dropout its mask of one byte and what it lets through: 5 a s
    bytes a token in 16 bits (arXiv 2205.05198, section 4.1).
    """
    if not shape.materialised:
        return 0
    per_score = shape.element_size + (1 + shape.element_size if shape.dropout else 0)
    heads = model.heads // shape.tensor_parallel
    return shape.tokens * shape.sequence_length * heads * per_score


def block_saved_bytes(model: ModelSpec, shape: BlockShape) -> int:
    """Bytes that autograd saves for one block and `tokens` tokens, each storage counted once.

    Parameters and the rope tables, which all blocks share, are not counted. The block's input is
    (its first norm saves it); its output is not, which is the next layer's input. So the sum over
    layers counts each once. With T tokens, hidden h, heads a, kv heads k, head width d, MLP width
    f, e bytes an element, t-way tensor parallelism and p = t with sequence parallelism, else 1:

        saved by              tensor                    bytes
        input norm            block input [T, h]        T h e / p    (= boundary_bytes)
        input norm            rstd [T, 1]               4 T / p      (LayerNorm: mean too, 8 T)
        q, k, v projections   normed input [T, h]       T h e / p
        q, k norm (qk_norm)   projections               T (a + k) d e / t
        q, k norm (qk_norm)   rstd                      4 T (a + k) / t
        attention             rotated q, k, and v       T (a + 2 k) d e / t
        attention, o_proj     attention output [T, a d] T a d e / t  (one storage, saved by both)
        attention             logsumexp [T, a]          4 T a / t    (materialised: score_bytes)
        post norm             residual stream [T, h]    T h e / p
        post norm             rstd [T, 1]               4 T / p      (LayerNorm: 8 T)
        gate, up projections  normed [T, h]             T h e / p
        SwiGLU                gate, up [T, f]           2 T f e / t  (GELU: its input, T f e / t)
        down projection       SwiGLU's output [T, f]    T f e / t    (ReLU saves nothing but this)
        dropout, twice        masks [T, h]              2 T h / p

    Kv heads that t does not divide are replicated.
    """
    ways = shape.tensor_parallel
    sequence_ways = ways if shape.sequence_parallel else 1
    heads = model.heads // ways
    kv_heads = heads if shape.expanded_kv else -(-model.kv_heads // ways)
    attention = (2 * heads + 2 * kv_heads) * model.head_dim
    elements = attention + MLP_WIDTHS[model.mlp] * (model.ffn // ways)
    statistics = 0 if shape.materialised else heads
    if model.qk_norm:
        normed_heads = heads + -(-model.kv_heads // ways)
        elements += normed_heads * model.head_dim
        statistics += normed_heads
    norms = 2 * (2 if model.norm == "layernorm" else 1) * STATISTIC
    split = 4 * model.hidden * shape.element_size + norms + (2 * model.hidden * shape.dropout)
    per_token = elements * shape.element_size + statistics * STATISTIC
    return (
        shape.tokens * per_token + shape.tokens * split // sequence_ways + score_bytes(model, shape)
    )
