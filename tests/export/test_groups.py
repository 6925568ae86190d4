"""Zero groups as other tools take them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bigplan.engines import make_plan
from bigplan.export import TOOLS
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.files.document import load_data
from bigplan.spec.training import Training
from tests.engines.deepspeed.test_search import Settings
from tests.export.test_tools import one_file, options

TWO = find_cluster("hgx-h200").with_nodes(2)
REQUEST = Request(
    find_model("llama-like-5.5b"), Training(sequence_length=4096, global_batch=32), TWO
)


def planned(engine: str, settings: Settings) -> Plan:
    return make_plan(replace(REQUEST, engine=engine, settings=settings))


def test_torchtitan_and_accelerate_have_a_degree_for_replicas_and_one_for_shards() -> None:
    plan = planned("torchtitan", {"zero_group": 4, "zero": 3, "tp": 2, "pp": 1})
    degrees = tomllib.loads(one_file(TOOLS["torchtitan"](plan)))["parallelism"]
    assert degrees["data_parallel_replicate_degree"] == 2
    assert degrees["data_parallel_shard_degree"] == 4
    plan = planned("accelerate", {"zero_group": 8})
    data, _ = load_data(one_file(TOOLS["accelerate"](plan)), "accelerate.yaml")
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}
    assert data["parallelism_config"] == sizes


def test_accelerates_own_class_takes_the_sizes() -> None:
    config = pytest.importorskip("accelerate.parallelism_config")
    plan = planned("accelerate", {"zero_group": 8})
    data, _ = load_data(one_file(TOOLS["accelerate"](plan)), "accelerate.yaml")
    sizes = data["parallelism_config"].items()
    given = {key.removeprefix("parallelism_config_"): size for key, size in sizes}
    found = config.ParallelismConfig(**given)
    assert found.total_size == plan.strategy.ranks
    assert found.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]


@pytest.mark.parametrize(("zero", "group"), [(1, 4), (3, 4), (1, 0)])
def test_megatron_has_instances_of_its_optimizer(zero: int, group: int) -> None:
    plan = planned("megatron", {"zero": zero, "zero_group": group, "tp": 2, "pp": 1})
    found = options(one_file(TOOLS["megatron"](plan)))
    assert found.get("num-distributed-optimizer-instances") == ("2" if group else None)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process as the first of eight, whose collectives do nothing."""
    pytest.importorskip("torch")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed import destroy_process_group, init_process_group

    init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=8)
    yield
    destroy_process_group()


@pytest.mark.parametrize("group", [4, 0])
def test_fsdp2_shards_over_the_group(group: int, eight_ranks: None) -> None:
    from torch import nn
    from torch.distributed.tensor import DTensor

    one = replace(REQUEST, cluster=TWO.with_nodes(1), engine="fsdp2")
    plan = make_plan(replace(one, settings={"zero_group": group, "zero": 3}))
    text = one_file(TOOLS["fsdp2"](plan)).replace('"cuda"', '"cpu"')
    names: dict[str, object] = {}
    exec(compile(text, "fsdp2.py", "exec"), names)
    blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
    shard = names["shard"]
    assert callable(shard)
    model = shard(nn.Sequential(*blocks), blocks)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() == 16 * 16 // (group or 8)
        assert parameter.device_mesh.shape == ((2, 4) if group else (8,))


def test_tools_without_groups_say_so() -> None:
    plan = planned("native", {"zero_group": 8, "zero": 3, "tp": 1, "pp": 1})
    for tool in ("deepspeed", "nemo"):
        assert "ZeRO over groups of 8 ranks: over all is written" in TOOLS[tool](plan).lost
    for tool in ("fsdp2", "accelerate", "megatron", "torchtitan"):
        assert not any("groups" in each for each in TOOLS[tool](plan).lost)
    narrow = plan.strategy.model_copy(update={"dp": 4, "cp": 4, "zero_group": 2})
    split = TOOLS["torchtitan"](plan.model_copy(update={"strategy": narrow}))
    assert "ZeRO over groups of 2 ranks: over all is written" in split.lost
