"""What goes in comes out: texts, loss masks, documents, splits; nothing is lost on the way."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bigplan.data import packer, sources
from bigplan.data.prepare import Preparation, prepare
from bigplan.data.prepared import INDEX, MASK, TOKENS, Tokens, check_folder, open_tokens
from bigplan.data.sources import Fields
from bigplan.data.tokenizer import BYTE_END
from bigplan.errors import InputError
from bigplan.launcher.inputs import unreadable_data
from bigplan.spec.training import ValidationSpec
from tests.data.texts import documents, write_pairs, write_texts
from tests.examples import examples
from tests.runtime.plans import tiny_model, tiny_training

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=12)
PAIRS = Fields(prompt="prompt", response="response")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _prepared(source: Path, **changes: object) -> Path:
    out = Path(tempfile.mkdtemp(dir=source.parent)) / "out"
    prepare(replace(Preparation((source,)), **changes), out)  # type: ignore[arg-type]
    return out


@given(TEXTS)
@settings(max_examples=examples(40), deadline=None)
def test_documents_come_out_as_they_went_in(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        out = _prepared(write_texts(Path(name) / "a.jsonl", texts))
        found = documents(out)
        assert [document.text for document in found] == texts
        assert all(document.ids[-1] == BYTE_END for document in found)
        assert not (out / MASK).exists()
        check_folder(out)


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), min_size=1, max_size=9))
@settings(max_examples=examples(40), deadline=None)
def test_the_loss_counts_responses_and_their_ends(pairs: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        out = _prepared(write_pairs(Path(name) / "a.jsonl", pairs), fields=PAIRS)
        for (prompt, response), document in zip(pairs, documents(out), strict=True):
            assert document.text == prompt + response
            before = len(prompt.encode())
            assert document.counts == [False] * before + [True] * (len(document.ids) - before)
        tokens = open_tokens(out)
        whole = [c for document in documents(out) for c in document.counts]
        for start in range(len(tokens)):
            assert tokens.counted(start, len(tokens)).tolist() == whole[start:]
        check_folder(out)


@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=60),
    st.integers(1, 9),
    st.sampled_from((0.0, 0.3)),
)
@example("\ufeffa", 1, 0.0)
@example("\ufeff", 2, 0.3)
@settings(max_examples=examples(60), deadline=None)
def test_a_text_is_whole_whatever_the_block(text: str, block: int, fraction: float) -> None:
    """Blocks of a few bytes cut characters and lines anywhere; a byte-order mark is no text."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        source = Path(name) / "a.txt"
        text += "\n" + "z\n" * (3 + len(text.encode()))  # there is a line to hold out
        source.write_bytes(text.encode())
        out = _prepared(source, validation_fraction=fraction)
        parts = [out / "train", out / "validation"] if fraction else [out]
        found = [documents(part) for part in parts]
        assert all(len(part) == 1 for part in found)
        assert "".join(part[0].text for part in found) == text.removeprefix("\ufeff")
        if fraction:
            assert found[0][0].text.endswith("\n")


def test_a_text_without_a_line_to_hold_out_is_refused(folder: Path) -> None:
    (folder / "a.txt").write_text("one line, and nothing after it")
    wanted = Preparation((folder / "a.txt",), validation_fraction=0.5)
    with pytest.raises(InputError, match="no document is left for validation"):
        prepare(wanted, folder / "out")
    assert [path.name for path in folder.iterdir()] == ["a.txt"]


def test_equal_documents_are_held_out_together(folder: Path) -> None:
    texts = [f"text {i % 100}" for i in range(1000)]
    out = _prepared(write_texts(folder / "a.jsonl", texts), validation_fraction=0.2)
    train, held = ([d.text for d in documents(out / part)] for part in ("train", "validation"))
    assert sorted(train + held) == sorted(texts)
    assert not set(train) & set(held)
    assert 5 <= len(set(held)) <= 40  # of 100, 20 on average


def test_parquet_says_what_jsonl_says(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pairs = [(f"prompt {i}", f"résponse {i}") for i in range(700)]
    columns = {"response": [r for _, r in pairs], "prompt": [p for p, _ in pairs]}
    parquet.write_table(pyarrow.table(columns), folder / "a.parquet", row_group_size=300)
    lines = write_pairs(folder / "a.jsonl", pairs)
    one, other = (_prepared(path, fields=PAIRS) for path in (folder / "a.parquet", lines))
    assert documents(one) == documents(other)
    assert (one / TOKENS).read_bytes() == (other / TOKENS).read_bytes()


def test_a_tokenizer_file_gives_its_ids(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "<eos>", *(f"w{i}" for i in range(300))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    source = write_texts(folder / "a.jsonl", ["w1 w299 w7", "nothing", ""])
    out = _prepared(source, tokenizer=folder)
    assert [document.ids for document in documents(out)] == [[3, 301, 9, 1], [0, 1], [1]]
    index = check_folder(out)
    assert (index.dtype, index.vocabulary, index.largest) == ("uint16", 302, 301)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(InputError, match=r"token 301.*vocabulary of 300 \(0 to 299\)"):
        _prepared(source, tokenizer=folder, limit=("small", 300))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        (b'{"text": "a"}\n\n{"txt": "b"}\n', r"a\.jsonl:3: no field 'text'; it has txt"),
        (b'{"text": "a"}\n["b"]\n', r"a\.jsonl:2: a JSON list"),
        (b'{"text": 5}\n', r"a\.jsonl:1: field 'text' is '5', not text"),
        (b'{"text": "\\ud800"}\n', r"a\.jsonl:1: .*surrogate"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not UTF-8"),
        (b"\n\n", r"a\.jsonl is empty"),
        (b"", r"a\.jsonl is empty"),
    ],
)
def test_bad_lines_are_named(folder: Path, content: bytes, message: str) -> None:
    (folder / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        prepare(Preparation((folder / "a.jsonl",)), folder / "out")
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]


def test_bad_texts_are_named(folder: Path) -> None:
    bad = folder / "a.txt"
    bad.write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(InputError, match=r"a\.txt:2: not UTF-8"):
        prepare(Preparation((bad,)), folder / "out")
    bad.write_bytes("é".encode()[:1])
    with pytest.raises(InputError, match=r"a\.txt:1: not UTF-8"):
        prepare(Preparation((bad,)), folder / "out")
    bad.write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.txt is empty"):
        prepare(Preparation((bad,)), folder / "out")
    with pytest.raises(InputError, match="no such file"):
        prepare(Preparation((folder / "b.txt",)), folder / "out")
    (folder / "c.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"\.bin says no format; add --format"):
        prepare(Preparation((folder / "c.bin",)), folder / "out")


def test_a_target_is_replaced_only_when_told_and_only_if_ours(folder: Path) -> None:
    source, out = folder / "a.txt", folder / "out"
    source.write_text("old")
    prepare(Preparation((source,)), out)
    source.write_text("new!")
    with pytest.raises(InputError, match="not empty: name another folder, or add --force"):
        prepare(Preparation((source,)), out)
    assert documents(out)[0].text == "old"
    prepare(Preparation((source,)), out, force=True)
    assert documents(out)[0].text == "new!"
    source.write_bytes(b"\xff")
    with pytest.raises(InputError, match="UTF-8"):
        prepare(Preparation((source,)), out, force=True)
    assert documents(out)[0].text == "new!"
    (out / "notes.txt").write_text("mine")
    source.write_text("newer")
    with pytest.raises(InputError, match=r"notes\.txt, which was not prepared"):
        prepare(Preparation((source,)), out, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "out"]


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, content: object) -> None:
        raise OSError(28, "No space left on device")

    (folder / "a.txt").write_text("text")
    monkeypatch.setattr(packer._File, "write", full)
    with pytest.raises(InputError, match=r"No space left on device; nothing .* behind\. Make room"):
        prepare(Preparation((folder / "a.txt",)), folder / "out")
    with pytest.raises(InputError, match=r"cannot be created: .*; name another folder"):
        prepare(Preparation((folder / "a.txt",)), folder / "a.txt" / "out")
    assert [path.name for path in folder.iterdir()] == ["a.txt"]


def test_what_a_killed_preparation_left_goes_and_what_a_running_one_has_stays(
    folder: Path,
) -> None:
    (folder / "a.txt").write_text("text")
    killed, running = folder / ".out.12345678.partial", folder / ".out.abcdefgh.partial"
    for each in (killed, running):
        each.mkdir()
        (each / "tokens.bin").write_text("half")
    held = os.open(running, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    prepare(Preparation((folder / "a.txt",)), folder / "out")
    os.close(held)
    assert {path.name for path in folder.iterdir()} == {"a.txt", "out", running.name}


def test_validation_that_would_count_nothing_is_refused(folder: Path) -> None:
    out = _prepared(write_pairs(folder / "a.jsonl", [("q" * 100, "yes")]), fields=PAIRS)

    def told(batches: int) -> list[str]:
        validation = ValidationSpec(data=str(out), every=1, batches=batches)
        training = tiny_training(2, validation=validation)
        return [str(each) for each in unreadable_data(tiny_model(), training)]

    assert "counts none of its first 96 tokens" in "".join(told(3))  # of 2 x 16 each
    assert told(4) == []


def test_damage_is_found(folder: Path) -> None:
    (folder / "a.txt").write_text("some text")
    prepare(Preparation((folder / "a.txt",)), folder / "out")
    tokens = folder / "out" / TOKENS
    content = tokens.read_bytes()
    tokens.write_bytes(b"S" + content[1:])
    with pytest.raises(InputError, match=r"tokens\.bin has changed since it was prepared"):
        check_folder(folder / "out")
    tokens.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"tokens\.bin has 9 bytes, index\.json says 10"):
        open_tokens(folder / "out")
    index = folder / "out" / INDEX
    index.write_text(json.dumps(json.loads(index.read_text()) | {"version": 2}))
    with pytest.raises(InputError, match="version 2, this bigplan reads 1"):
        open_tokens(folder / "out")


def test_a_folder_of_parts_says_which_to_name(folder: Path) -> None:
    (folder / "a.txt").write_text("line\n" * 100)
    prepare(Preparation((folder / "a.txt",), validation_fraction=0.1), folder / "out")
    with pytest.raises(InputError, match=r"name .*out/train or .*out/validation"):
        open_tokens(folder / "out")
    assert isinstance(open_tokens(folder / "out" / "train"), Tokens)


def test_a_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    source, other = tmp_path / "a.txt", tmp_path / "b.txt"
    source.write_text("text " * 100)
    other.write_text("text " * 99 + "tell ")
    prints = []
    for number, path in enumerate((source, source, other)):
        out = tmp_path / str(number)
        prepare(Preparation((path,)), out)
        prints.append(open_tokens(out).fingerprint())
    assert prints[0] == prints[1] != prints[2]
    assert open_tokens(source).fingerprint() != open_tokens(other).fingerprint()
