from __future__ import annotations

import pytest

from bigplan.validate.frameworks import RULES, framework_of
from bigplan.validate.rows import read_rows
from tests.validate.rows import row


@pytest.mark.parametrize(
    ("name", "behaviour"),
    [
        ("Megatron-LM", "Megatron-LM"),
        ("Megatron-LM / Megatron+DeepSpeed 3D", "Megatron-DeepSpeed"),
        ("Megatron-DeepSpeed", "Megatron-DeepSpeed"),
        ("Megatron-Bridge 26.04.01", "Megatron Core"),
        ("Megatron-Core main(1e057005)", "Megatron Core"),
        ("NeMo 24.07 SFT", "Megatron Core"),
        ("PyTorch FSDP (Composer/llm-foundry)", "Composer"),
        ("PyTorch FSDP (fms-fsdp)", "FSDP"),
        ("torchtitan", "FSDP"),
        ("HF Trainer + DeepSpeed", "DeepSpeed"),
        ("DeepSpeed 0.6.2 ZeRO-3 + Megatron", "DeepSpeed"),
        ("DeepSpeed ZeRO-3 Offload", "DeepSpeed"),
        ("something new", "FSDP"),
    ],
)
def test_names_and_what_they_run_like(name: str, behaviour: str) -> None:
    assert framework_of(name).behaviour.name == behaviour


def test_every_rule_is_reached_by_a_shipped_row() -> None:
    reached = {framework_of(one.framework).pattern for one in read_rows()}
    assert {rule.pattern for rule in RULES} <= reached


def test_a_compiled_run_is_fused_whatever_its_framework() -> None:
    rule = framework_of("HF Trainer + DeepSpeed")
    assert not rule.behaviour_of(row()).fused
    assert rule.behaviour_of(row(compile=1)).fused
    assert not framework_of("torchtitan").behaviour_of(row(compile=0)).fused


def test_asynchronous_tensor_parallelism_exposes_less() -> None:
    rule = framework_of("torchtitan")
    with_it, without = (rule.behaviour_of(row(async_tp=a)).tensor_exposed for a in (1, 0))
    assert with_it == rule.behaviour.tensor_exposed_async < without
    assert rule.behaviour_of(row()).tensor_exposed == without


def test_a_compiled_run_compiles_its_loss() -> None:
    rule = framework_of("torchtitan")
    assert rule.behaviour_of(row(compile=1)).compiled_loss
    assert not rule.behaviour_of(row(compile=0)).compiled_loss
    assert not rule.behaviour_of(row()).compiled_loss


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
