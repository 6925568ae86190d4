"""Files that commands write: what they may replace, said before the slow work."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bigplan.errors import InputError
from bigplan.plan import load_plan, save_plan
from bigplan.spec.catalog import find_cluster
from bigplan.spec.files.dump import to_yaml
from bigplan.targets import CLUSTER, PLAN, TRACE, TargetKind, require_target
from bigplan.timeline import Event, Timeline
from tests.cli.conftest import Run
from tests.tiny import small_cluster, tiny_plan, write_cluster

NOTES = "# Notes\nformat: 5\n"
# Every command that writes a file which the user names; `profile` stands in test_profile.py.
PLANS = ("plan", "e.yaml", "--no-what-if", "--out")
DETECTS = ("detect", "--cpu-devices", "1", "--out")
TRACES = ("simulate", "p.yaml", "--trace")
COMMANDS = pytest.mark.parametrize("command", [PLANS, DETECTS, TRACES], ids=lambda c: c[0])


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    """An experiment with its model and cluster, a plan, and a file that is none of these."""
    write_cluster(tmp_path)
    save_plan(tiny_plan(), tmp_path / "p.yaml")
    (tmp_path / "model.yaml").write_text(to_yaml(tiny_plan().model))
    (tmp_path / "e.yaml").write_text(
        "model: ./model.yaml\ncluster: ./small.yaml\n"
        "training: {sequence_length: 32, global_batch: 4, precision: fp32, data: ./text.txt}\n"
    )
    (tmp_path / "text.txt").write_text("here it is. " * 100)
    (tmp_path / "notes.md").write_text(NOTES)
    return {path.name: path.read_text() for path in tmp_path.iterdir()}


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing slow may begin."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("slow work although the target is bad")

    monkeypatch.setattr("bigplan.cli.plan.plan_experiment", begun)
    monkeypatch.setattr("bigplan.engines.native.simulate_plan", begun)
    monkeypatch.setattr("bigplan.spec.detect.cluster.detect", begun)


@COMMANDS
@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("notes.md", "notes.md exists and is no "),
        ("no/such/file", "the folder no/such does not exist; create it first"),
        ("notes.md/file", "notes.md is a file, not a folder; name another folder"),
        (".", "is a folder"),
        ("x" * 300, "name too long; name another file"),
    ],
)
def test_a_bad_target_is_refused_before_the_slow_work(
    bigplan: Run,
    tmp_path: Path,
    inputs: dict[str, str],
    command: tuple[str, ...],
    target: str,
    message: str,
) -> None:
    code, out, err = bigplan(*command, target)
    assert (code, out) == (2, "")
    assert f"{command[-1]} {target}" in err
    assert message in err.replace("File name", "name")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == inputs


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    "command",
    [
        *((*PLANS, name) for name in ("e.yaml", "model.yaml", "small.yaml", "text.txt")),
        (*PLANS, "link"),
        (*TRACES, "p.yaml"),
        ("plan", "--model", "gpt2-xl", "--cluster", "small.yaml", "--out", "small.yaml"),
    ],
    ids=" ".join,
)
def test_an_input_is_never_replaced(
    bigplan: Run, tmp_path: Path, inputs: dict[str, str], command: tuple[str, ...]
) -> None:
    (tmp_path / "link").symlink_to("model.yaml")
    code, _, err = bigplan(*command)
    assert code == 2
    assert f"{command[-2]} {command[-1]} is an input of this command" in err
    assert "name another file" in err
    (tmp_path / "link").unlink()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == inputs


@COMMANDS
@pytest.mark.usefixtures("inputs")
def test_the_same_kind_is_replaced(
    bigplan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("bigplan.spec.detect.cluster.detect", lambda *_: small_cluster())
    monkeypatch.setattr("bigplan.cli.describe.find_spec", lambda _: None)
    target = tmp_path / "target"
    target.touch()  # as mktemp does
    for before in (None, "again"):
        assert bigplan(*command, target.name)[0] == 0, before
    read: dict[str, Callable[[], object]] = {
        "plan": lambda: load_plan(target),
        "detect": lambda: find_cluster("./target"),
        "simulate": lambda: json.loads(target.read_text())["traceEvents"],
    }
    assert read[command[0]]()


def test_a_plan_named_as_a_shipped_model_is_no_input(
    bigplan: Run, tmp_path: Path, inputs: dict[str, str]
) -> None:
    small = ("--model", "tiny-llama-test", "--cluster", "small.yaml", "--precision", "fp32")
    short = ("--seq-len", "32", "--global-batch", "4", "--no-what-if")
    for _ in range(2):
        code, _, err = bigplan("plan", *small, *short, "--out", "tiny-llama-test")
        assert code == 0, err


def test_a_pipe_or_device_holds_nothing_to_lose(bigplan: Run, inputs: dict[str, str]) -> None:
    assert bigplan(*PLANS, "/dev/null")[0] == 0


def _trace() -> str:
    return json.dumps(Timeline((Event(0, "gpu", "x", 0, 0, 0.0, 1.0),), 1.0).to_chrome())


@pytest.mark.parametrize(
    ("kind", "text", "replaced"),
    [
        (PLAN, "format: 1\ninputs:\n  model: abc\n", True),  # of an older bigplan: made anew
        (PLAN, "format: 5\nname: mine\n", False),
        (PLAN, "My plan\n\nformat: 5\ninputs:\n", False),
        (TRACE, _trace(), True),
        (TRACE, '{"events": [], "seconds": 1}', False),
        (TRACE, "\udcff", False),
        (CLUSTER, to_yaml(small_cluster()), True),
        (CLUSTER, "name: mine\nnodes: 3\n", False),
        (CLUSTER, "\udcff", False),
    ],
)
def test_what_is_of_the_kind(tmp_path: Path, kind: TargetKind, text: str, replaced: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(text.encode(errors="surrogateescape"))
    if replaced:
        require_target("--out", path, kind)
        return
    with pytest.raises(InputError, match=f"no {kind.noun} that could be replaced .*remove this"):
        require_target("--out", path, kind)


def test_a_file_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(InputError, match=rf"--out .*new\.yaml: {tmp_path} may not be written"):
        require_target("--out", tmp_path / "new.yaml", PLAN)
    old = tmp_path / "old.yaml"
    old.touch()
    with pytest.raises(InputError, match=r"old\.yaml may not be written; name another file"):
        require_target("--out", old, PLAN)
