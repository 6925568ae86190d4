"""The steps of a block that make heads of latents (bigplan/spec/latent.py).

Every tensor-parallel rank has the matrices that give latents whole, and makes those of the tokens
that it has. Matrices that lead from latents to heads are split by heads.
"""

from __future__ import annotations

from dataclasses import replace

from bigplan.spec.architecture import Architecture
from bigplan.spec.step import LayerStep, Parameter, StepOp, StepValue, product, whole_product

LATENTS = "latents"  # the product that gives them
HEADS = "key, value"  # the product that makes heads of one
KEYS = "keys"  # puts a head's plain columns and the shared ones together


def latent_heads(
    model: Architecture, x: StepValue
) -> tuple[list[LayerStep], tuple[StepValue, StepValue, StepValue]]:
    """What makes queries, keys and values of x, and these three."""
    latent = model.latent_attention
    assert latent is not None, model.name
    queries = StepValue("queries", model.heads, latent.head_dim)
    values = StepValue("values", model.heads, latent.value_dim)
    plain = StepValue("plain keys", model.heads, latent.plain_dim)
    pair = StepValue("key-value latent", latent.kv_rank, split=False)
    shared = StepValue("rope key", latent.rope_dim, split=False)
    if latent.query_rank is None:
        of_x, of_latent = [product("query", x, {"q_proj": queries}, bias=False)], []
        narrow = {"kv_a_proj": pair, "k_rope_proj": shared}
    else:
        own = StepValue("query latent", latent.query_rank, split=False)
        norm = _norm("q_a_norm", own)
        of_x = []
        of_latent = [norm, product("query", norm.gives[0], {"q_b_proj": queries}, bias=False)]
        narrow = {"q_a_proj": own, "kv_a_proj": pair, "k_rope_proj": shared}
    norm = _norm("kv_a_norm", pair)
    modules = {"k_b_proj": plain, "v_b_proj": values}
    # Little work for their bytes, since a latent is narrow: cheap to make again.
    both = replace(product(HEADS, norm.gives[0], modules, bias=False), cheap=True)
    turned = queries._replace(name="turned queries")
    keys = turned._replace(name="keys")
    rope = LayerStep(StepOp.ROTARY, "rotary embedding", (queries,), (turned,))
    join = LayerStep(StepOp.ROTARY, KEYS, (plain, shared), (keys,), cheap=True)
    steps = [*of_x, whole_product(LATENTS, x, narrow), *of_latent, norm, both, rope, join]
    return steps, (turned, keys, values)


def _norm(module: str, x: StepValue) -> LayerStep:
    """The RMSNorm of a latent."""
    return LayerStep(
        StepOp.NORM,
        f"norm of {x.name}",
        (x,),
        (x._replace(name=f"normed {x.name}"),),
        (Parameter(f"{module}.weight", (x.parts,), "replicated", False),),
        saves=(x,),
        statistics=(StepValue(f"scales of {x.name}", 1, split=False),),
        cheap=True,
    )
