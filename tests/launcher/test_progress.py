import io
import re

from rich.console import Console

from bigplan.launcher.progress import Promise, figures, packed, progress
from bigplan.launcher.record import Metric
from tests.tiny import tiny_plan

GIB = 2**30
METRIC = Metric(
    step=120,
    loss=3.21456,
    seconds=3.947,
    tokens_per_second=12345.6,
    mfu=0.4123,
    memory={"gpu": 14 * GIB, "host": 82 * GIB, "nvme": 30 * GIB},
    validation_loss=3.3,
)
PROMISE = Promise(3.63, {"gpu": 15 * GIB, "host": 83 * GIB, "nvme": 30 * GIB})


def shown(width: int, *, terminal: bool, steps: range) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal, color_system=None)
    with progress(console, steps[0] - 1, steps[-1], PROMISE) as show:
        for step in steps:
            validated = METRIC.validation_loss if terminal else None
            show.step(METRIC.model_copy(update={"step": step, "validation_loss": validated}))
        show.say("Stopping [now]")
    return text.getvalue()


def test_every_figure_with_what_was_predicted() -> None:
    assert list(figures(METRIC, PROMISE)) == [
        "loss 3.2146",
        "validation 3.3000",
        "12.3 k tokens/s",
        "MFU 41.2%",
        "step 3.95 s (predicted 3.63 s)",
        "GPU 14 GiB of 15 GiB",
        "host 82 GiB of 83 GiB",
        "NVMe 30 GiB of 30 GiB",
    ]


def test_what_went_wrong_is_shown() -> None:
    metric = Metric(step=1, loss=None, seconds=1.0, tokens_per_second=1.0, skipped=True)
    assert list(figures(metric, PROMISE))[:2] == ["loss not finite", "skipped: overflow"]


def test_a_terminal_of_80_and_one_of_120_columns_show_whole_lines() -> None:
    for width, lines in ((80, 3), (120, 2)):
        assert len(packed(list(figures(METRIC, PROMISE)), width)) == lines
        text = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", shown(width, terminal=True, steps=range(5, 8)))
        assert "NVMe 30 GiB of 30 GiB" in text
        assert "7/7" in text
        assert "…" not in text
        assert max(map(len, re.split(r"[\n\r]", text))) <= width


def test_without_a_terminal_a_line_now_and_then() -> None:
    lines = shown(80, terminal=False, steps=range(101, 401)).splitlines()
    numbers = [int(line.split()[1].split("/")[0]) for line in lines[:-1]]
    assert (numbers[0], numbers[-1]) == (101, 400)
    assert 10 <= len(numbers) <= 17
    assert lines[-1] == "Stopping [now]"


def test_the_promise_of_a_plan() -> None:
    plan = tiny_plan()
    promise = Promise.of(plan)
    assert promise.seconds == plan.predicted.step_seconds
    assert promise.memory["gpu"] == plan.predicted.memory[0].used_bytes
