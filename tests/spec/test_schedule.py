"""Learning rates: torch's schedulers where it has the same, and bad schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.errors import InputError
from bigplan.spec.catalog import find_model
from bigplan.spec.files.document import parse_document
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.schedule import Schedule, learning_rate
from bigplan.spec.training import TrainingRequest, resolve

RATE = 2e-3
OPTIMIZER = Optimizer(learning_rate=RATE)
STEPS = 40


def _rates(schedule: Schedule, steps: int = STEPS) -> list[float]:
    return [learning_rate(schedule, OPTIMIZER, step, steps) for step in range(1, steps + 1)]


def _torchs(schedule: Schedule) -> list[float]:
    """The same from torch's schedulers."""
    torch = pytest.importorskip("torch")
    schedulers: Any = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    warm_up, span = schedule.warmup_steps, (schedule.decay_steps or STEPS) - schedule.warmup_steps
    final = schedule.final_fraction
    decay: Callable[[], Any] = {
        "constant": lambda: schedulers.ConstantLR(optimizer, 1.0),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, final, total_iters=span),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, span, eta_min=RATE * final),
    }[schedule.name]
    if warm_up:
        rise = schedulers.LinearLR(optimizer, 1 / warm_up, total_iters=warm_up - 1)
        whole = schedulers.SequentialLR(optimizer, [rise, decay()], milestones=[warm_up])
    else:
        whole = decay()
    rates = []
    for _ in range(schedule.decay_steps or STEPS):
        rates.append(whole.get_last_lr()[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer step is taken
            whole.step()
    return rates


@pytest.mark.parametrize("warm_up", [0, 2, 10])
@pytest.mark.parametrize(
    "shape",
    [
        {"name": "constant"},
        {"name": "linear"},
        {"name": "linear", "final_fraction": 0.2, "decay_steps": 25},
        {"name": "cosine"},
        {"name": "cosine", "final_fraction": 0.1, "decay_steps": 25},
    ],
)
def test_rates_are_those_of_torchs_schedulers(shape: dict[str, object], warm_up: int) -> None:
    schedule = Schedule.model_validate({**shape, "warmup_steps": warm_up})
    rates, expected = _rates(schedule), _torchs(schedule)
    # torch multiplies each rate from the one before it: 40 roundings of fp64 and more
    assert rates[: len(expected)] == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_after_the_decay_the_rate_stays() -> None:
    schedule = Schedule(name="cosine", warmup_steps=3, decay_steps=10, final_fraction=0.25)
    assert _rates(schedule)[10:] == pytest.approx([RATE / 4] * 30)


@given(
    st.sampled_from(("linear", "cosine")), st.integers(0, 10), st.integers(1, 20), st.floats(0, 1)
)
def test_rates_rise_then_fall_within_their_bounds(
    name: str, warm_up: int, span: int, final: float
) -> None:
    fields = {"name": name, "warmup_steps": warm_up, "final_fraction": final}
    rates = _rates(Schedule.model_validate(fields), warm_up + span)
    assert rates[:warm_up] == sorted(rates[:warm_up])
    assert rates[warm_up:] == sorted(rates[warm_up:], reverse=True)
    assert rates[warm_up] == pytest.approx(RATE)
    assert all(0 < rate <= RATE * (1 + 1e-12) for rate in rates)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule: {name: step}", "must be one of constant, linear, cosine"),
        ("schedule: {decay_steps: 5}", "the schedule is constant; use name: linear or cosine"),
        ("schedule: {final_fraction: 0.1}", "use name: linear or cosine, or remove them"),
        ("schedule: {name: cosine, warmup_steps: 20}", "warmup_steps 20 leaves no step of steps"),
        (
            "schedule: {name: linear, warmup_steps: 9, decay_steps: 9}",
            "leaves no step of decay_steps 9",
        ),
        ("schedule: {name: cosine, final_fraction: 2}", "must be at most 1"),
    ],
)
def test_bad_schedules(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve(parse_document(text, TrainingRequest, "t.yaml"), find_model("tiny-llama-test"))
    assert message in str(error.value)


def test_a_warm_up_may_be_longer_than_a_constant_run() -> None:
    request = TrainingRequest(schedule=Schedule(warmup_steps=100), steps=5)
    training = resolve(request, find_model("tiny-llama-test"))
    last = learning_rate(training.schedule, training.optimizer, 5, training.steps)
    assert last == pytest.approx(training.optimizer.learning_rate / 20)
