"""What each tool's file says, and what of it is told because it is not priced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigplan.errors import InputError, RefusedError
from bigplan.graph.graph import Recompute
from bigplan.intake import TOOLS, Given
from bigplan.intake.setup import Offload
from bigplan.placement import Tier
from tests.intake.files import (
    DEEPSPEED,
    FILES,
    FSDP,
    INLINE,
    MEGATRON_LM,
    SCRIPT,
    TITAN,
    priced,
    setup,
)
from tests.wording import tells


def test_deepspeeds_own_parser_takes_the_sample() -> None:
    pytest.importorskip("deepspeed")
    import json

    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(**json.loads(DEEPSPEED)["zero_optimization"])
    assert int(zero.stage) == 3
    assert zero.max_live_parameters == 10**9
    untold = DeepSpeedZeroConfig()
    from bigplan.intake import deepspeed

    assert untold.reduce_bucket_size == deepspeed.BUCKET
    assert untold.sub_group_size == deepspeed.SUB_GROUP
    assert untold.max_live_parameters == deepspeed.LIVE


@pytest.mark.parametrize("text", [FSDP, INLINE, MEGATRON_LM])
def test_accelerates_own_parser_takes_the_samples(text: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    (tmp_path / "config.yaml").write_text(text)
    read = config_args.load_config_from_file(str(tmp_path / "config.yaml"))
    found = setup(tmp_path, "fsdp.yaml", text)
    assert found.processes == read.num_processes == 8
    assert found.training["precision"] == read.mixed_precision


def test_deepspeed(tmp_path: Path) -> None:
    found = setup(tmp_path, "ds_config.json", DEEPSPEED)
    assert found.engine == "deepspeed"
    assert found.offload == Offload(Tier.HOST, Tier.HOST)
    assert (found.batch.micro, found.batch.accumulation) == (2, 4)
    assert found.training["gradient_precision"] == "bf16"  # DeepSpeed's default under ZeRO
    assert found.training["optimizer.learning_rate"] == 1e-4
    assert found.sizes["bucket"] == 500_000_000
    assert found.unpriced == ()
    assert "steps_per_print" in found.ignored
    plan = priced(found, training__sequence_length=4096).plan
    assert plan.training.global_batch == 2 * 4 * 8
    assert plan.strategy.zero == 3
    block = plan.placement.stages[0].kinds["block"]
    assert block.parameters == {Tier.HOST: 32}
    assert plan.config["json"]["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_larger_buffers_of_a_file_take_more_memory(tmp_path: Path) -> None:
    text = DEEPSPEED.replace('{"device": "cpu", "pin_memory": true},\n', '{"device": "cpu"},\n')
    large = priced(setup(tmp_path, "ds_config.json", text), training__sequence_length=4096)
    text = text.replace("5e8", "5e7")
    small = priced(setup(tmp_path, "ds_config.json", text), training__sequence_length=4096)
    saved = 2 * 2 * (500_000_000 - 50_000_000)  # two buckets of bf16
    used = [one.plan.predicted.memory[0].used_bytes for one in (large, small)]
    assert used[0] - used[1] == saved


def test_page_locked_blocks_are_powers_of_two_unless_told(tmp_path: Path) -> None:
    native = Given({"DS_PIN_MEMORY_BACKEND": "native"})
    rounded = setup(tmp_path, "ds_config.json", DEEPSPEED)
    exact = setup(tmp_path, "ds_config.json", DEEPSPEED, native)
    assert any("powers of two" in text for text in rounded.assumed)
    uses = [
        priced(one, training__sequence_length=4096).plan.predicted.memory[1].used_bytes
        for one in (rounded, exact)
    ]
    assert uses[0] > uses[1]


def test_auto_is_left_to_options_and_the_error_names_them(tmp_path: Path) -> None:
    text = DEEPSPEED.replace('"enabled": true', '"enabled": "auto"')
    for key, value in (("per_gpu", "2"), ("accumulation_steps", "4")):
        text = text.replace(f'{key}": {value}', f'{key}": "auto"')
    found = setup(tmp_path, "ds_config.json", text)
    assert found.unpriced == ()
    with pytest.raises(InputError, match=r"TOKENS and --precision .* and --set micro_batch=N"):
        priced(found)
    told = setup(tmp_path, "ds_config.json", text, Given(precision="bf16"))
    with pytest.raises(InputError, match="--set micro_batch=N and --global-batch N"):
        priced(told, training__sequence_length=4096)
    stated: dict[str, Any] = {"training__global_batch": 32, "set": {"micro_batch": 2}}
    plan = priced(told, training__sequence_length=4096, **stated).plan
    assert plan.strategy.micro_batch == 2


def test_what_deepspeed_does_besides_is_named(tmp_path: Path) -> None:
    text = DEEPSPEED.replace(
        '"overlap_comm": true', '"zero_quantized_weights": true, "zero_hpz_partition_size": 8'
    ).replace('"steps_per_print": 10', '"frobnicate": 1, "curriculum_learning": {"enabled": true}')
    text = text.replace('{"enabled": true}', '{"enabled": true, "bf16_optimizer_states": true}', 1)
    told = " ".join(setup(tmp_path, "ds_config.json", text).unpriced)
    words = (
        "zero_quantized_weights",
        "8 ranks keep a second copy",
        "frobnicate",
        "curriculum_learning",
    )
    for word in (*words, "bf16.bf16_optimizer_states"):
        assert word in told
    with pytest.raises(RefusedError, match="autotp_size is 4"):
        setup(tmp_path, "ds_config.json", '{"tensor_parallel": {"autotp_size": 4}}')
    with pytest.raises(InputError, match="experts of other kinds"):
        setup(tmp_path, "ds_config.json", '{"bf16": {}, "moe": {"experts": 8}}')


def test_accelerate_with_fsdp(tmp_path: Path) -> None:
    found = setup(tmp_path, "fsdp.yaml", FSDP)
    assert (found.engine, found.split["zero"]) == ("accelerate", 3)
    assert found.again is not None
    assert found.again.policy is Recompute.FULL
    assert found.unpriced == ()
    old = FSDP.replace("version: 2", "version: 1").replace("_forward: true", "_forward: 2")
    first = setup(tmp_path, "fsdp.yaml", old)
    assert first.split["zero"] == 2
    assert any("fsdp_version 1" in text for text in first.unpriced)
    with pytest.raises(InputError, match="which must be true, false or one of FULL_SHARD"):
        setup(tmp_path, "fsdp.yaml", FSDP.replace("_forward: true", "_forward: sometimes"))


def test_accelerate_with_deepspeed_inline_or_in_its_own_file(tmp_path: Path) -> None:
    found = setup(tmp_path, "inline.yaml", INLINE)
    assert found.engine == "deepspeed"
    assert found.split["zero"] == 2
    assert found.offload == Offload(Tier.HOST)
    assert found.batch.accumulation == 4
    assert found.unpriced == ()
    (tmp_path / "ds_config.json").write_text(DEEPSPEED)
    own = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds_config.json}\n"
    assert setup(tmp_path, "fsdp.yaml", own).split["zero"] == 3


def test_accelerate_with_megatron(tmp_path: Path) -> None:
    found = setup(tmp_path, "megatron.yaml", MEGATRON_LM)
    plan = priced(found, training__sequence_length=4096, set={"micro_batch": 1}).plan
    assert plan.engine == "megatron"
    assert (plan.strategy.tp, plan.strategy.pp, plan.strategy.zero) == (2, 2, 1)
    assert plan.training.global_batch == 8 * 2


def test_a_megatron_script_is_read_with_its_variables(tmp_path: Path) -> None:
    found = setup(tmp_path, "pretrain.sh", SCRIPT)
    assert found.processes == 8
    sizes = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}
    assert found.model == {**sizes, "mlp": "swiglu", "tied_embeddings": False}
    assert found.split == {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": 1}
    assert (found.batch.micro, found.batch.whole) == (2, 32)
    assert found.again is not None
    assert (found.again.policy, found.again.blocks) == (Recompute.FULL, 4)
    assert found.behaviour == {"tensor_exposed": 1.0}  # without --tp-comm-overlap
    assert found.unpriced == ()
    plan = priced(found).plan
    assert [
        stage.kinds["block"].activations[Recompute.FULL] for stage in plan.placement.stages
    ] == [{Tier.GPU: 4}, {Tier.GPU: 4}]


def test_megatron_arguments_one_a_line(tmp_path: Path) -> None:
    lines = ["--micro-batch-size=1", "--seq-length", "2048", "--fp16", "--use-megatron-fsdp"]
    found = setup(tmp_path, "pretrain.sh", "\n".join(lines))
    assert found.split["zero"] == 3
    assert found.training["precision"] == found.training["gradient_precision"] == "fp16"
    assert found.training["dropout"] == 0.1  # Megatron's default


def test_what_megatron_does_besides_is_named(tmp_path: Path) -> None:
    more = "--recompute-granularity selective --optimizer muon --frobnicate 3 --fp8-param-gather"
    found = setup(tmp_path, "pretrain.sh", f"--micro-batch-size 1 {more}")
    told = " ".join(found.unpriced)
    for word in ("core_attn", "--optimizer muon", "--frobnicate", "--fp8-param-gather"):
        assert word in told
    with pytest.raises(RefusedError, match="context-parallel ranks"):
        setup(tmp_path, "pretrain.sh", "--context-parallel-size 2")
    with pytest.raises(RefusedError, match="experts of other kinds"):
        setup(tmp_path, "pretrain.sh", "--num-experts 8")
    unknown = setup(tmp_path, "pretrain.sh", 'LAYERS=$1\nARGS="--num-layers $LAYERS --bf16"\n')
    assert unknown.model == {}
    with pytest.raises(InputError, match="takes from elsewhere"):
        setup(tmp_path, "pretrain.sh", "--seq-length $LENGTH")


def test_megatrons_window_is_the_models(tmp_path: Path) -> None:
    """It counts tokens before a token, a model's counts the token, too."""
    script = SCRIPT + " --seq-length 8192"
    windowed = setup(tmp_path, "pretrain.sh", f"{script} --window-size 4095,0")
    assert windowed.model["sliding_window"] == 4096
    assert windowed.unpriced == ()
    for text in (script, f"{script} --window-size -1,0", f"{script} --window-size (-1,-1)"):
        assert "sliding_window" not in setup(tmp_path, "pretrain.sh", text).model
    with pytest.raises(InputError, match="sliding_window is 4096"):
        priced(windowed)
    for wrong in ("4095", "4095,0,0", "x,0"):
        with pytest.raises(InputError, match="two whole numbers"):
            setup(tmp_path, "pretrain.sh", f"{script} --window-size {wrong}")
    with pytest.raises(InputError, match="write 4095,0"):
        setup(tmp_path, "pretrain.sh", f"{script} --window-size 4095,7")


def test_another_model_than_the_files_is_refused(tmp_path: Path) -> None:
    found = setup(tmp_path, "pretrain.sh", SCRIPT.replace("--num-layers 32", "--num-layers 80"))
    with pytest.raises(InputError, match="layers is 80"):
        priced(found)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--swiglu", "mlp is gelu; that of --model llama-3-8b is swiglu"),
        ("--untie-embeddings-and-output-weights", "tied_embeddings is True"),
    ],
)
def test_flags_that_make_another_model_are_compared(tmp_path: Path, flag: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        priced(setup(tmp_path, "pretrain.sh", SCRIPT.replace(flag, "")))
    assert not setup(tmp_path, "pretrain.sh", "--micro-batch-size 1 --bf16").model


@pytest.mark.parametrize(
    ("heads", "told"),
    [
        ("--group-query-attention --num-query-groups 4", "kv_heads is 4"),
        ("--group-query-attention", "kv_heads is 1;"),  # Megatron's default
        ("--num-query-groups 8", "kv_heads is 32"),  # it counts with the flag beside it alone
        ("--group-query-attention --num-query-groups 8 --kv-channels 64", "head_dim is 64"),
    ],
)
def test_other_heads_of_keys_are_another_model(tmp_path: Path, heads: str, told: str) -> None:
    script = SCRIPT.replace("--group-query-attention --num-query-groups 8", heads)
    with pytest.raises(InputError, match=told):
        priced(setup(tmp_path, "pretrain.sh", script))


def test_an_unknown_key_is_told_with_the_one_that_is_meant(tmp_path: Path) -> None:
    text = DEEPSPEED.replace('"zero_optimization"', '"zero_optimisation"')
    (told,) = setup(tmp_path, "ds_config.json", text).unpriced
    assert tells(told, "zero_optimisation", "does not know it", "'zero_optimization'")


def test_fewer_sequences_than_ranks_are_no_step(tmp_path: Path) -> None:
    found = setup(tmp_path, "ds_config.json", '{"train_batch_size": 4, "bf16": {"enabled": true}}')
    with pytest.raises(InputError, match="step of 4 sequences is not made of 8 data-parallel"):
        priced(found, training__sequence_length=4096)


def test_torchtitan(tmp_path: Path) -> None:
    found = setup(tmp_path, "llama3_8b.toml", TITAN)
    plan = priced(found).plan
    assert (plan.strategy.dp, plan.strategy.tp, plan.strategy.zero) == (4, 2, 3)
    assert plan.training.sequence_length == 8192
    assert plan.training.global_batch == 32
    assert found.unpriced == ()
    assert found.behaviour == {}
    eager = setup(tmp_path, "llama3_8b.toml", TITAN.replace("enable = true", "enable = false"))
    assert priced(eager).plan.predicted.step_seconds > plan.predicted.step_seconds


def test_torchtitans_defaults_hold_where_it_says_nothing(tmp_path: Path) -> None:
    found = setup(tmp_path, "llama3_8b.toml", "[model]\nflavor = '8B'\n")
    plan = priced(found).plan
    assert plan.training.sequence_length == 2048
    assert plan.strategy.micro_batch == 8
    assert plan.training.global_batch == 64
    # selective_ac_option "2": every other block
    assert plan.placement.stages[0].kinds["block"].activations[Recompute.FULL] == {Tier.GPU: 16}


@pytest.mark.parametrize(
    ("flavor", "told"),
    [("8B", ()), ("8b-long", ()), ("debugmodel", ()), ("17bx16e", ()), ("70B", ("70 B", "8.03 B"))],
)
def test_a_flavor_of_another_size_is_told(
    tmp_path: Path, flavor: str, told: tuple[str, ...]
) -> None:
    found = setup(tmp_path, "llama3_8b.toml", TITAN.replace("8B", flavor))
    unpriced = priced(found).setup.unpriced
    assert len(unpriced) == bool(told)
    assert tells(" ".join(unpriced), *told)


def test_torchtitans_stages_count_embedding_and_output(tmp_path: Path) -> None:
    split = TITAN.replace("tensor_parallel_degree = 2", "pipeline_parallel_degree = 4")
    split = split.replace("local_batch_size = 1", "local_batch_size = 4")
    plan = priced(setup(tmp_path, "llama3_8b.toml", split)).plan
    blocks = [stage.kinds["block"].layers for stage in plan.placement.stages]
    assert blocks == [8, 9, 8, 7]  # 34 by four: 9, 9, 8, 8, less one at each end
    assert plan.strategy.zero == 2  # a pipeline keeps parameters gathered by default


def test_what_torchtitan_does_besides_is_named(tmp_path: Path) -> None:
    text = TITAN.replace('mode = "full"', 'mode = "selective"\nselective_ac_option = "op"')
    told = " ".join(setup(tmp_path, "llama3_8b.toml", text + "[training.extra]\n").unpriced)
    for word in ("selective_ac_option op", "training.extra"):
        assert word in told
    with pytest.raises(RefusedError, match="context-parallel ranks"):
        setup(tmp_path, "llama3_8b.toml", "[parallelism]\ncontext_parallel_degree = 2\n")


def test_processes_and_cluster_have_to_agree(tmp_path: Path) -> None:
    needed: dict[str, Any] = {"training__sequence_length": 4096, "training__global_batch": 64}
    needed["set"] = {"micro_batch": 2}
    more = setup(tmp_path, "fsdp.yaml", FSDP.replace("processes: 8", "processes: 16"))
    assert priced(more, **needed).plan.cluster.nodes == 2
    shards = TITAN.replace("shard_degree = -1", "shard_degree = 8")
    titan = setup(tmp_path, "llama3_8b.toml", shards)
    assert priced(titan).plan.cluster.nodes == 2
    assert titan.processes == 16
    few = setup(tmp_path, "fsdp.yaml", FSDP.replace("processes: 8", "processes: 3"))
    with pytest.raises(InputError, match="starts 3 processes"):
        priced(few, **needed)
    assert priced(more, nodes=4, **needed).plan.cluster.nodes == 4  # options win


def test_batches_and_splits_that_do_not_come_out(tmp_path: Path) -> None:
    found = setup(tmp_path, "ds_config.json", DEEPSPEED)
    with pytest.raises(InputError, match="is not made of 8 data-parallel ranks"):
        priced(found, training__sequence_length=4096, training__global_batch=24)
    wide = setup(tmp_path, "llama3_8b.toml", TITAN.replace("degree = 2", "degree = 3"))
    with pytest.raises(InputError, match="do not divide"):
        priced(wide)
    with pytest.raises(InputError, match="what can be set is micro_batch"):
        priced(found, training__sequence_length=4096, set={"tp": 2})
    swapped = DEEPSPEED.replace('"cpu"', '"nvme"')
    with pytest.raises(InputError, match="drives, and"):
        priced(
            setup(tmp_path, "ds_config.json", swapped),
            "hgx-h200",
            training__sequence_length=4096,
        )
    offload = '"zero_optimization": {"offload_param": {"device": "cpu"}}'
    plain = '{"train_micro_batch_size_per_gpu": 1, ' + offload + "}"
    with pytest.raises(InputError, match="need ZeRO stage 3"):
        priced(setup(tmp_path, "ds_config.json", plain), training__sequence_length=4096)


def test_what_does_not_fit_is_short_of_bytes_of_a_memory(tmp_path: Path) -> None:
    found = setup(tmp_path, "ds_config.json", DEEPSPEED)
    appraisal = priced(found, "h200-1x", training__sequence_length=4096)
    host = appraisal.plan.predicted.memory[1]
    assert appraisal.short == {Tier.HOST: host.used_bytes - host.capacity_bytes}
    assert appraisal.short[Tier.HOST] > 0


def test_every_reader_has_a_sample() -> None:
    assert {tool for tool, _ in FILES.values()} == set(TOOLS)
