"""What is written for other tools: by their own parsers where they install, else by their names."""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigplan.cli.app import app
from bigplan.engines import make_plan
from bigplan.errors import InputError
from bigplan.export import TOOLS, WrittenConfig
from bigplan.export.deepspeed import NAME as DEEPSPEED
from bigplan.export.written import Blocks
from bigplan.graph.graph import Recompute
from bigplan.placement import Tier
from bigplan.plan import Plan, save_plan
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.hardware import with_hardware
from bigplan.spec.training import Training
from tests.engines.deepspeed.test_search import Settings

# Options of Megatron-LM (megatron/training/arguments.py, and the configurations of megatron/core
# and megatron/training/config that its parser is made from), read 2026-08-22.
MEGATRON = {
    *["num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels"],
    *["max-position-embeddings", "group-query-attention", "num-query-groups", "normalization"],
    *["norm-epsilon", "swiglu", "position-embedding-type", "rotary-base", "disable-bias-linear"],
    *["add-qkv-bias", "qk-layernorm", "untie-embeddings-and-output-weights", "attention-dropout"],
    *["hidden-dropout", "tensor-model-parallel-size", "pipeline-model-parallel-size"],
    *["sequence-parallel", "num-layers-per-virtual-pipeline-stage"],
    *["decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"],
    *["use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"],
    *["use-megatron-fsdp", "data-parallel-sharding-strategy", "no-gradient-accumulation-fusion"],
    *["recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules"],
    *["optimizer-cpu-offload", "optimizer-offload-fraction", "use-precision-aware-optimizer"],
    *["micro-batch-size", "global-batch-size", "seq-length", "train-iters", "lr", "lr-decay-style"],
    *[
        "lr-warmup-iters",
        "min-lr",
        "weight-decay",
        "adam-beta1",
        "adam-beta2",
        "adam-eps",
        "optimizer",
    ],
    *["sgd-momentum", "clip-grad", "seed", "bf16", "fp16", "accumulate-allreduce-grads-in-fp32"],
    *["fp8-format", "grad-reduce-in-bf16", "tp-comm-overlap", "window-size"],
    *["context-parallel-size", "cp-comm-type", "num-experts", "expert-model-parallel-size"],
    *["expert-tensor-parallel-size", "moe-router-topk", "moe-ffn-hidden-size", "moe-grouped-gemm"],
    *["moe-router-pre-softmax", "moe-router-load-balancing-type", "moe-aux-loss-coeff"],
    *["moe-router-dtype", "moe-token-dispatcher-type", "moe-permute-fusion"],
}
# Of torchtitan's JobConfig (torchtitan/config/job_config.py of the 0.2 releases).
TORCHTITAN = {
    "model": {"name", "flavor"},
    "training": {
        "local_batch_size",
        "global_batch_size",
        "seq_len",
        "max_norm",
        "steps",
        "mixed_precision_param",
        "mixed_precision_reduce",
        "enable_cpu_offload",
    },
    "optimizer": {"name", "lr", "beta1", "beta2", "eps", "weight_decay"},
    "lr_scheduler": {"warmup_steps", "decay_ratio", "decay_type", "min_lr_factor"},
    "parallelism": {
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
    "compile": {"enable"},
}
EIGHT, ONE = find_cluster("hgx-h200"), find_cluster("h200-1x")
CASES: dict[str, tuple[str, int | None, Settings]] = {
    "zero-3": ("native", None, {"zero": 3, "tp": 1, "pp": 1}),
    "pipeline": ("native", None, {"pp": 2, "tp": 2, "zero": 1, "vpp": 1}),
    "offload": ("native", 24, {}),
    "deepspeed": ("deepspeed", 24, {}),
}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: made(*case) for name, case in CASES.items()}


def made(engine: str, gib: int | None, settings: Settings) -> Plan:
    cluster = EIGHT if gib is None else ONE.with_caps(gpu=gib * 2**30)
    training = Training(sequence_length=4096, global_batch=16)
    request = Request(find_model("llama-like-5.5b"), training, cluster, settings, engine=engine)
    return make_plan(request)


@pytest.fixture(params=CASES)
def plan(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> Plan:
    return plans[request.param]


def one_file(found: WrittenConfig) -> str:
    (text,) = found.files.values()
    return text


def options(script: str) -> dict[str, str]:
    """Long options with what follows each."""
    found, name = dict[str, str](), ""
    for word in shlex.split(script.replace("\\\n", " "), comments=True):
        if word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = ""
        elif name:
            found[name] = word
    return found


def test_every_file_tells_the_prediction_and_what_is_lost(plan: Plan) -> None:
    for tool, write in TOOLS.items():
        found = write(plan)
        commented = [text for name, text in found.files.items() if not name.endswith(".json")]
        assert any("Predicted for bigplan's plan" in text for text in commented), tool
        for each in found.lost:
            assert any(each in text for text in commented), (tool, each)


def test_megatron_has_every_option(plan: Plan) -> None:
    found = options(one_file(TOOLS["megatron"](plan)))
    assert set(found) - {"nnodes", "nproc-per-node"} <= MEGATRON
    assert found["tensor-model-parallel-size"] == str(plan.strategy.tp)
    assert found["pipeline-model-parallel-size"] == str(plan.strategy.pp)
    assert found["micro-batch-size"] == str(plan.strategy.micro_batch)
    # Megatron's own rule, in its validate_args.
    assert ("optimizer-cpu-offload" in found) <= ("use-precision-aware-optimizer" in found)


def test_torchtitan_has_every_key(plan: Plan) -> None:
    found = tomllib.loads(one_file(TOOLS["torchtitan"](plan)))
    assert set(found) == set(TORCHTITAN)
    for section, keys in found.items():
        assert set(keys) <= TORCHTITAN[section], section
    degrees = found["parallelism"]
    ranks = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    assert ranks == plan.strategy.dp
    assert degrees["pipeline_parallel_degree"] == plan.strategy.pp


def test_accelerates_own_parser_takes_its_file(plan: Plan, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    found = TOOLS["accelerate"](plan)
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)
    read = config_args.load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert read.num_processes == plan.strategy.ranks
    if plan.engine == "deepspeed":
        assert str(read.distributed_type).endswith("DEEPSPEED")
        assert read.deepspeed_config["deepspeed_config_file"] in found.files


def test_deepspeeds_own_parser_takes_its_file(plan: Plan) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    found = json.loads(TOOLS["deepspeed"](plan).files[DEEPSPEED])
    zero = DeepSpeedZeroConfig(**found["zero_optimization"])
    assert found["train_micro_batch_size_per_gpu"] == plan.strategy.micro_batch
    if plan.config:
        assert found["zero_optimization"] == plan.config["json"]["zero_optimization"]
    assert zero.offload_optimizer is None or str(zero.offload_optimizer.device) in {
        "OffloadDeviceEnum.cpu",
        "OffloadDeviceEnum.nvme",
        "cpu",
        "nvme",
    }


def test_fsdp2s_file_imports_what_torch_has(plan: Plan) -> None:
    pytest.importorskip("torch")
    text = one_file(TOOLS["fsdp2"](plan))
    ast.parse(text)
    names: dict[str, object] = {}
    exec(compile(text, "fsdp2.py", "exec"), names)
    assert callable(names["shard"])
    assert names["MICRO_BATCH"] == plan.strategy.micro_batch


def test_nemo_says_the_split(plan: Plan) -> None:
    text = one_file(TOOLS["nemo"](plan))
    overrides = dict(
        word.split("=", 1)
        for word in shlex.split(text.replace("\\\n", " "), comments=True)
        if "=" in word
    )
    assert overrides["trainer.strategy.tensor_model_parallel_size"] == str(plan.strategy.tp)
    assert overrides["data.micro_batch_size"] == str(plan.strategy.micro_batch)


def test_what_a_tool_lacks_is_listed(plans: dict[str, Plan]) -> None:
    lost = " ".join(TOOLS["torchtitan"](plans["offload"]).lost)
    assert "off the GPU" in lost
    assert "2 pipeline stages" in " ".join(TOOLS["deepspeed"](plans["pipeline"]).lost)
    assert not any("tensor" in each for each in TOOLS["megatron"](plans["pipeline"]).lost)


def test_what_is_said_to_be_lost_is() -> None:
    """All blocks recomputed in part are no part of the blocks; a ratio that is written says all."""
    sharded: Settings = {"zero": 3, "tp": 1, "pp": 1, "optimizer": "host", "streamed": 0}
    part = made("native", None, {**sharded, "recompute": "selective"})
    blocks = Blocks.of(part)
    assert blocks.recomputed(Recompute.SELECTIVE) == part.model.layers
    assert 0 < blocks.state_away <= 1
    lost = TOOLS["accelerate"](part).lost
    assert "recomputation of 24 blocks in part: whole blocks run again, all or none" in lost
    whole = made("native", None, {**sharded, "recompute": "full"})
    assert not any("recomputation" in each for each in TOOLS["accelerate"](whole).lost)

    block = Blocks.of(part).placed.model_copy(
        update={"optimizer": {Tier.GPU: 12.0, Tier.HOST: 12.0}}
    )
    stage = part.placement.stages[0]
    stage = stage.model_copy(update={"kinds": {**stage.kinds, "block": block}})
    placement = part.placement.model_copy(update={"stages": (stage,)})
    halved = part.model_copy(update={"placement": placement})
    assert Blocks.of(halved).state_away == 0.5
    written = TOOLS["deepspeed"](halved)
    assert '"ratio": 0.5' in written.files["ds_config.json"]
    assert not any("of the state" in each for each in written.lost)
    replicated = halved.model_copy(
        update={"strategy": halved.strategy.model_copy(update={"zero": 2})}
    )
    assert any("50% of the state off the GPU" in e for e in TOOLS["deepspeed"](replicated).lost)


def test_megatron_has_no_virtual_stages_of_different_sizes() -> None:
    """24 blocks over 5 stages of 3 chunks: nine of two blocks, six of one."""
    settings: Settings = {"pp": 5, "vpp": 3, "tp": 1, "zero": 0, "micro_batch": 1}
    model, training = find_model("llama-like-5.5b"), Training(sequence_length=4096, global_batch=20)
    five = with_hardware(EIGHT, {"gpus_per_node": 5})
    uneven = make_plan(Request(model, training, five, settings, engine="native"))
    assert any("chunks of 2 and 1 blocks" in each for each in TOOLS["megatron"](uneven).lost)


def _windowed(engine: str, length: int) -> Plan:
    training = Training(sequence_length=length, global_batch=16)
    request = Request(find_model("mistral-7b"), training, find_cluster("hgx-h200"), engine=engine)
    return make_plan(request)


def test_megatron_and_nemo_are_told_the_window() -> None:
    """How many tokens before a token it sees, beside itself, and how many after it."""
    short, long = (_windowed("megatron", length) for length in (4096, 8192))
    found = options(one_file(TOOLS["megatron"](long)))
    assert found["window-size"] == "4095,0"
    assert "window-size" not in options(one_file(TOOLS["megatron"](short)))
    words = shlex.split(one_file(TOOLS["nemo"](long)).replace("\\\n", " "), comments=True)
    assert "model.config.window_size=[4095,0]" in words
    assert "window_size" not in one_file(TOOLS["nemo"](short))


def test_context_parallelism_is_told_to_tools_that_have_it() -> None:
    training = Training(sequence_length=8192, global_batch=8)
    wanted = {"cp": 4, "zero": 1}
    plan = make_plan(Request(find_model("llama-3-8b"), training, find_cluster("dgx-h100"), wanted))
    megatron = options(one_file(TOOLS["megatron"](plan)))
    assert (megatron["context-parallel-size"], megatron["cp-comm-type"]) == ("4", "a2a")
    assert "context_parallel_size=4" in one_file(TOOLS["nemo"](plan))
    titan = TOOLS["torchtitan"](plan)
    parallelism = tomllib.loads(one_file(titan))["parallelism"]
    assert parallelism["context_parallel_degree"] == 4
    assert any("torchtitan shards them" in each for each in titan.lost)
    for tool in ("fsdp2", "accelerate", "deepspeed"):
        assert "context parallelism of 4" in TOOLS[tool](plan).lost


def test_products_in_fp8_are_written_or_listed(plans: dict[str, Plan]) -> None:
    plan = plans["pipeline"]
    in_eight = plan.training.model_copy(update={"fp8_gemms": True})
    plan = plan.model_copy(update={"training": in_eight})
    assert options(one_file(TOOLS["megatron"](plan)))["fp8-format"] == "hybrid"
    for tool in TOOLS.keys() - {"megatron"}:
        assert "products in fp8: in bf16" in TOOLS[tool](plan).lost
        assert "products in fp8: in bf16" not in TOOLS[tool](plans["pipeline"]).lost


def test_torchtitan_has_no_window() -> None:
    with pytest.raises(InputError, match="a sequence_length of at most 4096"):
        _windowed("torchtitan", 8192)
    plan = _windowed("torchtitan", 4096)
    assert not any("window" in each for each in TOOLS["torchtitan"](plan).lost)
    assert "the sliding window of 4096 tokens" in " ".join(
        TOOLS["torchtitan"](_windowed("native", 8192)).lost
    )


@pytest.mark.parametrize("tool", ["fsdp2", "accelerate", "deepspeed"])
def test_where_the_model_is_the_users_code_its_kernel_is_named(tool: str) -> None:
    for length in (4096, 8192):
        texts = TOOLS[tool](_windowed("native", length)).files.values()
        assert any("flash_attention_2" in text for text in texts) == (length > 4096)


def test_the_command_prints_or_writes(plans: dict[str, Plan], tmp_path: Path) -> None:
    save_plan(plans["deepspeed"], tmp_path / "plan.yaml")
    run = CliRunner().invoke
    shown = run(app, ["config", str(tmp_path / "plan.yaml"), "--for", "deepspeed"])
    assert shown.exit_code == 0
    assert '"zero_optimization"' in shown.stdout
    folder = tmp_path / "out"
    asked = ["config", str(tmp_path / "plan.yaml"), "--for", "accelerate", "--to", str(folder)]
    assert run(app, asked).exit_code == 0
    assert {path.name for path in folder.iterdir()} == {
        "accelerate.yaml",
        "ds_config.json",
        "ds_env.sh",
    }
    assert run(app, asked).exit_code != 0  # there is something in it


@pytest.mark.parametrize(
    ("name", "told"), [("gpt2-xl", "norm layernorm, mlp gelu_tanh"), ("bloom-7b1", "alibi")]
)
def test_torchtitan_has_blocks_of_llama_and_qwen3_alone(name: str, told: str) -> None:
    training = Training(sequence_length=1024, global_batch=8)
    request = Request(find_model(name), training, find_cluster("dgx-h100"), engine="torchtitan")
    with pytest.raises(InputError, match=f"Llama and Qwen3, and {name} has .*{told}"):
        make_plan(request)
    pins = {"dp": 8, "zero": 3, "micro_batch": 1}
    plan = make_plan(replace(request, engine="native", settings=pins))
    assert any(told in each for each in TOOLS["torchtitan"](plan).lost)


def test_torchtitan_has_a_model_for_normed_heads(plans: dict[str, Plan]) -> None:
    plan = plans["offload"]
    for normed, name in ((False, "llama3"), (True, "qwen3")):
        model = plan.model.model_copy(update={"qk_norm": normed})
        text = one_file(TOOLS["torchtitan"](plan.model_copy(update={"model": model})))
        assert tomllib.loads(text)["model"]["name"] == name
