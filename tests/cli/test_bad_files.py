"""Files and values that once gave a traceback, never ended, or planned something else."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.wording import tells

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
LONGEST_TOLD = 2000  # characters: a list of allowed keys and a path are the longest parts


def _refused(bigplan: Run, *arguments: object) -> str:
    code, out, err = bigplan(*arguments)
    assert (code, out) == (2, "")
    assert len(err) < LONGEST_TOLD
    return err


def _config(text: str) -> Path:
    path = Path("config.json")
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("layer_types", 5, "a list of texts"),
        ("layer_types", [["x"]], "a list of texts"),
        ("max_window_layers", "3", "a whole number of at least 0"),
        ("hidden_act", ["silu"], "text"),
        ("hidden_act", {"a": 1}, "text"),
        ("tie_word_embeddings", "no", "true or false"),
        ("rope_scaling", [1], "an object"),
    ],
)
def test_wrong_types_in_a_config(bigplan: Run, key: str, value: object, wanted: str) -> None:
    # A list of kinds of layers stands before the keys of a window, which it replaces.
    config = CONFIG | {"use_sliding_window": True, key: value}
    told = _refused(bigplan, "models", _config(json.dumps(config, indent=0)))
    line = list(config).index(key) + 2
    assert f"config.json:{line}: `{key}` is " in told
    assert f"which must be {wanted}; correct it" in told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("[" * 10_000 + "]" * 10_000, "config.json:2: nested too deeply: more than 64"),
        ("9" * 5_000, "config.json:2: a number of 5000 characters ('9999"),
        ("1" + "0" * 400, "config.json:2: a number of 401 characters"),
        ("1e400", "config.json:2: 1e400 is not a finite number"),
        ("NaN", "config.json:2: NaN is not a finite number"),
        ("-Infinity", "config.json:2: -Infinity is not a finite number"),
        ('1,\n"rope_theta": 2', "config.json:3: duplicate key 'rope_theta' (first on line 2)"),
        ('{"a": {"b": 1,\n"\\u0062": 2}}', "config.json:3: duplicate key 'b' (first on line 2)"),
    ],
)
def test_json_out_of_bounds(bigplan: Run, value: str, told: str) -> None:
    text = json.dumps(CONFIG)[:-1] + f',\n"rope_theta": {value}}}'
    assert told in _refused(bigplan, "models", _config(text))


_BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
    for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (_BOMB, "not YAML: with its aliases written out the text is too large"),
        ("name: " + "[" * 10_000, "m.yaml:1: not YAML: nested too deeply"),
        ("name: " + "{a: " * 10_000, "m.yaml:1: not YAML: nested too deeply"),
        ("name: x\nlayers: " + "9" * 5_000, "m.yaml:2: a number of 5000 characters"),
        ("name: x\nlayers: 1" + "0" * 400, "m.yaml:2: a number of 401 characters"),
        ("name: x\nrope_theta: 1e400", "m.yaml:2: 1e400 is not a finite number"),
        ("name: x\nheads: 2\nheads: 3", "m.yaml:3: duplicate key 'heads' (first on line 2)"),
        ("name: x\nlayers: " + "x" * 5_000, "m.yaml:2: `layers` is 'xxxx"),
        ("name: x\n" + "y" * 500 + ": 1", "m.yaml:2: unknown key 'yyyy"),
        ("".join(f"k{i}: 1\n" for i in range(1000)), "more is wrong than these 20"),
        ("name: *" + "y" * 5_000, "m.yaml:1: not YAML: found undefined alias 'yyyy"),
        ("name: a\x00b", "m.yaml:1: not YAML: it holds the character"),
    ],
)
def test_yaml_out_of_bounds(bigplan: Run, text: str, told: str) -> None:
    Path("m.yaml").write_text(text)
    code, _, err = bigplan("models", "m.yaml")
    assert code == 2
    assert told in err
    assert max(map(len, err.splitlines())) < LONGEST_TOLD


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


def test_pipes_and_devices_are_not_waited_for(bigplan: Run, tmp_path: Path) -> None:
    pipe = _pipe(tmp_path / "pipe.yaml")
    zero = _link(tmp_path / "zero.json", "/dev/zero")
    commands = (
        ("models", pipe),
        ("models", zero),
        ("clusters", pipe),
        ("plan", pipe),
        ("plan", "--model", zero, "--cluster", pipe),
        ("validate", "--rows", pipe),
        ("validate", "--rows", zero),
        ("explain", pipe),
        ("simulate", zero),
        ("launch", pipe),
        ("data", "prepare", pipe, "--out", "out", "--format", "jsonl"),
    )
    for command in commands:
        assert tells(_refused(bigplan, *command), "pipe", "regular file")


def test_a_link_to_a_regular_file_is_read(bigplan: Run, tmp_path: Path) -> None:
    link = _link(tmp_path / "link.json", str(_config(json.dumps(CONFIG)).absolute()))
    assert bigplan("models", link)[0] == 0


def test_a_file_of_54_megabytes(bigplan: Run, tmp_path: Path) -> None:
    for name in ("large.yaml", "large.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(54_000_000)
        assert "has more than 16 MiB" in _refused(bigplan, "models", name)


@pytest.mark.parametrize(
    "name", ["m" * 5_000, "./" + "m" * 5_000, "a\0b", "~nobody-of-that-name/m"]
)
def test_names_that_no_file_can_have(bigplan: Run, name: str) -> None:
    for command in (
        ("plan", "--model", name, "--cluster", "dgx-h100"),
        ("plan", "--model", "gpt2-xl", "--cluster", name),
        ("plan", name),
        ("models", name),
        ("clusters", name),
    ):
        _refused(bigplan, *command)


@pytest.mark.parametrize("number", ["1" + "0" * 18, "1" + "0" * 400, "9" * 5_000])
def test_huge_numbers_on_the_command_line(bigplan: Run, number: str) -> None:
    base = ("plan", "--model", "gpt2-xl", "--cluster", "dgx-h100")
    for option in (
        ("--nodes", number),
        ("--set", f"tp={number}"),
        ("--seq-len", number),
        ("--global-batch", number),
        ("--steps", number),
        ("--seed", f"1{number}"),
        ("--cap", f"gpu={number}{number}GiB"),
    ):
        code, out, err = bigplan(*base, *option)
        assert (option[0], code, out) == (option[0], 2, "")
        assert "No such option" not in err


def test_gpus_beyond_any_node(bigplan: Run, tmp_path: Path) -> None:
    text = bigplan("clusters", "dgx-h100")[1]
    (tmp_path / "c.yaml").write_text(text.replace("gpus_per_node: 8", f"gpus_per_node: {10**18}"))
    told = _refused(bigplan, "plan", "--model", "gpt2-xl", "--cluster", "c.yaml")
    assert tells(told, "gpus_per_node", "1000000000000000000", "1024")


def test_sizes_of_a_step_that_are_no_numbers(bigplan: Run) -> None:
    base = ("plan", "--model", "gpt2-xl", "--cluster", "dgx-h100")
    told = _refused(bigplan, *base, "--seq-len", "8k")
    assert tells(told, "sequence_length", "8k", "1000 or 1024")
    told = _refused(bigplan, *base, "--global-batch", "many")
    assert tells(told, "global_batch", "many", "whole number")


def test_a_cluster_of_no_drives_says_how_to_plan_without(bigplan: Run) -> None:
    base = ("plan", "--model", "gpt2-xl", "--cluster", "rtx-4090-workstation")
    told = _refused(bigplan, *base, "--hardware", "nvme.drives=0")
    assert tells(told, "drives", "0", "--cap nvme=0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--model", "closed", "--cluster", "dgx-h100"),
        ("plan", "--model", "llama-3-8b", "--cluster", "closed/mine.yaml"),
        ("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--lora-weights", "closed"),
        ("data", "prepare", "closed/a.txt", "--out", "there"),
        ("report", "closed"),
    ],
)
def test_a_folder_that_the_user_may_not_look_into(
    bigplan: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Another user's, on a machine that many share. Root may look everywhere, so it is played."""
    Path("closed").mkdir()
    looked = Path.stat

    def stat(path: Path, **how: Any) -> os.stat_result:
        if "closed" in path.parts[:-1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return looked(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    assert tells(_refused(bigplan, *arguments), "closed/", "Permission denied", "name another")


def test_a_name_that_is_longer_than_any_file_s(bigplan: Run) -> None:
    told = _refused(bigplan, "data", "prepare", "a" * 300 + ".txt", "--out", "there")
    assert tells(told, "File name too long", "name another")
