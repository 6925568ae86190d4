"""Groups of ranks with a copy each of what is sharded, as tools' files tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigplan.errors import InputError
from bigplan.intake.copies import ONE_COPY, Copies
from bigplan.program import Lane
from tests.intake.files import DEEPSPEED, FSDP, SCRIPT, TITAN, priced, setup

TWO: dict[str, Any] = {"nodes": 2}
BATCH: dict[str, Any] = {"training__sequence_length": 4096, "training__global_batch": 64}
BATCH |= {"set": {"micro_batch": 2}}
SHARDS = "parallelism_config_dp_shard_size"
COPIES = f"parallelism_config: {{parallelism_config_dp_replicate_size: 2, {SHARDS}: 8}}\n"
INSTANCES = " --num-distributed-optimizer-instances"


@pytest.mark.parametrize(
    ("copies", "together"),
    [
        (ONE_COPY, 16),
        (Copies(ranks=4), 4),
        (Copies(number=4), 4),
        (Copies(8, 2), 8),
        (Copies(of_node=True), 8),
    ],
)
def test_ranks_that_share_a_copy(copies: Copies, together: int) -> None:
    assert copies.together(16, 8, "FILE") == together


@pytest.mark.parametrize("copies", [Copies(ranks=3), Copies(number=5), Copies(4, 2)])
def test_copies_are_made_of_the_ranks(copies: Copies) -> None:
    with pytest.raises(InputError, match="not made of the 16 data-parallel ranks"):
        copies.together(16, 8, "FILE")


@pytest.mark.parametrize(("shard", "group"), [("-1", 4), ("4", 4), ("1", 0)])
def test_torchtitan(shard: str, group: int, tmp_path: Path) -> None:
    """Two nodes of eight, tensor parallel 2. Without shards, replicas are plain ones."""
    replicas = "8" if shard == "1" else "2"
    text = TITAN.replace("replicate_degree = 1", f"replicate_degree = {replicas}")
    text = text.replace("shard_degree = -1", f"shard_degree = {shard}")
    found = setup(tmp_path, "llama3_8b.toml", text)
    assert found.unpriced == ()
    strategy = priced(found, **TWO).plan.strategy
    assert (strategy.dp, strategy.zero, strategy.zero_group) == (8, 3 if group else 0, group)


def test_accelerate(tmp_path: Path) -> None:
    text = FSDP.replace("processes: 8", "processes: 16") + COPIES
    found = setup(tmp_path, "fsdp.yaml", text)
    assert found.unpriced == ()
    assert priced(found, **BATCH).plan.strategy.zero_group == 8
    with pytest.raises(InputError, match="not made of the 8 data-parallel ranks"):
        priced(setup(tmp_path, "fsdp.yaml", FSDP + COPIES), **BATCH)
    with pytest.raises(InputError, match="a dp_shard_size of several ranks"):
        setup(tmp_path, "fsdp.yaml", text.replace(f"{SHARDS}: 8", f"{SHARDS}: 1"))
    first = text.replace("version: 2", "version: 1").replace("forward: true", "forward: 1")
    with pytest.raises(InputError, match="fsdp_version 2"):
        setup(tmp_path, "fsdp.yaml", first)


@pytest.mark.parametrize(("word", "zero"), [("HYBRID_SHARD", 3), ("HYBRID_SHARD_ZERO2", 2)])
def test_accelerates_fsdp1_shards_within_nodes(word: str, zero: int, tmp_path: Path) -> None:
    text = FSDP.replace("version: 2", "version: 1").replace("processes: 8", "processes: 16")
    text = text.replace("forward: true", f"forward: {word}")
    found = setup(tmp_path, "fsdp.yaml", text)
    strategy = priced(found, **BATCH).plan.strategy
    assert (strategy.zero, strategy.zero_group) == (zero, 8)
    alone = priced(setup(tmp_path, "fsdp.yaml", text.replace(": 16", ": 8")), **BATCH)
    assert (alone.plan.strategy.zero, alone.plan.strategy.zero_group) == (zero, 0)
    second = setup(tmp_path, "fsdp.yaml", text.replace("version: 1", "version: 2"))
    assert any("is FSDP1's" in told for told in second.unpriced)
    assert priced(second, **BATCH).plan.strategy.zero_group == 0


def test_megatron(tmp_path: Path) -> None:
    script = SCRIPT.replace("NUM_NODES=1", "NUM_NODES=2") + f" {INSTANCES} 2\n"
    found = setup(tmp_path, "pretrain.sh", script)
    assert found.unpriced == ()
    strategy = priced(found).plan.strategy
    assert (strategy.dp, strategy.zero, strategy.zero_group) == (4, 1, 2)
    plain = script.replace("--use-distributed-optimizer", "")
    with pytest.raises(InputError, match="which needs --use-distributed-optimizer"):
        setup(tmp_path, "pretrain.sh", plain)
    fsdp = "--use-megatron-fsdp --outer-dp-sharding-strategy optim"
    outer = setup(tmp_path, "pretrain.sh", script.replace("--use-distributed-optimizer", fsdp))
    assert any("shared out over all" in told for told in outer.unpriced)
    torchs = script.replace("--use-distributed-optimizer", "--use-torch-fsdp2")
    told = setup(tmp_path, "pretrain.sh", torchs)
    assert any("FSDP2 shards over all ranks" in each for each in told.unpriced)
    assert priced(told).plan.strategy.zero_group == 0


def test_deepspeeds_mics(tmp_path: Path) -> None:
    """A rank has eight's part of the states, and sums it over the nodes once a step."""
    plain = DEEPSPEED.replace('"cpu"', '"none"')
    texts = plain, plain.replace('"stage": 3,', '"stage": 3, "mics_shard_size": 8,')
    whole, mics = (
        priced(setup(tmp_path, "ds_config.json", text), nodes=2, **BATCH).plan for text in texts
    )
    assert (whole.strategy.zero_group, mics.strategy.zero_group) == (0, 8)
    held = (plan.predicted.memory[0].by_purpose for plan in (whole, mics))
    before, after = held
    assert after["optimizer"] == pytest.approx(2 * before["optimizer"], rel=1e-6)
    for text, summed in zip(texts, (False, True), strict=True):
        once = 2 * _exchanging(text, 64, tmp_path) - _exchanging(text, 128, tmp_path)
        assert (once > 0.01) == summed
        assert once > -1e-9
    told = " ".join(setup(tmp_path, "ds_config.json", texts[1]).unpriced)
    assert "0.19.8 has no MiCS" in told
    with pytest.raises(InputError, match="MiCS has no offload_optimizer"):
        setup(tmp_path, "ds_config.json", texts[1].replace('"none"', '"cpu"'))
    with pytest.raises(InputError, match="which shares nothing out"):
        setup(tmp_path, "ds_config.json", texts[1].replace('size": 8', 'size": 1'))
    two = texts[1].replace('"stage": 3', '"stage": 2')
    assert any("ZeRO 3 alone" in each for each in setup(tmp_path, "ds_config.json", two).unpriced)


def _exchanging(text: str, batch: int, folder: Path) -> float:
    """Seconds of a step on the network, which nothing hides: so much a micro-batch, and once."""
    stated = BATCH | {"training__global_batch": batch}
    plan = priced(setup(folder, "ds_config.json", text), nodes=2, **stated).plan
    return plan.predicted.critical_path[Lane.COMM]
