"""Dropout of what adapters read: masks that depend on whole numbers alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.runtime.linear.dropout import Drops
from bigplan.spec.training import ValidationSpec
from tests.examples import examples
from tests.runtime.harness import started
from tests.runtime.linear.lora_loop import LoraLoop
from tests.runtime.linear.lora_ranks import LORA, frozen
from tests.runtime.linear.masks import Drawn
from tests.runtime.linear.test_lora import CLOSE, adapters_of, check_steps, plan
from tests.runtime.plans import placed

DROPS = {**LORA, "dropout": 0.25}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _drops(rate: float, length: int, **others: object) -> Drops:
    usual = {"seed": 3, "layer": 2, "first": torch.tensor([7])}
    return Drops(rate=rate, length=length, **usual | others)  # type: ignore[arg-type]


@given(
    st.sampled_from((0.05, 0.5)),
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.sampled_from((1, 64, 7000))),
    st.tuples(st.integers(0, 2), st.integers(0, 100), st.integers(0, 3)),
    st.sampled_from((torch.float32, torch.bfloat16)),
)
@settings(max_examples=examples(20), derandomize=True, deadline=None)
def test_masks_are_what_the_formula_says(
    rate: float,
    sizes: tuple[int, int, int],
    places: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """Of parts of tokens, of positions and of columns, too."""
    (batch, length, width), (part, start, place) = sizes, places
    mask = _drops(rate, length, start=start, part=part).mask("q_proj", place)
    x = torch.randn(batch * length, width).to(dtype)
    sequences = range(7 + part * batch, 7 + (part + 1) * batch)
    at = range(start, start + length), range(place * width, (place + 1) * width)
    expected = x * torch.from_numpy(Drawn(3, 2, "q_proj").kept(rate, sequences, *at))
    assert torch.equal(mask.kept(x), expected)
    total = torch.randn_like(x)
    both = total + expected
    mask.add_kept(total, x)
    assert torch.equal(total, both)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_as_many_elements_are_dropped_as_asked_for(rate: float) -> None:
    """Of all, of every row and of every column: within five standard deviations, or six of many."""
    rows, columns = 1024, 2048
    gone = _drops(rate, 256).mask("up_proj", 0).kept(torch.ones(rows, columns)).numpy() == 0
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(gone.mean() - rate) < 5 * deviation / np.sqrt(rows * columns)
    assert np.abs(gone.mean(0) - rate).max() < 6 * deviation / np.sqrt(rows)
    assert np.abs(gone.mean(1) - rate).max() < 6 * deviation / np.sqrt(columns)


def test_seeds_layers_targets_and_sequences_have_masks_of_their_own() -> None:
    """Masks of half of 65,536 elements are alike in half of them, within five deviations."""
    x = torch.ones(256, 256)
    others: tuple[dict[str, object], ...] = (
        {},
        {"seed": 4},
        {"layer": 3},
        {"first": torch.tensor([8])},
        {"start": 1},
    )
    found = [_drops(0.5, 256, **one).mask("q_proj", 0).kept(x) for one in others]
    found += [_drops(0.5, 256).mask("k_proj", 0).kept(x), found[0].T]
    found += [found[0].roll(1, dims) for dims in (0, 1)]
    for number, mask in enumerate(found):
        for other in found[:number]:
            assert abs(float((mask == other).float().mean()) - 0.5) < 5 * 0.5 / 256


@pytest.mark.parametrize("recompute", list(Recompute), ids=str)
def test_runs_are_the_plain_loop(recompute: Recompute) -> None:
    """Micro-batches of one sequence or of two, from host memory."""
    block = frozen(2, Tier.HOST, recompute)
    where = placed(embedding=frozen(1), block=block, head=frozen(1))
    check_steps(plan(where, lora=DROPS), 2)
    if recompute is Recompute.NONE:
        check_steps(plan(where, Strategy(dp=1, micro_batch=2), lora=DROPS), 2)


def test_recomputation_changes_no_bit() -> None:
    """But for full recomputation, whose kept input is the same and whose products are, too."""
    found = []
    for recompute in Recompute:
        block = frozen(2, Tier.GPU, recompute)
        asked = plan(placed(embedding=frozen(1), block=block, head=frozen(1)), lora=DROPS)
        with started(asked) as worker:
            losses = [worker.step().loss for _ in range(2)]
            worker.finish()
            found.append((losses, adapters_of(worker)))
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in values.items())


def test_validation_drops_nothing_and_the_next_step_is_what_it_would_have_been() -> None:
    asked = plan(lora=DROPS, validation=ValidationSpec(data="bundled", batches=2))
    loop = LoraLoop(asked)
    with started(asked) as worker:
        worker.step()
        loop.step()
        assert worker.evaluate() == pytest.approx(loop.validated(), rel=CLOSE)
        assert worker.step().loss == pytest.approx(loop.step(), rel=CLOSE)
    without = LoraLoop(plan(lora=LORA))
    without.step()
    assert abs(without.step() - LoraLoop(asked).step()) > 100 * CLOSE
