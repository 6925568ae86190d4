"""Whatever the plan, training computes what a plain torch loop computes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("torch")

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.plan import Plan
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.layers.visit import Visit
from bigplan.spec.carried import INPUTS
from bigplan.spec.optimizer import Optimizer
from tests.examples import examples
from tests.runtime.harness import STEPS, Run, check, execute, loop_of, same
from tests.runtime.plans import carrying, placed, plan_of, plans, tiny_model, tiny_training
from tests.toys import kind_placement


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _away(*, tied: bool = False, clip_norm: float | None = None) -> Plan:
    """Every sum that can leave the GPU does, in three groups of two micro-batches."""
    away = kind_placement(1, Tier.HOST, Tier.HOST, (Recompute.NONE, Tier.HOST), Tier.HOST)
    two = kind_placement(2, Tier.NVME, Tier.NVME, (Recompute.NONE, Tier.NVME), Tier.NVME)
    table = kind_placement(1, optimizer=Tier.HOST) if tied else away
    model, strategy = tiny_model(tied_embeddings=tied), Strategy(dp=1, accumulation_group=2)
    placement = placed(embedding=table, block=two, head=away)
    return plan_of(model, tiny_training(6, clip_norm=clip_norm), strategy, placement)


@given(plans())
@settings(
    max_examples=examples(40),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_plan_trains_as_a_plain_loop_does(plan: Plan) -> None:
    check(plan, execute(plan, steps=STEPS))


@given(plans(of=carrying()))
@settings(
    max_examples=examples(15),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_so_it_does_where_blocks_hand_on_more_than_hidden_states(plan: Plan) -> None:
    check(plan, execute(plan, steps=STEPS))


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_all_blocks_that_read_kept_keys_are_added_up(
    recompute: Recompute, precision: str
) -> None:
    """Two local and two global blocks read those of one each, of two micro-batches under way."""
    model = tiny_model(
        layers=8,
        mlp="geglu",
        norms="around",
        attention_pattern=("1 local", "1 global"),
        sliding_window=5,
        key_sharing={"blocks": 4, "ffn": 96},
        block_inputs={"width": 16},
    )
    kinds = {
        kind: kind_placement(number, activations=(recompute, Tier.GPU))
        for kind, number in Counter(model.block_kinds).items()
    }
    kinds |= dict.fromkeys(("embedding", INPUTS, "head"), kind_placement(1))
    strategy = Strategy(dp=1, accumulation_group=2)
    training = tiny_training(4, precision=precision)
    stages = Placement(stages=(StagePlacement(kinds=kinds),))
    plan = plan_of(model, training, strategy, stages)
    check(plan, execute(plan))


def test_a_resident_plan_is_the_plain_loop_bit_by_bit() -> None:
    """One loop from first to last, its state never replaced."""
    placement = placed(embedding=kind_placement(1), block=kind_placement(2), head=kind_placement(1))
    strategy = Strategy(dp=1, accumulation_group=2)
    plan = plan_of(tiny_model(), tiny_training(6), strategy, placement)
    run, loop = execute(plan, steps=STEPS), loop_of(plan)
    assert run.losses == [loop.step().loss for _ in range(STEPS)]
    same("last state", loop.state, run.states[-1])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_tensor_of_four_elements_has_the_bits_of_longer_ones(optimizer: str) -> None:
    """A gate's bias with a number for each head: no whole vector of the CPU's."""
    placement = placed(embedding=kind_placement(1), block=kind_placement(2), head=kind_placement(1))
    model = tiny_model(attention_gate=True, gate_of_heads=True, qkv_bias=True)
    training = tiny_training(6, optimizer=Optimizer(name=optimizer, learning_rate=0.1))
    plan = plan_of(model, training, Strategy(dp=1), placement)
    assert check(plan, execute(plan)) == 8  # all four layers in both steps


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_bounds_are_a_small_part_of_what_a_step_changes(
    tied: bool, clip_norm: float | None
) -> None:
    """A sum that misses or repeats a micro-batch moves weights by parts of the step itself."""
    plan = _away(tied=tied, clip_norm=clip_norm)
    run, loop = execute(plan), loop_of(plan)
    for before in run.states[:-1]:
        loop.state = before
        outcome = loop.step()
        for old, new, bound in zip(before, outcome.state, outcome.bounds, strict=True):
            move = (new.weights - old.weights).abs().mean()
            # With clipping the fp32 norm of 10,000 elements decides: 5,000 roundings.
            part = 1e-4 if clip_norm is None else 2e-3
            assert bound is None or bound.weights.mean() < part * move


def test_losing_a_micro_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _away()
    plain = Visit.open

    def forgetful(self: Visit, sums: Sums) -> None:
        plain(self, sums)
        if self.action.layer == 1 and self.action.micro_batch == 3:
            sums.totals = {name: total.clone() for name, total in sums.totals.items()}

    monkeypatch.setattr(Visit, "open", forgetful)
    with pytest.raises(AssertionError, match="step 1, layer 1: weights"):
        check(plan, execute(plan))


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_loss_in_chunks_is_the_loss(positions: str) -> None:
    """16 tokens as 5 + 5 + 5 + 1: the same terms, added in another order (test_blocks' 1e-5)."""
    plan = _away(tied=True)
    model = plan.model.model_copy(update={"positions": positions})
    plan = plan.model_copy(update={"model": model})
    placement = plan.placement.model_copy(update={"loss_chunk": 5})
    whole = execute(plan, steps=1)
    chunked = execute(plan.model_copy(update={"placement": placement}), steps=1)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-6)
    for ours, plain in zip(_moments(chunked), _moments(whole), strict=True):
        assert (ours - plain).norm() < 1e-5 * plain.norm()


def _moments(run: Run) -> list[torch.Tensor]:
    """After one step the first moments are a tenth of the gradients."""
    return [layer.moments[0] for layer in run.states[-1]]
