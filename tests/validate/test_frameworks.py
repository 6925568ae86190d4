from __future__ import annotations

from pathlib import Path

import pytest

from bigplan.spec.step import StepOp
from bigplan.validate.configure import run_of
from bigplan.validate.frameworks import RULES, framework_of
from bigplan.validate.rows import read_rows
from tests.validate.rows import row

UNSEEN = [
    Path(f"benchmarks/results/{name}/rows.csv")
    for name in ("2026-11-25-unseen-runs", "2026-11-26-unseen-runs-2", "2026-11-27-unseen-runs-3")
]


@pytest.mark.parametrize(
    ("name", "behaviour"),
    [
        ("Megatron-LM", "Megatron-LM"),
        ("Megatron-LM / Megatron+DeepSpeed 3D", "Megatron-DeepSpeed"),
        ("Megatron-DeepSpeed", "Megatron-DeepSpeed"),
        ("Megatron-Bridge 26.04.01", "Megatron Core"),
        ("Megatron-Core main(1e057005)", "Megatron Core"),
        ("NeMo 24.07 SFT", "Megatron Core"),
        ("NeMo Megatron (2022-05)", "Megatron-LM"),
        ("PyTorch FSDP (Composer/llm-foundry)", "Composer"),
        ("PyTorch FSDP (fms-fsdp)", "FSDP"),
        ("torchtitan", "FSDP"),
        ("llm.q (CUDA/C++)", "llm.q"),
        ("HF Trainer + DeepSpeed", "DeepSpeed"),
        ("DeepSpeed 0.6.2 ZeRO-3 + Megatron", "DeepSpeed"),
        ("DeepSpeed ZeRO-3 Offload", "DeepSpeed"),
        ("llm.c (CUDA/C)", "llm.q"),
        ("MaxText (JAX)", "FSDP"),
        ("stanford_alpaca", "PyTorch"),
        ("NeMo Automodel 26.02", "FSDP"),
        ("Megatron-LM 2024-01 (--use-mcore-models)", "Megatron Core"),
        ("Megatron-LM 2022-03", "Megatron-LM"),
        ("Megatron-DeepSpeed 2024", "Megatron-DeepSpeed"),
        ("AA-Scaling (Aleph Alpha, PyTorch)", "Scaling"),
        ("DeepSpeed 3D (ATorch, Hugging Face)", "DeepSpeed"),
        ("something new", "PyTorch"),
    ],
)
def test_names_and_what_they_run_like(name: str, behaviour: str) -> None:
    assert framework_of(name).behaviour.name == behaviour


def test_every_rule_is_reached_by_a_published_row() -> None:
    rows = [one for path in (None, *UNSEEN) for one in read_rows(path)]
    reached = {framework_of(one.framework).pattern for one in rows}
    assert {rule.pattern for rule in RULES} <= reached


def test_a_compiled_run_is_fused_whatever_its_framework() -> None:
    rule = framework_of("HF Trainer + DeepSpeed")
    assert rule.behaviour_of(row()).eager == 1.0
    assert rule.behaviour_of(row(compile=1)).eager == 0.0
    assert framework_of("torchtitan").behaviour_of(row(compile=0)).eager == 1.0


NORM, GATE = StepOp.NORM, StepOp.ACTIVATION


@pytest.mark.parametrize(
    ("name", "columns", "chains"),
    [
        ("something new", {}, {NORM, GATE}),
        ("something new", {"compile": 1}, set()),
        ("something new", {"notes": "use_fused_rms_norm=True"}, {GATE}),
        ("something new", {"notes": "use_fused_rms_norm=False"}, {NORM, GATE}),
        ("HF Trainer + DeepSpeed", {}, {NORM, GATE}),
        ("HF Trainer + DeepSpeed + Liger", {}, set()),
        ("nanotron", {}, {GATE}),  # TritonRMSNorm
        ("InternEvo", {}, {GATE}),  # apex's norm
        ("Megatron-LM", {}, set()),
        ("Megatron-LM", {"gated_mlp": 1}, {GATE}),
        ("Megatron-Core", {"gated_mlp": 1}, set()),
        ("PyTorch FSDP (Composer)", {}, set()),
        ("PyTorch FSDP (Composer)", {"gated_mlp": 1}, {NORM, GATE}),  # llm-foundry's own are MPT's
        ("llm.q (CUDA/C++)", {"gated_mlp": 1}, set()),
    ],
)
def test_chains_of_plain_kernels(
    name: str, columns: dict[str, object], chains: set[StepOp]
) -> None:
    found = framework_of(name).behaviour_of(row(framework=name, **columns))
    assert found.chains == chains


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("torchtitan", "operators"),
        ("Megatron-LM", "core"),
        ("Megatron-Core 0.6.0", "core"),
        ("Megatron-DeepSpeed", "cheap"),  # no run of it is selective
        ("PyTorch FSDP (fms-fsdp)", "cheap"),
        ("Paxml (JAX)", "dots"),
    ],
)
def test_what_selective_recomputation_runs_again(name: str, policy: str) -> None:
    assert framework_of(name).selective == policy


@pytest.mark.parametrize(
    ("name", "notes", "products"),
    [
        ("AA-Scaling", "", (1, 2)),  # ParallelSwiGLUMLP: dense_in and siglu_weight
        ("DeepSpeed 3D (ATorch, Hugging Face)", "", (3, 2)),  # q, k, v; gate, up
        ("PaddleNLP", "fuse_attention_qkv=0", (3, 2)),
        ("PaddleNLP", "fuse_attention_qkv=1", (1, 1)),
        ("Megatron-LM", "", (1, 1)),
    ],
)
def test_products_that_sum_the_gradient_of_one_input(
    name: str, notes: str, products: tuple[int, int]
) -> None:
    found = framework_of(name).behaviour_of(row(framework=name, notes=notes))
    assert found.inputs_summed == products


def test_interns_attention_is_flashattentions_first_version() -> None:
    assert framework_of("InternEvo").behaviour_of(row()).attention[0] == "flash1"
    told = row(attention_kernel="FA2")
    assert framework_of("InternEvo").behaviour_of(told).attention[0] == "flash2"


def test_interns_update_is_of_one_tensor_unless_sharded() -> None:
    rule = framework_of("InternEvo")
    assert rule.behaviour_of(row(zero_stage=1)).update_tensors == 12
    assert rule.behaviour_of(row(zero_stage=3)).update_tensors == 6


def test_norms_in_one_kernel_count_in_time_where_the_rest_is_known() -> None:
    told = {"notes": "fused RMSNorm kernel"}
    assert framework_of("AA-Scaling").behaviour_of(row(**told)).fused_norms
    assert not framework_of("AA-Scaling").behaviour_of(row()).fused_norms
    assert not framework_of("PaddleNLP").behaviour_of(row(**told)).fused_norms


def test_scaling_sums_in_16_bits_and_reduces_in_fp32() -> None:
    """Its gradients are those of autograd, of the parameters' precision."""
    training = run_of(row(framework="AA-Scaling", zero_stage=1, precision="bf16")).training
    assert (training.gradient_precision, training.reduce_precision) == ("bf16", "fp32")


def test_megatrons_sharded_state_is_its_distributed_optimizer() -> None:
    """It scatters gradients; Megatron-DeepSpeed's first stage gives them all to everybody."""
    sharded = row(zero_stage=1)
    assert framework_of("Megatron-LM").behaviour_of(sharded).reduce_scatters
    assert not framework_of("Megatron-LM").behaviour_of(row()).reduce_scatters
    assert not framework_of("Megatron-DeepSpeed").behaviour_of(sharded).reduce_scatters


@pytest.mark.parametrize(
    ("name", "columns", "eager"),
    [
        ("torchtitan", {}, 1.0),  # its default
        ("torchtitan", {"precision": "fp8"}, 0.0),
        ("PyTorch FSDP (fms-fsdp)", {}, 0.0),  # its default
        ("something new", {}, 1.0),
        ("something new", {"compile": 1}, 0.0),
        ("MaxText (JAX)", {}, 0.0),
        ("DeepSpeed + HF + Liger", {"compile": 0}, 0.0),
        ("Unsloth", {}, 0.0),
        ("NeMo Automodel", {}, 0.0),
        ("NeMo Automodel", {"tp": 2}, 1.0),  # without Liger's kernels
        ("Megatron-LM", {}, 0.0),
        ("Megatron-LM", {"gated_mlp": 1}, 1.0),  # its fused kernels were GPT's
        ("Megatron-Core", {"gated_mlp": 1}, 0.0),
    ],
)
def test_what_is_not_said_to_be_compiled_runs_as_its_framework_does(
    name: str, columns: dict[str, object], eager: float
) -> None:
    found = framework_of(name).behaviour_of(row(framework=name, **columns))
    assert found.eager == eager


@pytest.mark.parametrize(
    ("gpu", "behaviour"), [("A100-80GB", "Megatron-LM"), ("H100", "Megatron Core")]
)
def test_megatron_on_hopper_is_megatron_core(gpu: str, behaviour: str) -> None:
    assert framework_of("Megatron-LM", gpu).behaviour.name == behaviour
    assert framework_of("Megatron-DeepSpeed", gpu).behaviour.name == "Megatron-DeepSpeed"


@pytest.mark.parametrize(
    ("columns", "early"), [({}, True), ({"gated_mlp": 1}, False), ({"gpu": "H100-80GB"}, False)]
)
def test_gated_models_and_new_gpus_are_of_flash_attentions_time(
    columns: dict[str, object], early: bool
) -> None:
    rule, old = framework_of("HF Trainer"), framework_of("Megatron-DeepSpeed")
    one = row(**columns)
    assert rule.materialised(one) == rule.drops_out(one) == early
    assert old.materialised(one)
    assert old.drops_out(one)


def test_an_unknown_framework_waits_for_updated_parameters() -> None:
    assert framework_of("something new").behaviour.owned_exposed == 1.0
    assert framework_of("torchtitan").behaviour.owned_exposed is None


def test_chains_of_fp32_have_no_fused_softmax_in_megatron() -> None:
    rule = framework_of("Megatron-DeepSpeed")
    assert rule.behaviour_of(row(precision="fp32")).eager == 1.0
    assert rule.behaviour_of(row(precision="fp16")).eager == 0.0


@pytest.mark.parametrize(
    ("stated", "kernel"),
    [
        ("FA3", "flash3"),
        ("FA2", "flash2"),
        ("FlashAttention-2 2.5.8", "flash2"),
        ("flash attention 3", "flash3"),
        ("FA4", "cudnn"),
        ("SDPA flash v2", "flash2"),
        ("cuDNN fused", "cudnn"),
        ("TE 2.11 fused/flash (--use-flash-attn)", "cudnn"),
        (None, "flash1"),  # Composer's own
    ],
)
def test_a_run_has_the_attention_that_it_states(stated: str | None, kernel: str) -> None:
    found = framework_of("Composer").behaviour_of(row(attention_kernel=stated))
    assert found.attention[0] == kernel


def test_what_a_run_says_does_not_overlap_is_waited_for() -> None:
    rule = framework_of("Megatron-Core")
    usual, alone = (
        rule.behaviour_of(row(notes=n, async_tp=a)) for n, a in (("", None), ("no overlap", 0))
    )
    assert usual.tensor_exposed == usual.tensor_exposed_async < alone.tensor_exposed == 1.0
    assert (alone.reduce_exposed, alone.send_exposed) == (1.0, 1.0)
    assert usual.reduce_exposed < 1.0 > usual.send_exposed
    assert usual.beside_weights
    assert not alone.beside_weights


def test_asynchronous_tensor_parallelism_exposes_less() -> None:
    rule = framework_of("torchtitan")
    with_it, without = (rule.behaviour_of(row(async_tp=a)).tensor_exposed for a in (1, 0))
    assert with_it == rule.behaviour.tensor_exposed_async < without
    assert rule.behaviour_of(row()).tensor_exposed == without


def test_a_compiled_run_compiles_its_loss() -> None:
    rule = framework_of("torchtitan")
    assert rule.behaviour_of(row(compile=1)).compiled_loss
    assert rule.behaviour_of(row(compile=1)).pads_products
    assert not rule.behaviour_of(row(compile=0)).pads_products
    assert not rule.behaviour_of(row(compile=0)).compiled_loss
    assert not rule.behaviour_of(row()).compiled_loss


@pytest.mark.parametrize(
    ("locator", "compiled"),
    [
        ("benchmarks/llama3_h100_202412_torchtitan.md", False),  # "turning off compile on loss"
        ("docs/2025-02.md", False),
        ("benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md", True),
        ("", True),
    ],
)
def test_torchtitan_did_not_compile_its_loss_for_four_months(locator: str, compiled: bool) -> None:
    one = row(compile=1, source_locator=locator)
    behaviour = framework_of("torchtitan").behaviour_of(one)
    assert behaviour.compiled_loss == behaviour.compiles_loss == compiled
    assert framework_of("fms-fsdp").behaviour_of(one).compiled_loss


@pytest.mark.parametrize(
    ("name", "stated", "beside"),
    [
        ("Megatron-LM", 0, True),
        ("Megatron-LM", 1, True),
        ("Megatron-LM", None, False),
        ("Megatron-DeepSpeed", 0, False),  # forked before
    ],
)
def test_megatron_with_sequence_parallelism_sums_beside_weight_gradients(
    name: str, stated: int | None, beside: bool
) -> None:
    found = framework_of(name).behaviour_of(row(sequence_parallel=stated))
    assert found.beside_weights == beside
