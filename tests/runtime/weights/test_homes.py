"""First values at their homes: every element made once, in parts of a block at most."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from bigplan.content import ADAPTERS
from bigplan.cost.process import FIRST_VALUES
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.rectangle import Rectangle
from bigplan.runtime.memory.pieces import LayerRows
from bigplan.runtime.weights import first_values as module
from bigplan.runtime.weights.homes import fill_first, without
from bigplan.spec.step import Parameter
from tests.examples import examples
from tests.runtime.harness import context_of, started, state_of
from tests.runtime.linear.lora_ranks import LORA, frozen
from tests.runtime.plans import placed, plan_of, plans, tiny_model, tiny_training
from tests.toys import kind_placement

BLOCK = 300  # elements: a few rows of most matrices, less than one of some


def _empty_head_on_the_drive() -> Plan:
    """Nothing else is there: the table is the embedding's, and no norm has weights."""
    weightless = {"norm": "layernorm", "norm_bias": False, "weightless_norms": "all"}
    model = tiny_model(layers=1, tied_embeddings=True, **weightless)
    here, away = kind_placement(1), kind_placement(1, Tier.NVME, optimizer=Tier.NVME)
    placement = placed(embedding=here, block=here, head=away)
    return plan_of(model, tiny_training(1), Strategy(dp=1), placement)


@settings(max_examples=examples(20))
@example(_empty_head_on_the_drive())
@given(plans())
def test_every_element_is_made_once_and_no_more_than_a_block_at_a_time(plan: Plan) -> None:
    """Each has its own place as its value: so it is also seen where it went."""
    asked: list[tuple[int, Rectangle]] = []

    def first(kind: str, layer: int, parameter: Parameter, part: Rectangle) -> torch.Tensor:
        asked.append((layer, part))
        everything = torch.arange(parameter.count, dtype=torch.float32)
        return everything.view(parameter.matrix)[part.in_matrix] / 2**16

    with started(plan) as worker:
        context = context_of(worker)
        with patch.object(module, "BLOCK", BLOCK):
            fill_first(context, first)
        for layer, state in enumerate(state_of(worker)):
            parameters = context.parameters(layer)
            parts = [part for number, part in asked if number == layer]
            assert sum(part.elements for part in parts) == sum(p.count for p in parameters)
            every = [torch.empty(0)]  # a tied head without weights has nothing more
            every += [torch.arange(p.count, dtype=torch.float32) / 2**16 for p in parameters]
            kept = state.weights.dtype
            assert torch.equal(state.weights, torch.cat(every).to(kept))
            assert all(bool((moment == 0).all()) for moment in state.moments)
    assert all(part.rows == 1 or part.elements <= BLOCK for _, part in asked)


def test_adapters_of_many_tensors_are_laid_out_a_few_times() -> None:
    """Their masters are one piece: tensor by tensor, 448 of 8B were sought 449 times in each."""
    blocks, asked = 8, list[range]()
    model, training = tiny_model(layers=blocks), tiny_training(4, lora=LORA, precision="bf16")
    placement = placed(embedding=frozen(1), block=frozen(blocks), head=frozen(1))
    found = LayerRows.rectangles

    def noted(rows: LayerRows, elements: range) -> Iterator[tuple[int, Rectangle]]:
        asked.append(elements)
        return found(rows, elements)

    plan = plan_of(model, training, Strategy(dp=1, accumulation_group=2), placement)
    with patch.object(LayerRows, "rectangles", noted), started(plan) as worker:
        rows = context_of(worker).rows[ADAPTERS]
    assert len(rows.offsets) >= 2 * blocks
    # Once for the values and once for what fills up at each home, of layers and of the adapters.
    assert len(asked) <= 3 * (blocks + 3)


ranges = st.builds(lambda start, count: range(start, start + count), *[st.integers(0, 20)] * 2)


@given(st.lists(ranges, max_size=4), st.lists(ranges, max_size=4))
def test_what_is_left_of_ranges(some: list[range], others: list[range]) -> None:
    taken = {i for other in others for i in other}
    left = [i for one in without(some, others) for i in one]
    assert left == [i for one in some for i in one if i not in taken]


def test_a_core_s_blocks_are_counted() -> None:
    """Two in fp32 and one in another precision, which is none wider."""
    assert FIRST_VALUES == (2 + 1) * 4 * module.BLOCK


def test_of_experts_more_is_read_at_once_in_no_more_bytes() -> None:
    """Out of files in 16 bits; what is drawn takes fp32."""
    model = tiny_model(ffn=32, experts=4, experts_per_token=2)
    found = {p.name: p for p in model.kinds()["block"]}
    experts, dense = found["experts.up_proj.weight"], found["q_proj.weight"]
    drawn, read = tiny_training(1), tiny_training(1, weights="folder")
    rows, of_all = module.rows_at_once(model.hidden), module.rows_at_once(4 * model.hidden)
    assert module.rows_to_make(experts, read) * torch.bfloat16.itemsize == 2 * of_all * 4
    assert module.rows_to_make(experts, drawn) == of_all
    for training in (read, drawn):
        assert module.rows_to_make(dense, training) == rows
