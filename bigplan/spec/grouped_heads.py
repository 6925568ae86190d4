"""The steps of a block that make grouped heads: queries, keys and values, normed and turned."""

from __future__ import annotations

from bigplan.spec.architecture import Architecture
from bigplan.spec.step import LayerStep, Parameter, StepOp, StepValue, product


def grouped_heads(
    model: Architecture, x: StepValue
) -> tuple[list[LayerStep], tuple[StepValue, StepValue, StepValue]]:
    """What makes queries, keys and values of x; they may be normed, queries and keys turned."""
    queries = StepValue("queries", model.heads, model.head_dim)
    keys = StepValue("keys", model.kv_heads, model.head_dim, repeats=True)
    values = keys._replace(name="values")
    if model.keys_given:
        return _queries_alone(model, x, queries, (keys, values))
    gate = {"q_gate_proj": queries._replace(name="attention's gate")}
    if model.gate_of_heads:
        gate = {"q_gate_proj": StepValue("attention's gate", model.heads)}
    others = {"k_proj": keys} if model.keys_as_values else {"k_proj": keys, "v_proj": values}
    modules = {"q_proj": queries, **(gate if model.attention_gate else {}), **others}
    steps = [product("query, key, value", x, modules, bias=model.qkv_bias)]
    if model.value_norm:  # keys that are values are so before their own norm
        given = keys if model.keys_as_values else values
        values = values._replace(name="normed values")
        steps.append(_norm_of_heads(model, given, values))
    ways = (_norms_of_heads, _rotary)
    for way in reversed(ways) if model.qk_norm_turned else ways:
        more = way(model, (queries, keys))
        if more:
            queries, keys = (value for step in more for value in step.gives)
        steps += more
    return steps, (queries, keys, values)


def _queries_alone(
    model: Architecture, x: StepValue, queries: StepValue, kept: tuple[StepValue, StepValue]
) -> tuple[list[LayerStep], tuple[StepValue, StepValue, StepValue]]:
    """What makes queries alone of x, where keys and values are those that another block `kept`."""
    steps = [product("query", x, {"q_proj": queries}, bias=model.qkv_bias)]
    steps += _norms_of_heads(model, (queries,))
    steps += _rotary(model, (steps[-1].gives[0],))
    return steps, (steps[-1].gives[0], *kept)


def _norms_of_heads(model: Architecture, heads: tuple[StepValue, ...]) -> list[LayerStep]:
    """Those of queries and keys, where the model has them."""
    if not model.qk_norm:
        return []
    modules = ("q_norm", "k_norm") if model.weightless_norms == "none" else ("", "")
    return [
        _norm_of_heads(model, x, x._replace(name=f"normed {x.name}"), module)
        for x, module in zip(heads, modules, strict=False)  # queries may be alone
    ]


def _rotary(model: Architecture, heads: tuple[StepValue, ...]) -> list[LayerStep]:
    """What turns queries and keys by their positions, where the model has it."""
    if model.positions != "rope":
        return []
    turned = tuple(one._replace(name=f"turned {one.name}") for one in heads)
    return [LayerStep(StepOp.ROTARY, "rotary embedding", heads, turned)]


def _norm_of_heads(
    model: Architecture, x: StepValue, given: StepValue, module: str = ""
) -> LayerStep:
    """An RMSNorm on each head of queries, keys or values; without a `module` it has no weights.

    One of all queries or all keys together has as many weights. Ranks that have some heads each
    then have these heads' part of them.
    """
    weight = Parameter(f"{module}.weight", (model.head_dim,), "replicated", False)
    name = given.name.removeprefix("normed ")
    scales = StepValue(f"scales of {name}", x.parts)
    if model.qk_norm_whole:
        heads = x.parts if x.repeats else 0
        weight = Parameter(weight.name, (x.columns(),), "rows", False, heads)
        scales = StepValue(scales.name, 1, split=False, whole=True)
    return LayerStep(
        StepOp.NORM,
        f"norm of {name}",
        (x,),
        (given,),
        (weight,) if module else (),
        saves=(x,),
        statistics=(scales,),
    )
