"""Steps of experts: a router, the rows that it sends, and the matrices of all experts together."""

from __future__ import annotations

from typing import cast

from bigplan.spec.architecture import Architecture
from bigplan.spec.step import TERMS, LayerStep, Parameter, Split, StepOp, StepValue

ROUTER = "router.weight"  # which chooses experts
ROUTER_BIAS = "router.bias"  # a constant that is added to shares
SCORE_BIAS = "router_scores.bias"
EXPERT_SCALES = "router_weights.scale"


def routing(model: Architecture, x: StepValue, by: StepValue) -> list[LayerStep]:
    """Scores of experts, and the rows that are sent to those chosen, with their weights."""
    each = model.experts_per_token
    scores = StepValue("router scores", model.experts, split=False, whole=True)
    routers = [Parameter(ROUTER, (model.experts, model.hidden), "replicated", True)]
    if model.routed_by.score_bias:
        routers.append(Parameter(SCORE_BIAS, (model.experts,), "replicated", False))
    sent = StepValue("sent", model.expert_width, each, split=False, whole=True)
    weights = StepValue("router weights", 1, each, split=False, whole=True)
    places = tuple(weights._replace(name=name) for name in ("chosen experts", "order of rows"))
    own = []
    if model.routed_by.bias:
        shape = (TERMS, model.experts)
        own.append(Parameter(ROUTER_BIAS, shape, "replicated", False, constant=True))
    if model.routed_by.expert_scales:
        own.append(Parameter(EXPERT_SCALES, (model.experts,), "replicated", False))
        places += (weights._replace(name="weights before their scales"),)
    in_fp32 = model.routed_by.scores == "sigmoid"
    route = LayerStep(
        StepOp.ROUTE,
        "route",
        (x, scores),
        (sent, weights),
        tuple(own),
        saves=(x,) if in_fp32 else (x, scores),
        statistics=(weights, *places, scores) if in_fp32 else (weights, *places),
    )
    router = LayerStep(StepOp.PRODUCT, "router", (by,), (scores,), tuple(routers), saves=(by,))
    return [router, route]


def of_experts(model: Architecture, *modules: str) -> tuple[Parameter, ...]:
    """One matrix of all experts for each module, and then their biases."""
    shape = (model.ffn * model.experts, model.expert_width)
    found = [
        Parameter(f"experts.{module}.weight", shape, "rows", True, experts=model.experts)
        for module in modules
    ]
    if model.mlp_bias:
        down = modules == ("down_proj",)
        rows, split = (model.hidden, "columns") if down else (model.ffn, "rows")
        found += [
            Parameter(f"experts.{module}.bias", (rows, model.experts), cast(Split, split), False)
            for module in modules
        ]
    return tuple(found)
