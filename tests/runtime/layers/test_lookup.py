"""Looked-up rows: their gradients in sums against a dense one in fp64; tables on the host."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bigplan.graph.strategy import Strategy
from bigplan.mechanics import LOOKED_UP_ROWS
from bigplan.placement import Tier
from bigplan.program import Op, expand
from bigplan.runtime.layers import lookup as module
from bigplan.runtime.layers.lookup import add_rows
from tests.runtime.harness import Run, execute, started
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.toys import kind_placement

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PRECISIONS = [torch.bfloat16, torch.float16, torch.float32]
COLUMNS = 24


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _dense(table: Tensor, rows: Tensor, gradients: Tensor) -> Tensor:
    """The sum after the addition, in fp64."""
    added = torch.zeros(table.shape, dtype=torch.float64)
    added.index_add_(0, rows.cpu(), gradients.cpu().double())
    return table.cpu().double() + added


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("number", [1, 50, LOOKED_UP_ROWS, LOOKED_UP_ROWS + 1])
def test_rows_are_added_to_a_sum(
    device: str, dtype: torch.dtype, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most words more than once, some never: as in text."""
    monkeypatch.setattr(module, "ROW_ELEMENTS", LOOKED_UP_ROWS * COLUMNS)
    rows = (_values(number).abs() * 20).long().clamp(max=98)
    gradients, total = _values(number, COLUMNS, dtype=dtype), _values(100, COLUMNS)
    exact = _dense(total, rows, gradients)
    ours = total.to(device)
    add_rows(ours, rows.to(device), gradients.to(device))
    # Of up to 200 terms about 1, added in fp32.
    assert float((ours.cpu().double() - exact).abs().max()) < 200 * 2**-23 * float(
        exact.abs().max()
    )
    assert torch.equal(ours[99].cpu(), total[99])


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_in_16_bits_is_rounded_once(device: str) -> None:
    """256 + 1 is 256 in bf16, so a sum that took one row after the other would not move."""
    total = torch.full((3, COLUMNS), 256.0, dtype=torch.bfloat16, device=device)
    rows, ones = torch.ones(64, dtype=torch.int64, device=device), torch.ones(64, COLUMNS)
    add_rows(total, rows, ones.to(device, torch.bfloat16))
    assert total[:, 0].tolist() == [256, 320, 256]


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_rows_give_the_same_bits(device: str) -> None:
    rows, gradients = (_values(1500).abs() * 9).long().to(device), _values(1500, 130).to(device)
    first, second = (torch.zeros(60, 130, device=device) for _ in range(2))
    for total in (first, second):
        add_rows(total, rows, gradients)
    assert torch.equal(first, second)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 9))
def test_any_rows_a_few_at_a_time(listed: list[int], at_once: int) -> None:
    rows = torch.tensor(listed)
    gradients = torch.arange(1.0, 1 + 2 * len(rows)).view(-1, 2)  # whole numbers: sums are exact
    total = torch.ones(7, 2)
    exact = _dense(total, rows, gradients)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROW_ELEMENTS", 2 * at_once)
        add_rows(total, rows, gradients)
    assert torch.equal(total.double(), exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tables", [1, 2])
def test_a_table_on_the_host_trains_as_one_on_the_device(device: str, tables: int) -> None:
    """Two accumulation groups of two micro-batches; with a second table, of positions."""
    learned: dict[str, object] = {"norm": "layernorm", "positions": "learned", "mlp": "gelu"}
    model = tiny_model(**(learned if tables == 2 else {}))
    training = tiny_training(4, clip_norm=0.5)

    def trained(where: Tier) -> Run:
        table = kind_placement(1, where, where, optimizer=where)
        placement = placed(embedding=table, block=kind_placement(2), head=kind_placement(1))
        plan = plan_of(model, training, Strategy(dp=1, accumulation_group=2), placement, device)
        with started(plan) as worker:
            looked_up = [a for a in expand(worker._program.step) if a.op is Op.LOOK_UP]
        assert len(looked_up) == (4 if where is Tier.HOST else 0)
        return execute(plan)

    host, alone = trained(Tier.HOST), trained(Tier.GPU)
    # fp32 sums and updates of the CPU and of a GPU differ in their last bits.
    assert host.losses == pytest.approx(alone.losses, rel=1e-5)
    for here, there in zip(host.states[-1], alone.states[-1], strict=True):
        assert torch.allclose(here.weights, there.weights, rtol=1e-3, atol=1e-5)


def test_rows_of_any_length_have_their_tokens_beside_them() -> None:
    """15 x 34 elements in 16 bits are no whole number of 8-byte tokens."""
    model, training = (
        tiny_model(hidden=34, heads=1, kv_heads=1),
        tiny_training(2, sequence_length=15, precision="bf16"),
    )
    table = kind_placement(1, Tier.HOST, Tier.HOST, optimizer=Tier.HOST)
    placement = placed(embedding=table, block=kind_placement(2), head=kind_placement(1))
    run = execute(plan_of(model, training, Strategy(dp=1), placement))
    assert run.losses[-1] < run.losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_takes_no_more_memory_than_the_graph_counts(dtype: torch.dtype) -> None:
    """A copy, ones and zeros or what is narrowed, sums in fp32, and numbers."""
    columns, number = 4096, 3 * LOOKED_UP_ROWS
    rows = torch.randint(50_000, (number,), device="cuda")
    gradients = torch.ones(number, columns, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros(50_000, columns, device="cuda", dtype=dtype)
    add_rows(total, rows, gradients)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_rows(total, rows, gradients)
    taken = torch.cuda.max_memory_allocated() - before
    beside = 2 * LOOKED_UP_ROWS * (columns if dtype == torch.bfloat16 else LOOKED_UP_ROWS)
    counted = LOOKED_UP_ROWS * columns * (2 + 4) + beside + 4 * 8 * number
    assert 0.9 * counted < taken < 1.01 * counted
