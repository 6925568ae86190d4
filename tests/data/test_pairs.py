"""Pairs of responses: read from rows, kept whole, packed into sequences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bigplan.data.documents import bounds, mean_document, pieces
from bigplan.data.pairs import PackedPairs, check_unpaired
from bigplan.data.preferences import PairFields
from bigplan.data.prepare import Preparation, prepare
from bigplan.data.prepared import PreparedIndex, check_folder, open_tokens, read_index
from bigplan.errors import InputError
from tests.data.texts import documents, write_rows, write_texts

TEXTS = PairFields("prompt", "chosen", "rejected")
ROWS = [{"prompt": "q" * n, "chosen": "yes" * n, "rejected": "no"} for n in range(1, 9)]


def prepared(folder: Path, rows: object, **changes: object) -> tuple[Path, PreparedIndex]:
    """Rows of texts in a folder of their own."""
    folder.mkdir(exist_ok=True)
    source = write_rows(folder / "rows.jsonl", rows)  # type: ignore[arg-type]
    wanted = Preparation((source,), TEXTS, **changes)  # type: ignore[arg-type]
    return folder / "out", prepare(wanted, folder / "out")[""]


def test_each_response_is_a_document_with_its_prompt(tmp_path: Path) -> None:
    folder, index = prepared(tmp_path, ROWS)
    found = documents(folder)
    assert [one.text for one in found[:4]] == ["qyes", "qno", "qqyesyes", "qqno"]
    assert found[2].counts == [False] * 2 + [True] * 7  # the end token is counted
    assert index.paired
    assert open_tokens(folder).paired
    assert check_folder(folder) == read_index(folder) == index


def test_long_pairs_are_left_out_and_counted(tmp_path: Path) -> None:
    sizes = [2 * n + 3 * n + 2 + 2 for n in range(1, 9)]
    folder, index = prepared(tmp_path, ROWS, longest_pair=sizes[4])
    assert index.left_out == 3
    assert index.documents == len(documents(folder)) == 10
    with pytest.raises(InputError, match=f"all 8 pairs for training.* give {sizes[0]} at least"):
        prepared(tmp_path / "none", ROWS, longest_pair=2)


def test_pairs_are_whole_in_one_part_or_the_other(tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "rows.jsonl", [row | {"prompt": f"{i}?"} for i, row in enumerate(ROWS * 4)]
    )
    parts = prepare(Preparation((source,), TEXTS, validation_fraction=0.4), tmp_path / "out")
    assert sum(index.documents for index in parts.values()) == 64
    for part in parts:
        texts = [one.text for one in documents(tmp_path / "out" / part)]
        assert all(
            a.split("?")[0] == b.split("?")[0] for a, b in zip(texts[::2], texts[1::2], strict=True)
        )


def test_sequences_have_whole_pairs_and_padding(tmp_path: Path) -> None:
    folder, _ = prepared(tmp_path, ROWS)
    tokens, length = open_tokens(folder), 50
    packed = PackedPairs.of(tokens, length)
    numbers = [packed.numbers(i).tolist() for i in range(packed.sequences)]
    assert [n for each in numbers for n in each] == list(range(8))
    sizes = np.diff(packed.ends, prepend=0)
    for i, each in enumerate(numbers):
        start, stop = packed.stretch(i)
        assert stop - start == sizes[each].sum() <= length
        assert packed.count(i) == len(each)
        if i + 1 < packed.sequences:  # the next pair would not have fitted
            assert stop - start + sizes[each[-1] + 1] > length
        found = bounds(tokens, start, stop - start, length)
        assert found.shape == (2, length)
        ends = np.unique(found[1]).tolist()
        assert len(ends) == 2 * len(each) + (stop - start < length)
        assert ends[-1] == length
    lengths = [
        n
        for i in range(packed.sequences)
        for start, stop in [packed.stretch(i)]
        for n in [*np.diff(pieces(tokens, start, stop - start), prepend=0), length - stop + start]
    ]
    mean = sum(n * n for n in lengths) / sum(lengths)
    assert mean_document(tokens, packed, length) == pytest.approx(mean)


def test_data_for_something_else_is_refused(tmp_path: Path) -> None:
    folder, _ = prepared(tmp_path, ROWS)
    with pytest.raises(InputError, match=r"has 1 pair of 8 longer than sequence_length 43 \(the"):
        PackedPairs.of(open_tokens(folder), 43)
    with pytest.raises(InputError, match="train on them with --preference dpo"):
        check_unpaired(open_tokens(folder))
    prepare(Preparation((write_texts(tmp_path / "a.jsonl", ["one"]),)), tmp_path / "plain")
    with pytest.raises(InputError, match="has no pairs of responses; run `bigplan data prepare`"):
        PackedPairs.of(open_tokens(tmp_path / "plain"), 43)


def chat(folder: Path) -> Path:
    """A tokenizer's folder with a template; the tokens are not used here."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def said(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


def test_conversations_share_a_prompt_that_is_named_or_found(tmp_path: Path) -> None:
    asked, good, bad = said("user", "hi?"), said("assistant", "hello"), said("assistant", "go")
    named = PairFields("p", "c", "r", chat(tmp_path))
    found = PairFields(None, "c", "r", chat(tmp_path))
    one = named.documents({"p": [asked], "c": [good], "r": [bad]}, "here")
    other = found.documents({"c": [asked, good], "r": [asked, bad]}, "here")
    assert one == other
    assert [tuple(span) for span in one[0]] == [
        ("<user>hi?\n<assistant>", False),
        ("hello\n", True),
        ("", False),
    ]
    assert one[1][1].text == "go\n"


ASKED, ANSWERED = said("user", "a"), said("assistant", "b")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"c": "a", "r": "b"}, "add --prompt-field"),
        ({"c": [ASKED], "r": [said("user", "b")]}, "begin with no common message"),
        ({"c": [], "r": []}, "not a list of messages"),
        ({"c": [ASKED, ASKED], "r": [ASKED, said("user", "c")]}, "not 'assistant'"),
        ({"c": [ASKED, ANSWERED], "r": [ASKED, ANSWERED]}, "are the same"),
    ],
)
def test_rows_that_are_no_pairs_are_told(tmp_path: Path, row: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        PairFields(None, "c", "r", chat(tmp_path)).documents(row, "a.jsonl:3")
    assert str(caught.value).startswith("a.jsonl:3: ")


def test_a_prompt_of_another_type_is_told() -> None:
    row = {"p": "text", "c": [said("assistant", "a")], "r": [said("assistant", "b")]}
    with pytest.raises(InputError, match="leave --prompt-field out"):
        PairFields("p", "c", "r").documents(row, "here")
    with pytest.raises(InputError, match="need a --tokenizer"):
        PairFields("p", "c", "r").documents(row | {"p": [said("user", "q")]}, "here")
