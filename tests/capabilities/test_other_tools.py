"""For which models plans are made for other tools."""

from __future__ import annotations

import pytest

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec


def _model(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(find_model("tiny-llama-test").model_dump() | changes)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scores": "sparsemixer"}, "routing.scores sparsemixer"),
        ({"bias": True, "bias_of": "scores", "scores": "sigmoid"}, "routing.bias_of scores"),
        ({"bias": True}, "routing.bias beside softmax"),
        ({"score_scale": 0.5}, "routing.score_scale"),
        ({"expert_scales": True}, "routing.expert_scales"),
    ],
)
def test_routers_that_megatron_has_not(fields: dict[str, object], told: str) -> None:
    experts = {"experts": 8, "experts_per_token": 2, "router_normalised": False}
    assert other_tools_refusal(_model(**experts), None, "megatron") is None
    why = other_tools_refusal(_model(**experts, routing=fields), None, "megatron")
    assert f"models with {told} for its own runtime alone" in (why or "")


def test_queries_of_latents_that_grow_are_ours_alone() -> None:
    model = find_model("deepseek-v3")
    scaling = model.rope_scaling
    assert scaling is not None
    grown = scaling.model_copy(update={"query_growth": 0.1})
    why = other_tools_refusal(model.model_copy(update={"rope_scaling": grown}), None, "megatron")
    assert other_tools_refusal(model, None, "megatron") is None
    assert "models with rope_scaling.query_growth" in (why or "")
