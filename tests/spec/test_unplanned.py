import pytest

from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.experiment import Experiment
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.spec.unplanned import unplanned


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("context-parallel-size", "context parallelism"),
        ("expert_parallel", "expert parallelism"),
        ("num_local_experts", "experts of other kinds"),
        ("moe_layers", "experts of other kinds"),
        ("qlora", "adapters"),
        ("adapter_rank", "adapters"),
    ],
)
def test_words_of_users(word: str, what: str) -> None:
    refusal = unplanned(word)
    assert refusal
    assert refusal.startswith(what)
    assert "; " in refusal  # says what to do


def test_no_key_that_is_planned_is_refused() -> None:
    keys = {
        key
        for spec in (ModelSpec, Training, Experiment, Cluster, NodeGroup)
        for key in spec.model_fields
    }
    assert not {key for key in keys if unplanned(key)}
    assert unplanned("cp") is None
    assert unplanned("exploration") is None  # "lora" is a part of it
