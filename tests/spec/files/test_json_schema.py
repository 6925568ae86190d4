"""What the JSON Schema accepts, planning accepts, but for rules that join several fields."""

import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from bigplan.errors import InputError
from bigplan.spec.cluster import Cluster, Host, NodeGroup, Nvme, Pcie, Running
from bigplan.spec.experiment import Experiment, LaunchSpec
from bigplan.spec.files.document import validate
from bigplan.spec.files.json_schema import json_schema
from bigplan.spec.gpu import Gpu
from bigplan.spec.link import GpuLink, Network
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer, ParameterGroup
from bigplan.spec.part import MachinePart
from bigplan.spec.rope_scaling import RopeScaling
from bigplan.spec.schedule import Schedule
from bigplan.spec.sweep import Find
from bigplan.spec.training import LossScale, TrainingRequest, ValidationSpec
from tests.examples import examples

# Rules between fields, names of what is shipped, and figures that no machine has: a schema of JSON
# has no words for them. Each is a part of what is told.
_OPTIMIZER = ("has no", "are of adamw", "round the first moment")
_ROPE = (
    *("exceeds `beta_fast`", "needs `", "is above", "divide frequencies"),
    *("but rope turns", "is of yarn", "but queries grow"),
)
BETWEEN_FIELDS: dict[type[BaseModel], tuple[str, ...]] = {
    ModelSpec: (
        "is not a multiple of",
        "but `positions` is",
        "but rope rotates pairs",
        *_ROPE,
        *("`attention_pattern` ", "are of rope", "whose norms stand before"),
        *("added as they are", "without `parallel_residual`", "without `qk_norm`"),
        "with `tied_embeddings`",
        *("without `attention_pattern`", "which are not scaled", "have their own form"),
        *("with `latent_attention`", "`latent_attention` with", "wider than keys"),
        *("without `experts`", "must be from 1 to `experts`", "but experts are swiglu"),
        *("must divide `experts`", "must hold `experts_per_token`", "leaves no block"),
        *("whose norms have weights", "attention within chunks", "blocks in which rope turns"),
        *("makes all blocks alike", "which says too what", "the MLP of blocks without"),
        *(
            "balances a softmax",
            "whose inputs are weighed",
            "the MLP that it gates",
            "width of their MLP",
        ),
        *("of five numbers", "is below `least_step`", "write runs of blocks", "is of proportional"),
        *("blocks all have a `state_space`", "is of `qk_norm` of each head"),
        *("which blocks with it do not have", "by which values differ from keys"),
        *("of one MLP in every block", "without local and global blocks", "MLPs have neither"),
    ),
    RopeScaling: _ROPE,
    Optimizer: _OPTIMIZER,
    Schedule: ("how a rate decays", "leaves no step"),
    TrainingRequest: (*_OPTIMIZER, "how a rate decays", "leaves no step", "tokens_per_step` is "),
    Find: ("there is none",),
    Experiment: ("add training.tokens", "too little for any tensor"),
    Gpu: ("for which",),
}
OF_BLOCKS = ("which no machine has", "no source for", "leaves nothing of")
DESCRIPTIONS = (
    *(ModelSpec, RopeScaling, TrainingRequest, Optimizer, ParameterGroup, Schedule, LossScale),
    *(ValidationSpec, LaunchSpec, Find, Gpu, Host, Pcie, Nvme, GpuLink, Network, Running),
)
Schema = Mapping[str, Any]
TEXT = st.text("abz 0.", max_size=8)


def values_of(schema: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    """Values that the schema accepts; every keyword that it has is heeded, or the test fails."""
    if "$ref" in schema:
        return values_of(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return st.one_of([values_of(each, defs) for each in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    made = _OF_TYPE.get(schema.get("type", ""))
    if made is not None:
        return made(schema, defs)
    assert not schema.keys() - {"title", "description", "default"}, schema
    return st.none() | st.booleans() | TEXT


def _arrays(schema: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    items = values_of(schema["items"], defs)
    return st.lists(items, min_size=schema.get("minItems", 0), max_size=2)


def _texts(schema: Schema, _: Schema) -> st.SearchStrategy[Any]:
    pattern = schema.get("pattern")
    if pattern is None:
        return TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))
    return st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True)


def _integers(schema: Schema, _: Schema) -> st.SearchStrategy[Any]:
    low = schema.get("minimum", -(10**6))
    low = max(low, schema.get("exclusiveMinimum", low - 1) + 1)
    return st.integers(low, schema.get("maximum", 10**6))


def _numbers(schema: Schema, _: Schema) -> st.SearchStrategy[float]:
    low = float(schema.get("exclusiveMinimum", schema.get("minimum", -1e6)))
    high = min(9e29, float(schema.get("exclusiveMaximum", schema.get("maximum", 1e6))))
    return st.floats(
        low,
        high,
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
        allow_subnormal=False,
    )


def _objects(schema: Schema, defs: Schema) -> st.SearchStrategy[Any]:
    properties = schema.get("properties")
    if properties is None:
        keys = values_of(schema["propertyNames"], defs) if "propertyNames" in schema else TEXT
        values = values_of(schema["additionalProperties"], defs)
        least = schema.get("minProperties", 0)
        return st.dictionaries(keys, values, min_size=least, max_size=max(least, 2))
    each = {key: values_of(value, defs) for key, value in properties.items()}
    required = {key: each.pop(key) for key in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=each)


_OF_TYPE = {
    "object": _objects,
    "array": _arrays,
    "string": _texts,
    "integer": _integers,
    "number": _numbers,
    "boolean": lambda *_: st.booleans(),
    "null": lambda *_: st.none(),
}


def sourced(description: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """A part of a machine with a source for each of its numbers."""
    if not issubclass(description, MachinePart):
        return data
    named = {"sources", "name", "device", "path"}
    stated = (key for key, value in data.items() if key not in named and value is not None)
    return data | {"sources": dict.fromkeys(stated, "test")}


def told_of(description: type[BaseModel], data: dict[str, Any]) -> str:
    """What reading a file of it tells, each line of it; nothing where it is accepted."""
    try:
        validate(data, description, "file")
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_what_the_schema_accepts_is_read(description: type[BaseModel]) -> None:
    schema = json_schema(description)
    checker = jsonschema.Draft202012Validator(schema)
    checker.check_schema(schema)
    rules = BETWEEN_FIELDS.get(description, ()) + OF_BLOCKS * issubclass(description, MachinePart)
    accepted = 0

    @settings(
        max_examples=examples(25),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=[Phase.generate],  # made smaller, an example of thirty fields takes minutes
    )
    @given(values_of(schema, schema.get("$defs", {})))
    def check(data: dict[str, Any]) -> None:
        nonlocal accepted
        checker.validate(data)
        told = told_of(description, sourced(description, data))
        for line in told.splitlines():
            assert any(rule in line for rule in rules), (line, data)
        accepted += not told

    check()
    assert accepted or rules  # rules between fields may hold for none of so few


@pytest.mark.parametrize(
    ("description", "data"),
    [
        (Host, {"memory": "-1 GiB"}),
        (Host, {"memory": "80 Gib"}),
        (Host, {"memory": "0 GiB"}),
        (Host, {"memory": 0}),
        (Host, {"memory": 10**31}),
        (GpuLink, {"bandwidth": "25"}),
        (GpuLink, {"bandwidth": "0.0e3 GB/s"}),
        (Experiment, {"within": "3 weeks"}),
        (Experiment, {"hardware": {"nodes": 4}}),
        (Experiment, {"hardware": {"nvme.drive": 4}}),
        (NodeGroup, {"gpu": "h1000"}),
        (TrainingRequest, {"tokens_per_step": 10**10}),
        (TrainingRequest, {"tokens": "12"}),
    ],
)
def test_what_planning_refuses_the_schema_refuses(
    description: type[BaseModel], data: dict[str, Any]
) -> None:
    schema = json_schema(description)
    checker = jsonschema.Draft202012Validator({**schema, "required": []})
    assert not checker.is_valid(data)
    (key,) = data
    told = told_of(description, data)
    assert f"`{key}" in told, told


@pytest.mark.parametrize("size", ["80 GiB", "0.5TB", "85899345920", 2**40, 2**40 * 1.0])
def test_sizes(size: object) -> None:
    """A whole number may be written as a float, as JSON does not tell them apart."""
    schema = {**json_schema(Host), "required": []}
    good = size != "85899345920"  # text has a unit
    assert jsonschema.Draft202012Validator(schema).is_valid({"memory": size}) is good
    assert ("`memory`" in told_of(Host, {"memory": size})) is not good


def test_shipped_clusters_keep_to_it() -> None:
    from bigplan.spec.catalog import find_cluster, list_clusters

    checker = jsonschema.Draft202012Validator(json_schema(Cluster))
    for name in list_clusters():
        checker.validate(find_cluster(name).model_dump(mode="json", exclude_none=True))


def test_single_figures_of_a_part_are_as_good_as_all_beside_like() -> None:
    group = {"like": "dgx-h100", "host": {"cores": 16}, "gpu": {"memory": "48 GiB"}}
    data = {"name": "lab", "node_groups": [group]}
    checked = jsonschema.Draft202012Validator(json_schema(Cluster))
    assert checked.is_valid(data)
    assert not checked.is_valid({"name": "lab", "node_groups": [group | {"host": {"cores": "x"}}]})
    assert not checked.is_valid({"name": "lab", "node_groups": [{"host": {"cores": 16}}]})
