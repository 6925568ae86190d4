"""Files that are no such files: an error of ours, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigplan.errors import InputError
from bigplan.intake import TOOLS, Given
from tests.examples import examples
from tests.intake.files import DEEPSPEED, FILES, FSDP, INLINE, MEGATRON_LM, SCRIPT, priced

MALFORMED = {
    "ds_config.json": ["", "[]", "3", '{"zero_optimization": 3}', "{", '{"a": 1, "a": 2}'],
    "fsdp.yaml": ["", "- 1", "distributed_type: TPU", "distributed_type: [a", "x: 1"],
    "pretrain.sh": ["", "echo 'hello", "nothing here", "--seq-length", "--seq-length -3 --bf16"],
    "llama3_8b.toml": ["", "x = ", "[model", "[a]\nb = 1", "[training]\nseq_len = 'x'"],
}
DEEP = {
    "ds_config.json": '{"a":' * 5000,
    "fsdp.yaml": "[" * 5000,
    "llama3_8b.toml": "x = " + "[" * 100000,
}
CASES = [(name, text) for name, texts in MALFORMED.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), [*CASES, *DEEP.items()])
def test_a_malformed_file_is_told(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        TOOLS[FILES[name][0]](tmp_path / name, Given())
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[model]\nn = nan", "[model]\nn = inf", f"[model]\nn = {10**200}"]
)
def test_toml_has_the_limits_of_yaml(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(InputError, match=r"a\.toml"):
        TOOLS["torchtitan"](tmp_path / "a.toml", Given())


def test_the_value_the_rule_and_the_remedy_are_told(tmp_path: Path) -> None:
    for key, value, told in (
        ("stage", '"x"', "zero_optimization.stage is 'x', which must be a number; correct it"),
        ("stage", "7", "zero_optimization.stage is 7, which must be 0, 1, 2 or 3; correct it"),
        ("sub_group_size", "1.5", "sub_group_size is 1.5, which must be a whole number"),
        ("offload_param", '{"device": "tape"}', "device is 'tape', which must be one of none"),
    ):
        (tmp_path / "d.json").write_text(f'{{"zero_optimization": {{"{key}": {value}}}}}')
        with pytest.raises(InputError) as caught:
            TOOLS["deepspeed"](tmp_path / "d.json", Given())
        assert told in str(caught.value)


def test_another_json_is_told_from_deepspeeds(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "hidden_size": 64, "sliding_window": null}')
    with pytest.raises(InputError, match="none of DeepSpeed's keys"):
        TOOLS["deepspeed"](file, Given())
    file.write_text("{}")  # all is left to the command line
    TOOLS["deepspeed"](file, Given())


ODD = st.sampled_from(
    [
        None,
        True,
        False,
        "",
        "auto",
        "x",
        "-1",
        -1,
        0,
        1,
        3,
        0.5,
        1e30,
        10**30,
        [],
        [1],
        {},
        {"a": 1},
    ]
)


def places(data: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (*at, key)
        if isinstance(value, Mapping):
            yield from places(value, (*at, key))


def changed(data: Mapping[str, Any], at: tuple[str, ...], value: object) -> dict[str, Any]:
    key, *rest = at
    inner = changed(data[key], tuple(rest), value) if rest else value
    return {**data, key: inner}


SAMPLES = [
    ("ds_config.json", json.loads(DEEPSPEED)),
    *(("fsdp.yaml", yaml.safe_load(text)) for text in (FSDP, INLINE, MEGATRON_LM)),
]


@given(data=st.data())
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_value_anywhere_is_priced_or_told(data: st.DataObject, tmp_path: Path) -> None:
    name, sample = data.draw(st.sampled_from(SAMPLES))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(list(places(sample))))
        sample = changed(sample, at, data.draw(ODD))
    (tmp_path / name).write_text(json.dumps(sample))
    with suppress(InputError):
        found = TOOLS[FILES[name][0]](tmp_path / name, Given())
        priced(found, training__sequence_length=512, set={"micro_batch": 2})


@given(data=st.data())
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_script_is_read_or_told(data: st.DataObject, tmp_path: Path) -> None:
    words = SCRIPT.split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(
            st.sampled_from(["", "$X", "$((1/0))", "--", "(", "'", "0", "-1", "x"])
        )
    path = tmp_path / "pretrain.sh"
    path.write_text(" ".join(words))
    with suppress(InputError):
        priced(TOOLS["megatron"](path, Given()), training__sequence_length=512)
