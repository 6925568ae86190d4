"""Every rule by which a row's blanks are filled, one by one."""

from __future__ import annotations

import pytest

from bigplan.cost.memory import framework_memory
from bigplan.cost.price import price
from bigplan.cost.run import graph_of
from bigplan.graph.graph import Recompute
from bigplan.validate.configure import SkippedError, completed, run_of
from bigplan.validate.rows import read_rows
from tests.validate.rows import row

TITAN, CORE, FSDP = "torchtitan", "Megatron-Bridge 26.04", "PyTorch FSDP (fms-fsdp)"

# --- model


def test_a_plain_model_is_a_gpt() -> None:
    model = run_of(row()).model
    assert (model.norm, model.mlp, model.positions) == ("layernorm", "gelu", "learned")
    assert (model.qkv_bias, model.attention_output_bias, model.mlp_bias) == (True, True, True)
    assert model.tied_embeddings
    assert model.ffn == 4 * 2048


def test_a_gated_model_is_a_llama() -> None:
    model = run_of(row(gated_mlp=1)).model
    assert (model.norm, model.mlp, model.positions) == ("rmsnorm", "swiglu", "rope")
    assert (model.qkv_bias, model.attention_output_bias, model.mlp_bias) == (False, False, False)
    assert not model.tied_embeddings
    assert model.ffn == 5632  # 8/3 of 2048 is 5461.3, up to a multiple of 256
    assert run_of(row(gated_mlp=1, ffn=6000)).model.ffn == 6000


def test_tied_tables_are_as_stated() -> None:
    assert run_of(row(gated_mlp=1, tied_embeddings=1)).model.tied_embeddings
    assert not run_of(row(tied_embeddings=0)).model.tied_embeddings


@pytest.mark.parametrize(
    ("hidden", "tp", "heads"),
    [
        (2048, 1, 16),  # of 128
        (2048, 4, 16),
        (1920, 1, 15),
        (1920, 2, 16),  # 120 is the nearest that two ranks share
        (11600, 1, 100),  # 116 is nearer to 128 than 145
    ],
)
def test_heads_are_about_128_wide_and_split_evenly(hidden: int, tp: int, heads: int) -> None:
    model = run_of(row(hidden=hidden, tp=tp)).model
    assert (model.heads, model.kv_heads) == (heads, heads)
    assert model.heads * model.head_dim == hidden


def test_heads_are_as_stated() -> None:
    model = run_of(row(heads=32, kv_heads=8, head_dim=96)).model
    assert (model.heads, model.kv_heads, model.head_dim) == (32, 8, 96)


def test_the_vocabulary_is_gpt2s_padded() -> None:
    assert run_of(row(framework=FSDP)).model.vocab == 50304
    assert run_of(row(framework=FSDP, vocab=50257)).model.vocab == 50257
    # Megatron pads it to 128 rows for every tensor-parallel rank.
    assert run_of(row(vocab=50257)).model.vocab == 50304
    assert run_of(row(vocab=50257, tp=8)).model.vocab == 51200


# --- machine


def test_nodes_have_eight_gpus_but_never_more_than_the_run() -> None:
    assert (run_of(row()).nodes.gpus_per_node, run_of(row()).nodes.nodes) == (8, 2)
    assert run_of(row(n_gpus=4)).nodes.gpus_per_node == 4
    assert run_of(row(gpus_per_node=4)).nodes.nodes == 4


# --- split


def test_data_parallelism_is_what_is_left() -> None:
    assert run_of(row()).strategy.dp == 16
    assert run_of(row(tp=2, pp=4)).strategy.dp == 2
    assert run_of(row(cp=4)).strategy.dp == 4
    assert run_of(row(dp=2, n_gpus=16)).strategy.dp == 2


@pytest.mark.parametrize(("framework", "zero"), [("Megatron-LM", 0), (CORE, 1), ("unheard of", 0)])
def test_zero_is_the_frameworks(framework: str, zero: int) -> None:
    assert run_of(row(framework=framework)).strategy.zero == zero
    assert run_of(row(framework=framework, zero_stage=3)).strategy.zero == 3
    assert run_of(row(framework=framework, zero_stage=3, n_gpus=1)).strategy.zero == 0  # one rank


@pytest.mark.parametrize(
    ("framework", "split"), [("Megatron-LM", False), (CORE, True), (TITAN, True)]
)
def test_sequence_parallelism_is_the_frameworks(framework: str, split: bool) -> None:
    assert run_of(row(framework=framework, tp=2)).strategy.sequence_parallel == split
    for stated in (0, 1):
        found = run_of(row(framework=framework, tp=2, sequence_parallel=stated))
        assert found.strategy.sequence_parallel == bool(stated)


@pytest.mark.parametrize(
    ("columns", "turns"),
    [
        ({}, 1),
        ({"schedule": "interleaved"}, 2),
        ({"schedule": "1f1b"}, 1),
        ({"vpp": 3}, 3),
        ({"framework": CORE}, 6),  # chunks of one of the stage's six layers
        ({"framework": CORE, "schedule": "1f1b"}, 1),
        ({"framework": CORE, "pp": 1}, 1),
    ],
)
def test_virtual_stages(columns: dict[str, object], turns: int) -> None:
    assert run_of(row(**{"pp": 4} | columns)).execution.virtual_stages == turns


def test_context_parallelism_is_as_stated() -> None:
    assert run_of(row()).context_parallel == 1
    assert run_of(row(cp=2)).context_parallel == 2


# --- batch


def test_without_a_pipeline_a_micro_batch_is_a_power_of_two_up_to_16() -> None:
    for batch, expected in ((16, 1), (32, 2), (96, 2), (64 * 16, 16)):
        assert run_of(row(global_batch=batch)).strategy.micro_batch == expected


def test_micro_batches_of_a_pipeline() -> None:
    assert run_of(row(pp=4)).strategy.micro_batch == 1
    # 16 sequences a rank: torchtitan makes as many micro-batches as stages of them.
    assert run_of(row(pp=4, framework=TITAN)).strategy.micro_batch == 4
    assert run_of(row(pp=4, framework=TITAN, micro_batch=2)).strategy.micro_batch == 2
    interleaved = row(pp=4, framework=TITAN, schedule="interleaved")  # two stages a rank
    assert run_of(interleaved).strategy.micro_batch == 2


def test_the_batch_is_that_of_the_models_other_runs() -> None:
    whole = row(model_name="m", seq_len=1024, global_batch=128)
    blank = row(model_name="m", seq_len=2048, global_batch=None)
    other = row(model_name="n", global_batch=None)
    found = completed([whole, blank, other])
    assert [one.global_batch for one in found] == [128, 64, None]  # as many tokens
    strangers = completed(
        [row(model_name="m"), row(id="elsewhere-1", model_name="m", global_batch=None)]
    )
    assert strangers[1].global_batch is None


def test_without_any_batch_there_are_four_micro_batches_a_stage() -> None:
    run = run_of(row(global_batch=None, pp=4))
    assert run.training.global_batch == 4 * 4 * 4  # stages, micro-batches, ranks
    run = run_of(row(global_batch=None))
    assert (run.training.global_batch, run.strategy.micro_batch) == (16, 1)


def test_accumulation_is_as_stated() -> None:
    run = run_of(row(micro_batch=2, grad_accum=5, global_batch=None))
    assert run.training.global_batch == 2 * 5 * 16


# --- precision, attention, recomputation


@pytest.mark.parametrize(
    ("columns", "precision", "gradients"),
    [
        ({}, "fp16", "fp16"),  # before 2023
        ({"framework": FSDP}, "bf16", "fp32"),
        ({"framework": FSDP, "gpu": "V100-32GB"}, "fp16", "fp16"),
        ({"framework": FSDP, "gpu": "T4"}, "fp16", "fp16"),
        ({"precision": "bf16"}, "bf16", "fp32"),
        ({"precision": "fp32"}, "fp32", "fp32"),
        ({"precision": "bf16", "notes": "FSDP mp mode PURE (see repo)"}, "bf16", "bf16"),
        ({"precision": "bf16", "notes": "FSDP mp mode DEFAULT"}, "bf16", "fp32"),
        ({"framework": "DeepSpeed", "zero_stage": 3}, "bf16", "bf16"),
        ({"framework": "DeepSpeed", "zero_stage": 0}, "bf16", "fp32"),
        ({"framework": "Megatron-DeepSpeed", "precision": "bf16", "zero_stage": 1}, "bf16", "fp32"),
    ],
)
def test_precision(columns: dict[str, object], precision: str, gradients: str) -> None:
    training = run_of(row(**columns)).training
    assert (training.precision, training.gradient_precision) == (precision, gradients)
    assert not training.fp8_gemms


def test_masters_and_moments_are_in_16_bits_where_the_notes_say_so() -> None:
    assert run_of(row(notes="bf16 master+states; allocated 16.17 GB")).state_bytes == 6
    assert run_of(row(notes="autocast to bf16 with fp32 parameters")).autocast
    assert run_of(row(notes="AMP: fp32 parameters")).autocast
    assert not run_of(row(precision="fp32", notes="autocast")).autocast
    assert not run_of(row(notes="AMPLE memory")).autocast
    assert run_of(row(notes="baseline fp32 master")).state_bytes == 0


@pytest.mark.parametrize(
    "columns", [{"framework": "torchtune"}, {"framework": TITAN, "notes": "precision bf16-true"}]
)
def test_parameters_that_train_in_16_bits_have_no_master(columns: dict[str, object]) -> None:
    run = run_of(row(**columns))
    assert (run.state_bytes, run.training.gradient_precision) == (4, "bf16")


def test_a_loss_in_chunks_is_told_in_the_notes_or_by_liger() -> None:
    assert run_of(row(notes="+ chunked cross-entropy")).chunked_loss
    assert run_of(row(framework="DeepSpeed + HF + Liger")).chunked_loss
    assert not run_of(row()).chunked_loss


def test_fp8_rows_compute_products_in_fp8() -> None:
    training = run_of(row(gpu="H100-80GB", framework=CORE, precision="fp8")).training
    assert training.fp8_gemms
    assert training.precision == "bf16"


@pytest.mark.parametrize(
    ("columns", "kernel"),
    [
        ({}, "materialised"),  # before 2023
        ({"framework": FSDP}, "flash"),
        ({"attention_kernel": "FA2"}, "flash"),
        ({"framework": FSDP, "attention_kernel": "unfused (pre-flash)"}, "materialised"),
        ({"framework": FSDP, "attention_kernel": "eager"}, "materialised"),
    ],
)
def test_attention_is_what_the_framework_had(columns: dict[str, object], kernel: str) -> None:
    assert run_of(row(**columns)).training.attention == kernel


def test_gpt_was_trained_with_dropout() -> None:
    assert run_of(row()).training.dropout == 0.1
    assert run_of(row(framework=CORE)).training.dropout == 0.0


@pytest.mark.parametrize(
    ("columns", "recompute", "share"),
    [
        ({}, Recompute.NONE, 1.0),
        ({"recompute": "full"}, Recompute.FULL, 1.0),
        ({"recompute": "selective"}, Recompute.SELECTIVE, 1.0),
        # A tenth more FLOPs than useful: three tenths of the layers ran their forward again.
        ({"recompute": "selective", "mfu_pct": 50, "hfu_pct": 55}, Recompute.FULL, 0.3),
        ({"recompute": "selective", "mfu_pct": 30, "hfu_pct": 60}, Recompute.FULL, 1.0),
        ({"recompute": "selective", "mfu_pct": 30, "hfu_pct": 29}, Recompute.FULL, 0.0),
    ],
)
def test_recomputation(columns: dict[str, object], recompute: Recompute, share: float) -> None:
    found = run_of(row(**columns)).execution
    assert found.recompute is recompute
    assert found.recomputed == pytest.approx(share)


@pytest.mark.parametrize(
    ("columns", "offloaded"),
    [
        ({}, (False, False, False, False)),
        ({"offload_optimizer": "cpu"}, (True, False, False, False)),
        ({"offload_optimizer": "nvme"}, (True, True, False, False)),
        ({"offload_optimizer": "cpu", "offload_param": "cpu"}, (True, False, True, False)),
        ({"offload_activation": "cpu", "offload_optimizer": "none"}, (False, False, False, True)),
    ],
)
def test_offloading(columns: dict[str, object], offloaded: tuple[bool, ...]) -> None:
    found = run_of(row(**columns)).execution
    assert offloaded == (
        found.cpu_update,
        found.state_on_disk,
        found.parameters_on_host,
        found.boundaries_on_host,
    )


@pytest.mark.parametrize(("cp", "dp"), [(8, 2), (16, 1)])
def test_zero_shards_over_context_parallel_ranks_too(cp: int, dp: int) -> None:
    found = run_of(row(framework=TITAN, cp=cp, zero_stage=3))
    assert (found.strategy.dp, found.strategy.zero) == (dp, 3 if dp > 1 else 0)
    assert (found.zero, found.context_parallel) == (3, cp)
    shared = graph_of(found).strategy
    assert (shared.dp, shared.zero) == (16, 3)


def test_liger_takes_the_loss_in_chunks() -> None:
    assert run_of(row(framework="DeepSpeed + HF + Liger, torch 2.13.0")).chunked_loss
    assert not run_of(row()).chunked_loss


# --- what other rows say of the same model


def test_an_architecture_is_completed_from_rows_of_the_same_model() -> None:
    stated = row(model_name="m", heads=8, vocab=32000, gated_mlp=1)
    blank, narrower = row(model_name="m"), row(model_name="m", hidden=1024)
    elsewhere = row(id="other-001", model_name="m")
    _, found, *others = completed([stated, blank, narrower, elsewhere])
    assert (found.heads, found.vocab, found.gated_mlp) == (8, 32000, 1)
    assert all(other.heads is None for other in others)


def test_nothing_is_completed_where_rows_disagree() -> None:
    rows = [row(model_name="m", heads=h, vocab=32000) for h in (8, 16)]
    found = completed([*rows, row(model_name="m")])[2]
    assert (found.heads, found.vocab) == (None, 32000)


def test_what_a_row_states_is_never_replaced() -> None:
    rows = [row(model_name="m", heads=8), row(model_name="m", heads=16)]
    assert [one.heads for one in completed(rows)] == [8, 16]


# --- what is not scored


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"moe": "experts:8,topk:2"}, "run experts"),
        ({"adapter": "lora", "gated_mlp": 1, "moe": "experts:8"}, "run experts"),
        ({"layers": None}, "not stated"),
        ({"hidden": 0}, "not stated"),
        ({"seq_len": None}, "not stated"),
        ({"n_gpus": None}, "not stated"),
        ({"ep": 8}, "expert parallelism"),
        ({"precision": "int8"}, "int8 is not modelled"),
        ({"tp": 8, "pp": 4}, "32-way parallelism needs more GPUs"),
        ({"layers": 2, "pp": 4}, "fewer layers than pipeline stages"),
        ({"cp": 3}, "does not divide the sequence"),
        ({"heads": 4, "tp": 8}, "4 heads and ffn 8192 do not split over 8 ranks"),
        ({"hidden": 100, "tp": 8}, "no number of heads splits hidden 100 over 8 ranks"),
    ],
)
def test_rows_that_are_skipped_say_why(columns: dict[str, object], reason: str) -> None:
    with pytest.raises(SkippedError, match=reason):
        run_of(row(**columns))


LARGE: dict[str, object] = {"layers": 32, "hidden": 4096, "seq_len": 4096, "gated_mlp": 1}


@pytest.mark.parametrize(
    ("columns", "recompute"),
    [
        ({"micro_batch": 8}, Recompute.FULL),  # more than twice what an A100 has
        ({"micro_batch": 8, "recompute": "none"}, Recompute.NONE),  # as it says
        ({"micro_batch": 1}, Recompute.NONE),
        ({"micro_batch": 8, "framework": CORE}, Recompute.NONE),
    ],
)
def test_layers_run_again_where_a_blank_leaves_it_open_and_they_would_not_fit(
    columns: dict[str, object], recompute: Recompute
) -> None:
    run = run_of(
        row(**{"framework": TITAN, "zero_stage": 3, "global_batch": 128, **LARGE} | columns)
    )
    assert run.execution.recompute is recompute


def test_states_are_sharded_where_a_blank_leaves_it_open_and_they_would_not_fit() -> None:
    found = [
        run_of(row(framework="DeepSpeed", micro_batch=1, layers=layers, hidden=5120)).strategy.zero
        for layers in (8, 40)
    ]
    assert found[0] == 0 < found[1]


def test_a_micro_batch_that_nobody_tells_fits() -> None:
    short, long = (
        run_of(row(**LARGE | {"framework": TITAN, "global_batch": 256, "seq_len": s}))
        for s in (512, 8192)
    )
    assert short.strategy.micro_batch == 16
    assert long.strategy.micro_batch == 1
    assert long.training.global_batch == short.training.global_batch == 256


def test_early_frameworks_ran_in_fp16_and_recent_models_in_bf16() -> None:
    old, new = (run_of(row(framework="HF Trainer", gated_mlp=g)).training for g in (0, 1))
    assert (old.precision, new.precision) == ("fp16", "bf16")


def test_no_run_of_composer_is_taken_to_need_more_than_its_gpu() -> None:
    """Its loss holds logits and their gradient in 16 bits: `fused_crossentropy`."""
    for one in completed(read_rows()):
        if one.group == "mosaic":
            run = run_of(one)
            parts = framework_memory(graph_of(run), run.execution, run.framework, "allocated")
            assert sum(parts.values()) < run.nodes.gpu.memory


@pytest.mark.parametrize(
    ("notes", "within"),
    [
        ("HSDP (HSDP = shard in node, replicate across)", True),
        ("FSDP (HSDP = shard in node, replicate across)", False),
        ("sharding_strategy HYBRID_SHARD", True),
        ("optimizer states over 8 ranks of a node", True),
        ("", False),
    ],
)
def test_states_that_are_sharded_within_nodes(notes: str, within: bool) -> None:
    run = run_of(row(framework=TITAN, notes=notes))
    assert run.within_nodes == within
    assert run.strategy.dp == 16
    assert graph_of(run).strategy.zero_group == (8 if within else 0)


def test_shards_within_nodes_are_gathered_there_and_summed_over_nodes() -> None:
    whole, within = (run_of(row(framework=TITAN, notes=notes)) for notes in ("", "HSDP"))
    far, near = (
        price(graph_of(run), run.training, run.nodes, run.framework).kinds["block"]
        for run in (whole, within)
    )
    assert near.gather < far.gather
    assert near.reduce < far.reduce
    assert far.sum_replicas == 0 < near.sum_replicas
