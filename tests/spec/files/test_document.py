import contextlib
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from bigplan.errors import InputError
from bigplan.spec.files import document
from bigplan.spec.files.document import (
    Spec,
    dump_document,
    load_data,
    load_document,
    parse_document,
    parse_scalar,
    set_path,
    validate,
    write_text,
)
from bigplan.spec.files.reading import DESCRIPTION
from bigplan.spec.files.shipped import PACKAGE
from bigplan.units import Bytes
from tests.examples import examples


class Inner(Spec):
    nodes: int = Field(default=1, gt=0)
    address: str | None = None


class Outer(Spec):
    name: str
    rate: float = 1e-3
    kind: Literal["bf16", "fp32"] = "bf16"
    """dtype of compute"""
    memory: Bytes = 0
    launch: Inner = Inner()
    shapes: tuple[int, ...] = ()
    groups: list[Inner] = Field(default_factory=list)
    caps: dict[Literal["gpu", "host"], Bytes] = Field(default_factory=dict)
    either: str | Inner = "x"
    on: bool = False
    """whether it is on

    It may be
    off, too.
    """


def problems(text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse_document(text, Outer, "f.yaml")
    return str(caught.value).splitlines()


def test_unknown_key_gives_line_place_suggestion_and_what_is_allowed() -> None:
    assert problems("name: x\nlaunch:\n  adress: a\n  nodse: 2\n") == [
        "f.yaml:3: unknown key 'adress' in `launch`; did you mean 'address'?"
        " (allowed: nodes, address)",
        "f.yaml:4: unknown key 'nodse' in `launch`; did you mean 'nodes'?",
    ]


def test_unknown_key_far_from_all_others_has_no_suggestion() -> None:
    (line,) = problems("name: x\nzzz: 1\n")
    assert line.startswith("f.yaml:2: unknown key 'zzz' (allowed: name, rate,")


def test_missing_key() -> None:
    assert problems("rate: 1\n") == ["f.yaml:1: missing key 'name'; add `name: ...`"]


def test_wrong_unit() -> None:
    (line,) = problems("name: x\nmemory: 80 Gb\n")
    assert line.startswith("f.yaml:2: `memory`: '80 Gb' has the unit 'Gb'")
    assert line.endswith("such as '80 GiB'")


def test_paragraphs_about_a_field_are_sentences() -> None:
    (line,) = problems("name: x\non: 3\n")
    assert line.endswith("(whether it is on. It may be off, too)")


def test_wrong_unit_inside_a_mapping() -> None:
    (line,) = problems("name: x\ncaps:\n  host: 1 GiB\n  gpu: 3 m\n")
    assert line.startswith("f.yaml:4: `caps.gpu`: '3 m' has the unit 'm'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: 3", "`name` is 3, which must be text (put it in quotes)"),
        ("name: x\nrate: fast", "`rate` is 'fast', which must be a number"),
        ("name: x\nrate: .inf", "`rate` is inf, which must be a finite number"),
        ("name: x\nkind: fp16", "must be one of bf16, fp32; did you mean 'bf16'? (dtype of"),
        ("name: x\nlaunch: {nodes: '2'}", "`launch.nodes` is '2', which must be a whole number"),
        ("name: x\nlaunch: {nodes: 8k}", "a whole number, written out: 1k may be 1000 or 1024"),
        ("name: x\nlaunch: {nodes: 2.0}", "`launch.nodes` is 2.0, which must be a whole number"),
        ("name: x\nlaunch: {nodes: true}", "`launch.nodes` is True, which must be a whole number"),
        ("name: x\nlaunch: {nodes: 0}", "`launch.nodes` is 0, which must be greater than 0"),
        ("name: x\nlaunch: 3", "`launch` is 3, which must be keys and values"),
        ("name: x\nshapes: 3", "`shapes` is 3, which must be a list"),
        ("name: x\nshapes: [1, a]", "`shapes.1` is 'a', which must be a whole number"),
        (
            "name: x\ncaps: {gpo: 1 B}",
            "key 'gpo' in `caps`; did you mean 'gpu'? (allowed: gpu, host)",
        ),
        ("name: x\non: yes", "`on` is 'yes', which must be true or false"),
    ],
)
def test_rules(text: str, expected: str) -> None:
    found = problems(text)
    assert len(found) == 1
    assert expected in found[0]


def test_several_problems_are_listed_by_line() -> None:
    found = problems("name: x\nrate: a\nlaunch:\n  nodes: 0\nmemory: 3 q\n")
    assert [line.split(":")[1] for line in found] == ["2", "4", "5"]


def test_line_of_an_item_in_a_list() -> None:
    (line,) = problems("name: x\ngroups:\n  - nodes: 1\n  - nodes: -1\n")
    assert line.startswith("f.yaml:4: `groups.1.nodes` is -1")


def test_union_reports_the_alternative_that_was_meant() -> None:
    (line,) = problems("name: x\neither:\n  nodes: 0\n")
    assert line.startswith("f.yaml:3: `either.nodes` is 0")
    (line,) = problems("name: x\neither: 3\n")
    assert "must be text" in line
    assert "keys and values" in line


def test_duplicate_keys() -> None:
    assert problems("name: x\nrate: 1\nname: y\nrate: 2\n") == [
        "f.yaml:3: duplicate key 'name' (first on line 1); remove one",
        "f.yaml:4: duplicate key 'rate' (first on line 2); remove one",
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: [x", "f.yaml:1: not YAML"),
        ("name: x\n\tb: 1", "f.yaml:2: not YAML"),
        ("name: x\n---\nname: y", "not YAML"),
        ("a: &a [*a]", "contains itself"),
        ("name: !!python/object:os.system x", "has the tag"),
        ("name: !!int abc", "has the tag"),
        ("? [a]\n: b", "keys must be plain words"),
        ("", "expected keys and values, got nothing; keys: name, rate"),
        ("- 1", "expected keys and values, got [1]"),
        ("name: \x00", "not YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_text_that_is_no_mapping(text: str, part: str) -> None:
    assert part in problems(text)[0]


def test_aliases_are_written_out_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "DESCRIPTION", DESCRIPTION // 100)  # 1 s less
    assert load_data("a: &a [1, 2]\nb: *a")[0] == {"a": [1, 2], "b": [1, 2]}
    lines = ["a0: &a0 [1, 1]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)
    ]
    with pytest.raises(InputError, match=r"f.yaml:\d+: not YAML: .* aliases written out .* large"):
        load_data("\n".join(lines), "f.yaml")


def test_values_are_counted_before_they_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_NODES", 100)
    assert len(load_data(f"a: [{'x,' * 95}]")[0]["a"]) == 95
    with pytest.raises(InputError, match=r"f.yaml:1: not YAML: more than \d+ values"):
        load_data(f"a: [{'x,' * 100}]", "f.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("010", 10),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("2026-11-20", "2026-11-20"),
        ("8 GiB", "8 GiB"),
        ("'3'", "3"),
        ("0x10", "0x10"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["C"]), max_size=20)
)
_KEYS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)


@given(
    st.dictionaries(
        _KEYS,
        st.recursive(
            _SCALARS,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    )
)
@example({"0": "0E0"})  # text in YAML 1.1, so PyYAML writes it bare; a number in YAML 1.2
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    assert load_data(dump_document(data))[0] == data


@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_an_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        parse_document(text, Outer)


def test_load_document(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("name: x\nshapes: [1, 2]\nmemory: 1 KiB\nrate: 1e-4\n")
    loaded = load_document(path, Outer)
    assert (loaded.shapes, loaded.memory, loaded.rate) == ((1, 2), 1024, 1e-4)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; check the path"):
        load_document(tmp_path / "absent.yaml", Outer)
    with pytest.raises(InputError, match="is a folder"):
        load_document(tmp_path, Outer)
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff")
    with pytest.raises(InputError, match="byte 6 is not UTF-8"):
        load_document(tmp_path / "bytes.yaml", Outer)


def test_text_is_written_as_utf_8_or_told(tmp_path: Path) -> None:
    write_text(tmp_path / "a.yaml", "name: é\n", "model")
    assert (tmp_path / "a.yaml").read_bytes() == b"name: \xc3\xa9\n"
    with pytest.raises(InputError, match=r"cannot write the model to .*; name another file"):
        write_text(tmp_path, "", "model")


def test_validate_has_no_lines() -> None:
    with pytest.raises(InputError) as caught:
        validate({"name": "x", "rate": "y"}, Outer, "command line")
    assert str(caught.value) == "command line: `rate` is 'y', which must be a number"


def test_specs_are_frozen_and_hashable() -> None:
    a, b = Outer(name="x", caps={"gpu": 1}), Outer(name="x", caps={"gpu": 1})
    assert a == b
    assert hash(a) == hash(b)
    assert hash(a) != hash(Outer(name="y"))
    with pytest.raises(ValueError, match="frozen"):
        a.name = "z"  # type: ignore[misc]


def test_set_path() -> None:
    data = {"a": {"b": 1, "c": 2}}
    assert set_path(data, "a.b", "1e-4") == {"a": {"b": 1e-4, "c": 2}}
    assert data == {"a": {"b": 1, "c": 2}}
    assert set_path({}, "training.global_batch", "512") == {"training": {"global_batch": 512}}
    assert set_path({"a": None}, "a.b", 3) == {"a": {"b": 3}}
    with pytest.raises(InputError, match="'a' is 3, which holds no keys"):
        set_path({"a": 3}, "a.b", "1")
    with pytest.raises(InputError, match="is not a key"):
        set_path({}, "a..b", "1")


class Worked(Spec):
    side: int

    @cached_property
    def area(self) -> int:
        return self.side**2


def test_a_copy_with_other_values_forgets_what_followed_from_the_old_ones() -> None:
    first = Worked(side=2)
    assert first.area == 4
    assert first.model_copy(update={"side": 3}).area == 9
    assert first.model_copy() == first


PIECES = (
    *"\n:-,{}[]|>&*'\"#\\ ~",
    "- ",
    ": ",
    "a",
    "key: ",
    "1",
    "5%",
    "<<: *a",
    "---\n",
    "!!int ",
    "\t",
    "?",
)


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML has no parser in C here")
@settings(max_examples=examples(1000))
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), st.integers(0, 2000))
def test_both_parsers_read_the_same(piece: str, place: int) -> None:
    """And say the same of what is no YAML."""
    shipped = (PACKAGE / "models" / "llama-3-8b.yaml").read_text()
    place %= len(shipped)
    text = shipped[:place] + piece + shipped[place:]

    def told() -> object:
        try:
            return load_data(text)[0]
        except InputError as error:
            return str(error)

    fast = told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", False)
        assert told() == fast
