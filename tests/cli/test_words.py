"""What is printed: no commands to a terminal, no long values, JSON with its format's version."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.core import TyperGroup
from typer.main import get_command

from bigplan.cli.app import app
from bigplan.cli.as_json import FORMAT
from bigplan.cli.options import ExperimentOptions
from bigplan.spec.experiment import Experiment
from tests.cli.conftest import Run
from tests.tiny import write_cluster

ESCAPE = "\x1b[31m"
LONG = "x" * 100_000
LONGEST = 2_500  # characters told of a long value: a list of names is the longest part
BASE = {"model": "tiny-llama-test", "cluster": "rtx-4090-workstation"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--model", f"a{ESCAPE}"),
        ("models", f"a{ESCAPE}.yaml"),
        ("clusters", f"{ESCAPE}.yaml"),
        ("explain", f"runs/{ESCAPE}"),
        (f"pl{ESCAPE}an",),
    ],
)
def test_no_argument_reaches_the_terminal_as_a_command(
    bigplan: Run, arguments: tuple[str, ...]
) -> None:
    code, out, err = bigplan(*arguments)
    assert (code, out) == (2, "")
    assert "\\x1b" in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('model: "a\\e[31m"\ncluster: dgx-h100\n', "e.yaml:1: `model` is 'a\\x1b[31m', which"),
        ('model: a\ncluster: dgx-h100\nset: {"\\e[31m": 1}\n', "e.yaml:3: `set` has the key"),
        ('model: a\ncluster: dgx-h100\ntraining: {data: "\\x9b"}\n', "character '\\x9b'"),
        ('model: a\ncluster: dgx-h100\n"\\e[31m": 1\n', "'\\x1b[31m'"),
    ],
)
def test_no_text_of_a_file_does(bigplan: Run, text: str, told: str) -> None:
    Path("e.yaml").write_text(text)
    code, out, err = bigplan("plan", "e.yaml")
    assert (code, out) == (2, "")
    assert told in err
    assert not {"\x1b", "\x9b"} & set(err)


def test_backslashes_and_lines_are_text(bigplan: Run, tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path)
    text = 'description: "C:\\\\u001b\\n\\ttwo lines, \\u2500"\n'
    lines = cluster.read_text().splitlines(keepends=True)
    cluster.write_text("".join(line for line in lines if not line.startswith("desc")) + text)
    code, out, err = bigplan("clusters", cluster)
    assert (code, err) == (0, "")
    assert "two lines" in out


@pytest.mark.parametrize(
    "field", [field.name for field in fields(ExperimentOptions) if "str" in str(field.type)]
)
def test_a_long_value_of_an_option_is_not_echoed_whole(bigplan: Run, field: str) -> None:
    flag = {"sequence_length": "seq-len", "settings": "set", "caps": "cap"}.get(field, field)
    arguments = [part for key, value in BASE.items() for part in (f"--{key}", value)]
    value = f"tp={LONG}" if field in ("settings", "caps", "hardware") else LONG
    nothing = ("--set", "pp=3")  # of one GPU, so that what is accepted is not planned for seconds
    code, out, err = bigplan("plan", *arguments, *nothing, f"--{flag.replace('_', '-')}", value)
    assert (code, out) == (2, "")
    assert len(err) < LONGEST


@pytest.mark.parametrize("key", [*Experiment.model_fields, "training.data", LONG[:9000]])
def test_a_long_value_of_a_file_is_not_either(bigplan: Run, key: str) -> None:
    outer, _, inner = key.partition(".")
    data: dict[str, Any] = {**BASE, outer: {inner: LONG} if inner else LONG}
    Path("e.yaml").write_text(json.dumps(data))
    code, out, err = bigplan("plan", "e.yaml")
    if code:
        assert (code, out) == (2, "")
    assert len(err) < LONGEST


def test_merging_is_named_as_unsupported(bigplan: Run) -> None:
    Path("e.yaml").write_text("model: &m a\ncluster: b\ntraining:\n  <<: *m\n")
    code, _, err = bigplan("plan", "e.yaml")
    assert code == 2
    assert err.startswith("bigplan: e.yaml:4: merging with `<<` is not supported; write the keys")


@pytest.mark.parametrize("rate", ["3e-5"])
def test_a_number_with_an_exponent_is_one(bigplan: Run, tmp_path: Path, rate: str) -> None:
    cluster = write_cluster(tmp_path)
    optimizer = f"training: {{optimizer: {{learning_rate: {rate}}}, global_batch: 4}}\n"
    Path("e.yaml").write_text(f"model: tiny-llama-test\ncluster: {cluster}\n{optimizer}")
    assert bigplan("plan", "e.yaml", "--out", "file.yaml")[0] == 0
    asked = ("--model", "tiny-llama-test", "--cluster", cluster, "--global-batch", 4)
    assert bigplan("plan", *asked, "--learning-rate", rate, "--out", "options.yaml")[0] == 0
    plans = [Path(name).read_text() for name in ("file.yaml", "options.yaml")]
    assert plans[0] == plans[1]
    assert "learning_rate: 3.0e-05" in plans[0]


@pytest.mark.parametrize(
    "command", [("models",), ("models", "gpt2-xl"), ("clusters",), ("clusters", "h200-1x")]
)
def test_json_begins_with_the_version_of_its_format(bigplan: Run, command: tuple[str, ...]) -> None:
    shown = json.loads(bigplan(*command, "--json")[1])
    assert next(iter(shown.items())) == ("format", FORMAT)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_accepted(bigplan: Run, mark: bytes) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300}
    Path("config.json").write_bytes(mark + json.dumps(config | {"n_positions": 128}).encode())
    Path("e.yaml").write_bytes(mark + b"model: config.json\ncluster: nowhere\n")
    assert bigplan("models", "config.json")[0] == 0
    assert "no cluster is called 'nowhere'" in bigplan("plan", "e.yaml")[2]


def _helps(command: Any) -> Iterator[str]:
    yield command.help or ""
    yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            yield from _helps(inner)


def test_no_word_of_help_is_taken_for_markup() -> None:
    """Rich swallows what stands in brackets, such as the name of an extra."""
    texts = [*_helps(get_command(app))]
    assert len(texts) > 100
    assert [text for text in texts if Text.from_markup(text).plain != text] == []
