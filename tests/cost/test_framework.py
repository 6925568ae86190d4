from __future__ import annotations

from dataclasses import fields

import pytest

from bigplan.cost.framework import (
    COMPOSER,
    DEEPSPEED,
    FSDP,
    MEGATRON,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    NATIVE,
    PYTORCH,
    Framework,
)

NAMED = (NATIVE, MEGATRON, MEGATRON_DEEPSPEED, MEGATRON_CORE, FSDP, PYTORCH, COMPOSER, DEEPSPEED)


def _shares(framework: Framework) -> dict[str, float]:
    return {
        field.name: getattr(framework, field.name)
        for field in fields(framework)
        if "exposed" in field.name and getattr(framework, field.name) is not None
    }


@pytest.mark.parametrize("framework", NAMED, ids=lambda f: f.name)
def test_shares_are_shares(framework: Framework) -> None:
    assert len(_shares(framework)) >= 6
    assert all(0 <= share <= 1 for share in _shares(framework).values())
    assert framework.host is None or framework.host > 0
    assert framework.attention


def test_names_tell_frameworks_apart() -> None:
    assert len({framework.name for framework in NAMED}) == len(NAMED)


def test_early_megatron_overlaps_nothing() -> None:
    for framework in (MEGATRON, MEGATRON_DEEPSPEED):
        assert framework.tensor_exposed == framework.reduce_exposed == framework.send_exposed == 1
        assert not framework.reduce_scatters


def test_fsdp_hides_what_composers_prefetch_policy_does_not() -> None:
    for name, share in _shares(FSDP).items():
        if name in ("gather_exposed", "regather_exposed", "reduce_exposed"):
            assert share < _shares(COMPOSER)[name]


def test_megatron_core_overlaps_what_megatron_did_not() -> None:
    assert MEGATRON_CORE.tensor_exposed_async < MEGATRON.tensor_exposed
    assert MEGATRON_CORE.reduce_exposed < MEGATRON.reduce_exposed
    assert (MEGATRON_CORE.host or 0) < (MEGATRON.host or 0)


def test_which_frameworks_run_chains_of_kernels() -> None:
    assert {f.name for f in NAMED if f.eager == 1.0} == {"DeepSpeed"}
    assert {f.name for f in NAMED if 0.0 < f.eager < 1.0} == {"Composer"}
