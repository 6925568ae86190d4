"""Ranks that have no equal parts of a layer."""

from __future__ import annotations

import pytest

from bigplan.capabilities.splits import (
    carried_refusal,
    context_parallel_refusal,
    tensor_parallel_refusal,
)
from bigplan.graph.strategy_space import Space
from bigplan.spec.catalog import find_model
from bigplan.spec.training import Training


@pytest.mark.parametrize(
    ("name", "tp", "odd"),
    [
        ("olmo-hybrid-7b", 8, "heads 30 and delta_rule.key_heads 30 and kv_heads 30"),
        ("granite-4.0-h-micro", 7, "heads 32 and ffn 8192 and state_space.heads 64 and kv_heads 8"),
        ("granite-4.0-h-micro", 8, None),
    ],
)
def test_what_ranks_have_no_equal_parts_of_is_told(name: str, tp: int, odd: str | None) -> None:
    why = tensor_parallel_refusal(find_model(name), tp) or ""
    assert bool(why) == (odd is not None)
    assert odd is None or f"tp {tp} does not divide {odd} of {name}" in why


@pytest.mark.parametrize(
    ("name", "fixed", "odd"),
    [
        ("granite-4.0-h-micro", {"cp": 8}, None),
        ("granite-4.0-h-micro", {"cp": 3}, "heads 32 and state_space.heads 64 and kv_heads 8"),
        ("qwen3-next-80b-a3b", {"cp": 8, "tp": 2}, None),
        ("qwen3-next-80b-a3b", {"cp": 16, "tp": 2}, "heads 16 of"),
        ("olmo-hybrid-7b", {"cp": 4}, "heads 30 and delta_rule.value_heads 30"),
    ],
)
def test_what_ranks_of_a_sequence_have_no_equal_parts_of_is_told(
    name: str, fixed: dict[str, int], odd: str | None
) -> None:
    why = context_parallel_refusal(find_model(name), fixed) or ""
    assert bool(why) == (odd is not None)
    assert odd is None or f"cp {fixed['cp']} does not divide {odd}" in why


@pytest.mark.parametrize(
    ("name", "fixed", "said"),
    [
        ("gemma-4-e2b", {"tp": 2, "dp": 1}, "tp 2: blocks of gemma-4-e2b hand on inputs of their"),
        ("gemma-4-e4b", {"pp": 2, "vpp": 3}, "vpp 3: blocks of gemma-4-e4b hand on inputs"),
        ("gemma-4-e2b", {"dp": 4, "pp": 2, "cp": 2}, ""),
        ("gemma-4-31b", {"tp": 2}, ""),
    ],
)
def test_what_ranks_do_not_split_of_what_blocks_hand_on_is_told(
    name: str, fixed: dict[str, int], said: str
) -> None:
    model = find_model(name)
    why = carried_refusal(model, fixed) or ""
    assert why.startswith(said)
    assert bool(why) == bool(said)


def test_no_search_tries_such_splits() -> None:
    training = Training(sequence_length=1024, global_batch=16)
    space = Space(find_model("gemma-4-e2b"), training, 8, 8)
    tried = list(space.strategies())
    assert {s.tp for s in tried} == {s.vpp for s in tried} == {1}
    assert {s.pp for s in tried} == {1, 2, 4, 8}
