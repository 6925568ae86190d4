"""The steps of a block that mixes tokens by a gated delta rule (bigplan/spec/mixers.py).

Products of the residual stream give each token's queries, keys, values and gates, and for each
value head how much of a value is replaced and how far the state fades. Tensor-parallel ranks split
all of it by key heads.
"""

from __future__ import annotations

from bigplan.spec.architecture import Architecture
from bigplan.spec.mixers import DELTA_RULE, OUTPUTS
from bigplan.spec.step import LayerStep, Parameter, StepOp, StepValue, product

QUERIES, KEYS, VALUES, GATES = "delta.q_proj", "delta.k_proj", "delta.v_proj", "delta.z_proj"
RATES, DECAYS = "delta.b_proj", "delta.a_proj"
FILTERS = ("delta.q_conv.weight", "delta.k_conv.weight", "delta.v_conv.weight")
LOG_DECAY, DECAY_OFFSET = "delta.A_log", "delta.dt_bias"
NORM = "delta.norm.weight"
INPUT, OUTPUT = "delta_rule input", "delta_rule output"  # names of the products


def delta_rule(model: Architecture, x: StepValue) -> list[LayerStep]:
    """What makes the heads of x, runs the rule, and leads back."""
    rule = model.delta_rule
    assert rule is not None, model.name
    modules = {
        QUERIES: StepValue("rule's queries", rule.key_heads, rule.key_dim),
        KEYS: StepValue("rule's keys", rule.key_heads, rule.key_dim),
        VALUES: StepValue("rule's values", rule.value_heads, rule.value_dim),
        GATES: StepValue("rule's gates", rule.value_heads, rule.value_dim),
        RATES: StepValue("rates", rule.value_heads),
        DECAYS: StepValue("decays", rule.value_heads),
    }
    read = tuple(modules.values())
    mixed = StepValue("delta rule's values", rule.value_heads, rule.value_dim)
    filters = tuple(
        Parameter(name, (value.columns(), rule.taps), "rows", True, filters=True)
        for name, value in zip(FILTERS, read, strict=False)
    )
    others = (
        Parameter(LOG_DECAY, (rule.value_heads,), "rows", False),
        Parameter(DECAY_OFFSET, (rule.value_heads,), "rows", False),
        Parameter(NORM, (rule.value_dim,), "replicated", False),
    )
    core = LayerStep(StepOp.DELTA_RULE, DELTA_RULE, read, (mixed,), (*filters, *others), saves=read)
    output = {OUTPUTS[DELTA_RULE]: StepValue(OUTPUT, model.hidden, split=False)}
    return [
        product(INPUT, x, modules, bias=False),
        core,
        product(OUTPUT, mixed, output, bias=False),
    ]
