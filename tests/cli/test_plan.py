"""`bigplan plan`: what it says of a plan, in the terminal and as JSON, and what would help."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigplan.cli.waiting import Waiting
from bigplan.spec.catalog import find_model
from bigplan.spec.lora import Lora, trained_count
from tests.tiny import write_cluster

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--seq-len", "32", "--global-batch", "4", "--precision", "fp32")


@pytest.fixture
def small(tmp_path: Path) -> tuple[object, ...]:
    """Arguments that plan a tiny model on a small machine."""
    return ("--model", "tiny-llama-test", "--cluster", write_cluster(tmp_path), *SMALL)


def planned(bigplan: Run, *arguments: object) -> Any:
    code, out, err = bigplan("plan", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_json_holds_what_the_terminal_shows(bigplan: Run, small: tuple[object, ...]) -> None:
    data = planned(bigplan, *small, "--what-if")
    code, out, _ = bigplan("plan", *small, "--what-if")
    assert code == 0
    words = " ".join(out.split())
    assert " ".join(data["decision"].split()) in words
    for lane, seconds in data["busy_seconds"].items():
        assert seconds < 1e-4 * data["step_seconds"] or lane in out
    path = data["critical_path"]
    assert f"Bound by: {data['bottleneck']}, " in words
    assert data["bottleneck"] == max(path, key=path.__getitem__)
    assert sum(path.values()) == pytest.approx(data["step_seconds"])
    for use in data["memory"]:
        assert sum(use["by_purpose"].values()) == use["used_bytes"]
    for other in data["alternatives"][:5]:
        assert other["because"]
    for outcome in data["what_if"]["solved"]:
        assert outcome["change"] in out
    parts = [s for s in data["step_parts"].values() if not isinstance(s, str)]
    assert sum(parts) == pytest.approx(data["step_seconds"])


def test_after_ctrl_c_no_other_search_begins(
    bigplan: Run, small: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(waiting: Waiting, best: float | None, bound: float, left: int) -> bool:
        waiting.interrupted = True  # as SIGINT does
        return best is None

    monkeypatch.setattr(Waiting, "go_on", go_on)
    code, out, err = bigplan("plan", *small, "--what-if", "--largest")
    assert code == 0
    assert "step time" in out
    assert "Ctrl-C ended the planning" in err
    for searched in ("What would help", "longest sequence"):
        assert searched not in out
    data = planned(bigplan, *small, "--what-if", "--largest")
    assert (data["what_if"], data["largest"]) == (None, None)


def test_what_if_is_asked_of_programs_only_on_request(
    bigplan: Run, small: tuple[object, ...]
) -> None:
    assert planned(bigplan, *small)["what_if"] is None
    solved = planned(bigplan, *small, "--what-if")["what_if"]["solved"]
    # Three devices do not split four sequences evenly, so twice the two are tried besides.
    assert [o["change"] for o in solved] == [
        "one more GPU in the node",
        "twice the GPUs in the node",
    ]
    assert solved[-1]["factor"] == solved[-1]["before_seconds"] / solved[-1]["step_seconds"]
    assert "would help" not in bigplan("plan", *small, "--no-what-if")[1]


def test_the_largest_that_fits_is_looked_for_on_request(
    bigplan: Run, small: tuple[object, ...]
) -> None:
    tight = (*small, "--cap", "gpu=2MiB", "--cap", "host=4MiB", "--cap", "nvme=0")
    pinned = [text for pin in ("dp=1", "tp=2", "micro_batch=1") for text in ("--set", pin)]
    code, out, err = bigplan("plan", *tight, *pinned, "--largest", "--no-what-if")
    assert code == 0, err
    assert "The largest that fits" in out
    assert "layers of this kind" in out
    assert planned(bigplan, *small)["largest"] is None


def test_a_time_limit_holds_for_further_questions(bigplan: Run, small: tuple[object, ...]) -> None:
    code, out, err = bigplan(
        "plan", *small, "--what-if", "--largest", "--time-limit", "0", "--json"
    )
    assert code == 0, err
    answers = json.loads(out)
    assert answers["what_if"]["solved"] == answers["largest"] == []
    assert answers["what_if"]["unasked"]
    assert "the search for the largest was stopped" in err


def test_what_would_fit_is_solved_where_nothing_does(
    bigplan: Run, small: tuple[object, ...]
) -> None:
    caps = ("gpu=1200KiB", "host=1MiB", "nvme=0")
    tight = ("--set", "zero=0", "--set", "dp=2", *(text for cap in caps for text in ("--cap", cap)))
    code, out, err = bigplan("plan", *small, *tight, "--what-if")
    assert (code, out) == (3, "")
    row = next(line for line in err.splitlines() if "64 GiB more host memory per node" in line)
    assert "fits: step" in row
    assert "Smallest change that fits" in err
    assert "solved again" not in bigplan("plan", *small, *tight)[2]


def test_a_time_limit_still_gives_a_plan(bigplan: Run, small: tuple[object, ...]) -> None:
    data = planned(bigplan, *small, "--time-limit", "0")
    assert data["simulated_gap"] >= 0
    assert bigplan("plan", *small, "--time-limit", "-1")[0] == 2


@pytest.mark.parametrize(("host", "frozen"), [("16GB", ""), ("8GB", " --lora-frozen nf4")])
def test_where_nothing_fits_adapters_that_do_are_named(
    bigplan: Run, host: str, frozen: str
) -> None:
    desk = ("--model", "llama-3.1-8b", "--cluster", "rtx-4090-workstation", "--seq-len", "2048")
    short = ("--tokens-per-step", "16384", "--cap", f"host={host}", "--cap", "nvme=0GB")
    gpu = ("--cap", "gpu=8GiB") if frozen else ()
    code, _, err = bigplan("plan", *desk, *short, *gpu)
    assert code == 3
    told = " ".join(err.split())
    assert f"note: --lora-rank 16{frozen} trains adapters alone, which fits" in told
    if frozen:
        *_, err = bigplan("plan", *desk, *short, *gpu, "--dropout", "0.1")
        assert "does not fit" in err
        assert "trains adapters" not in err  # which do not go with dropout
    code, out, _ = bigplan("plan", *desk, *short, *gpu, "--lora-rank", "16", *frozen.split())
    assert code == 0, out


def test_the_number_of_trained_parameters_is_told(bigplan: Run, small: tuple[object, ...]) -> None:
    whole, adapted = planned(bigplan, *small), planned(bigplan, *small, "--lora-rank", "4")
    assert whole["trained_parameters"] == whole["parameters"] == adapted["parameters"]
    count = trained_count(find_model("tiny-llama-test"), Lora(rank=4))
    assert adapted["trained_parameters"] == count


def test_other_engines_say_why_they_have_no_adapters(
    bigplan: Run, small: tuple[object, ...]
) -> None:
    code, _, err = bigplan("plan", *small, "--lora-rank", "4", "--engine", "deepspeed")
    assert code == 2
    assert "lora runs with --engine native alone" in err


def test_adapters_are_not_named_where_they_do_not_fit_either(bigplan: Run) -> None:
    desk = ("--model", "qwen3-235b-a22b", "--cluster", "rtx-4090-workstation")
    code, _, err = bigplan("plan", *desk, "--cap", "nvme=0GB")
    assert code == 3
    assert "does not fit" in err
    assert "adapters" not in err
