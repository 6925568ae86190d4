"""Runs beside frozen matrices in 4 bits compute what a plain loop with these matrices computes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.rectangle import Rectangle
from bigplan.runtime.cpu import native
from bigplan.runtime.linear import four_bits
from bigplan.runtime.weights import first_values
from bigplan.spec.lora import possible_targets, stored
from bigplan.spec.optimizer import Optimizer
from tests.runtime.linear import lora_ranks
from tests.runtime.linear.lora_loop import LoraLoop
from tests.runtime.linear.lora_ranks import LORA, LoraRun
from tests.runtime.linear.test_lora import CLOSE, check_steps
from tests.runtime.plans import plan_of, tiny_model, tiny_training
from tests.runtime.processes import start

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NF4 = {**LORA, "frozen": "nf4"}
WIDE = {"hidden": 128, "ffn": 256}  # two ranks still have whole blocks of 64 in every row
# Wide sums round more; gradients of A, which are zeros at first, would make steps of that.
OPTIMIZER = Optimizer(learning_rate=1e-2, epsilon=1e-4)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


EXPERTS: dict[str, object] = {"ffn": 64, "experts": 4, "experts_per_token": 2}
# A dense block with a delta rule, and one with experts.
SEVERAL_KINDS = EXPERTS | {
    "router_loss": 0.0,
    "shared_ffn": 64,
    "shared_gate": True,
    "dense_blocks": 1,
    "dense_ffn": 128,
    "delta_rule": {"key_heads": 4, "key_dim": 4, "value_heads": 16, "value_dim": 16},
    "mixer_pattern": ("1 delta_rule", "1 attention"),
}


def plan(tier: Tier, recompute: Recompute, **model: object) -> Plan:
    """Two blocks with their matrices in 4 bits, and adapters of all of them."""
    described = tiny_model(**WIDE | model)
    lora = {**NF4, "targets": possible_targets(described)}
    training = tiny_training(4, lora=lora, optimizer=OPTIMIZER)
    strategy = Strategy(dp=1, accumulation_group=2)
    return plan_of(
        described, training, strategy, lora_ranks.alike(described, strategy, tier, recompute)
    )


@pytest.mark.parametrize("tier", list(Tier), ids=str)
def test_a_run_is_the_plain_loop(tier: Tier) -> None:
    check_steps(plan(tier, Recompute.NONE), steps=2)


@pytest.mark.parametrize(
    ("model", "recompute"),
    [*(({}, each) for each in Recompute), (SEVERAL_KINDS, Recompute.FULL)],
    ids=[*Recompute, "several kinds in full"],
)
def test_blocks_may_be_recomputed(model: dict[str, object], recompute: Recompute) -> None:
    check_steps(plan(Tier.HOST, recompute, **model), steps=2)


def _values(dtype: torch.dtype) -> Tensor:
    """Rows of usual values, and of zeros, tiny, large and infinite ones."""
    values = torch.randn(80, 256, generator=torch.Generator().manual_seed(3))
    for row, factor in enumerate((0.0, 1e-41, 1e-6, 3e3, 7e4, 1e37)):
        values[row] *= factor
    values[6, 5], values[7, 70] = float("inf"), -float("inf")
    bounds = torch.tensor(four_bits.BOUNDS)  # what lies on a bound is not above it
    values[8:] = values[8:].where(torch.rand(72, 256) > 0.2, bounds[torch.randint(15, (72, 256))])
    values[8:, ::64] = 1.0
    return values.to(dtype)


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_packing_has_the_bits_of_torchs(
    dtype: torch.dtype, into: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native.native()
    values = _values(dtype)
    if library is None or not (library.takes(values) and library.takes(torch.empty(0, dtype=into))):
        pytest.skip("needs a C++ compiler, and a CPU that converts fp16")
    unlike = values.clone()
    unlike[3, 3] = float("nan")  # all of its block, whatever its bits
    ours, theirs = four_bits.packed(values, into), four_bits.packed(unlike, into)
    assert four_bits.unpacked(theirs)[3, :64].isnan().all()
    monkeypatch.setattr(four_bits, "native", lambda: None)
    plain, unlike = four_bits.packed(values, into), four_bits.packed(unlike, into)
    assert torch.equal(ours.view(torch.uint8), plain.view(torch.uint8))
    torch.testing.assert_close(
        four_bits.unpacked(theirs), four_bits.unpacked(unlike), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("part", [(0, 96, 0, 17 * 4), (3, 70, 5, 60), (31, 33, 16, 18)])
def test_any_part_of_what_is_stored_is_that_of_the_whole(part: tuple[int, int, int, int]) -> None:
    """Ranks cut what is stored anywhere: amid a block, or between its codes and its scale."""
    model = tiny_model(hidden=128, ffn=128, heads=2, kv_heads=2, head_dim=48)
    training = tiny_training(4, precision="bf16", lora=NF4)
    values = first_values.stored_values(model, training)
    found = {p.name: p for p in stored(model, "block", training.lora, 2)}
    described = found["q_proj.weight"]
    whole = first_values.whole_values(values, "block", 1, described)
    cut = Rectangle("q_proj.weight", part[0], part[1], part[2], min(part[3], whole.shape[1]))
    assert torch.equal(
        values("block", 1, described, cut).view(torch.int16), whole[cut.in_matrix].view(torch.int16)
    )


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
def test_ranks_train_as_one_does(
    model: dict[str, object], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    found = lora_ranks.plans(2, clip_norm=1e-3)
    every = {
        name: plan_of(
            tiny_model(layers=4, **WIDE | model),
            tiny_training(4, clip_norm=1e-3, lora=NF4, optimizer=OPTIMIZER),
            found[name].strategy,
            found[name].placement,
        )
        for name in ("dp2-zero3", "tp2", *(() if model else ("pp2-vpp2",)))
    }
    if model:
        whole = every.pop("dp2-zero3")
        spread = whole.strategy.model_copy(update={"ep": 2})
        every["dp2-ep2-zero3"] = whole.model_copy(update={"strategy": spread})
    (tmp_path / "plans").write_bytes(pickle.dumps(every))
    start(lora_ranks.run_rank, tmp_path, 2)
    loop = LoraLoop(next(iter(every.values())))
    assert len(every) <= lora_ranks.IN_TURN
    for done, name in enumerate(every):
        loss = loop.step()
        with subtests.test(name):
            runs: list[LoraRun] = [
                torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)
            ]
            assert len({run.digest for run in runs}) == 1
            for run in runs:
                assert run.done == done
                assert run.loss == pytest.approx(loss, rel=CLOSE)
