"""Configurations are complete, and DeepSpeed's own parser takes them as they are."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from bigplan.engines import make_plan
from bigplan.engines.deepspeed.engine import _config
from bigplan.engines.deepspeed.search import DeepSpeedSearch
from bigplan.placement import Tier
from bigplan.runtime.deepspeed.config import needed, settings
from tests.engines.deepspeed.test_search import Settings, request
from tests.tiny import small_cluster

deepspeed = pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")


def parsed(config: dict[str, Any]) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(config)


@pytest.mark.parametrize("gpus", [1, 8])
def test_deepspeed_parses_every_way(gpus: int) -> None:
    """A key that it does not know is an error there."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    search = DeepSpeedSearch(request(gpus=gpus, gradient_precision="bf16"))
    seen = 0
    for way in search._ways():
        if way.strategy.micro_batch == 1:
            config = _config(search.tried(way), search.request)
            zero = settings(config)["zero_optimization"]
            found = DeepSpeedZeroConfig(**zero)
            assert int(found.stage) == way.stage
            seen += 1
    assert seen > 10


def test_the_whole_configuration_is_parsed() -> None:
    wanted: Settings = {"zero": 3, "optimizer": "nvme", "micro_batch": 4}
    plan = make_plan(request(wanted, model="llama-like-3.3b"))
    config = settings(plan.config)
    assert needed(plan.config) == ["cpu_adam", "pin_memory", "async_io"]
    found = parsed(config)
    assert found.gradient_accumulation_steps == 4
    assert found.train_micro_batch_size_per_gpu == 4
    assert found.gradient_clipping == 1.0
    assert found.aio_config["block_size"] == 1 << 20
    zero = config["zero_optimization"]
    # Complete: no size is left to a default.
    assert {"reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size"} <= zero.keys()
    assert {"stage3_max_live_parameters", "stage3_max_reuse_distance"} <= zero.keys()
    assert zero["offload_optimizer"]["buffer_count"] >= 4
    assert zero["sub_group_size"] <= 100_000_000


def test_the_prefetch_is_a_block_and_off_where_it_breaks() -> None:
    host = make_plan(request({"zero": 3, "parameters": "host", "micro_batch": 4}))
    block = 218_112_000  # parameters of a block of llama-like-5.5b
    zero = settings(host.config)["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == block
    wanted: Settings = {"zero": 3, "parameters": "nvme", "micro_batch": 4}
    drive = make_plan(request(wanted, model="llama-like-3.3b"))
    zero = settings(drive.config)["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 0
    assert zero["offload_param"]["buffer_count"] > 0


def test_nothing_is_page_locked_without_a_gpu() -> None:
    asked = request(
        {"optimizer": "host", "zero": 2}, model="tiny-llama-test", gradient_precision="bf16"
    )
    training = asked.training.model_copy(update={"sequence_length": 32, "global_batch": 4})
    plan = make_plan(replace(asked, cluster=small_cluster(1), training=training))
    assert needed(plan.config) == ["cpu_adam"]
    assert not settings(plan.config)["zero_optimization"]["offload_optimizer"]["pin_memory"]
    assert Tier.HOST in plan.placement.stages[0].kinds["block"].optimizer
