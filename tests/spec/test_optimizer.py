"""Which constants a parameter gets, and groups that catch nothing."""

from __future__ import annotations

import pytest

from bigplan.errors import InputError
from bigplan.graph.build import element_sizes
from bigplan.spec.catalog import find_model
from bigplan.spec.files.document import parse_document
from bigplan.spec.optimizer import Optimizer, ParameterGroup, ParameterRule, check_groups, rules
from bigplan.spec.training import Training, TrainingRequest, resolve

MODEL = find_model("tiny-llama-test")


def _optimizer(*groups: dict[str, object], **changes: object) -> Optimizer:
    return Optimizer.model_validate({"groups": groups, **changes})


def test_matrices_decay_and_norms_do_not() -> None:
    block = rules(Optimizer(), MODEL, 1)
    assert block["q_proj.weight"] == ParameterRule(0.1, 1.0)
    assert block["input_norm.weight"] == ParameterRule(0.0, 1.0)
    assert rules(Optimizer(), MODEL, 0) == {"embed_tokens.weight": ParameterRule(0.1, 1.0)}


def test_the_first_group_that_matches_counts() -> None:
    optimizer = _optimizer(
        {"match": "layers.0.q_proj.weight", "learning_rate_factor": 0.5},
        {"match": "layers.*.q_proj.*", "weight_decay": 0.3},
        {"match": "*norm.weight", "weight_decay": 0.2, "learning_rate_factor": 2.0},
    )
    first, second = rules(optimizer, MODEL, 1), rules(optimizer, MODEL, 2)
    assert first["q_proj.weight"] == ParameterRule(0.1, 0.5)  # the group says nothing of decay
    assert second["q_proj.weight"] == ParameterRule(0.3, 1.0)
    assert first["input_norm.weight"] == ParameterRule(0.2, 2.0)
    assert first["k_proj.weight"] == ParameterRule(0.1, 1.0)
    assert rules(optimizer, MODEL, MODEL.layers + 1)["norm.weight"] == ParameterRule(0.2, 2.0)
    check_groups(optimizer, MODEL)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            "[{match: layers.*.input_nrom.weight}]",
            "groups[0] matches 'layers.*.input_nrom.weight', but tiny-llama-test has no such "
            "parameter; did you mean 'layers.*.input_norm.weight'?",
        ),
        ("[{match: '*norm*'}, {match: layers.99.*}]", "groups[1] matches 'layers.99.*'"),
        (
            "[{match: '*norm*'}, {match: layers.0.input_norm.weight}]",
            "groups before it have all of these parameters, and the first match counts",
        ),
        ("[{match: '*', weight_decay: -1}]", "must be at least 0"),
        ("[{glob: '*'}]", "match"),
    ],
)
def test_groups_that_catch_nothing_are_named(groups: str, message: str) -> None:
    text = f"optimizer: {{groups: {groups}}}"
    with pytest.raises(InputError) as error:
        resolve(parse_document(text, TrainingRequest, "t.yaml"), MODEL)
    assert message in str(error.value)


def test_groups_survive_the_request() -> None:
    text = "optimizer: {name: sgd, groups: [{match: '*norm*', weight_decay: 0.5}]}"
    optimizer = resolve(parse_document(text, TrainingRequest), MODEL).optimizer
    assert optimizer.groups == (ParameterGroup(match="*norm*", weight_decay=0.5),)
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: sgd, beta1: 0.5, epsilon: 1e-3}", "sgd has no beta1, epsilon"),
        ("{momentum: 0.5}", "adamw has no momentum"),
        ("{name: sgd, momentum: 1.0}", "must be less than 1"),
    ],
)
def test_constants_of_the_other_optimizer_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_document(f"optimizer: {text}", TrainingRequest)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("optimizer", "precision", "state", "update"),
    [
        ({}, "bf16", 12, 30),
        ({}, "fp32", 8, 28),
        ({"name": "sgd"}, "fp16", 8, 22),
        ({"name": "sgd"}, "fp32", 4, 20),
        ({"name": "sgd", "momentum": 0.0}, "bf16", 4, 14),
        ({"name": "sgd", "momentum": 0.0}, "fp32", 0, 12),
    ],
)
def test_state_and_traffic_per_element(
    optimizer: dict[str, object], precision: str, state: int, update: int
) -> None:
    fields = {"sequence_length": 8, "global_batch": 1, "precision": precision}
    sizes = element_sizes(Training.model_validate({**fields, "optimizer": optimizer}))
    assert (sizes.state, sizes.update_bytes) == (state, update)
