"""`bigplan data`: prepared as asked, described, refused in one line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from bigplan.data import tokenizer
from tests.cli.conftest import Run
from tests.data.texts import documents, write_pairs, write_texts
from tests.wording import tells


def test_prepare_then_check(bigplan: Run, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "b.txt").write_text("three\n")
    code, out, err = bigplan("data", "prepare", "a.jsonl", "b.txt", "--out", "done")
    assert (code, err) == (0, "")
    assert out == "done: 15 tokens in 3 documents, uint8, bytes, largest id 255\n"
    code, out, _ = bigplan("data", "check", "done")
    assert code == 0
    assert "checksums right" in out
    assert "a.jsonl: 2 documents, 8 tokens" in out
    assert [document.text for document in documents(tmp_path / "done")] == ["one", "two", "three\n"]


def test_a_folder_of_sources_and_other_fields(bigplan: Run, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_texts(tmp_path / "in" / "b.jsonl", ["two"], field="body")
    write_texts(tmp_path / "in" / "a.jsonl", ["one"], field="body")
    (tmp_path / "in" / "notes.csv").write_text("not read")
    assert bigplan("data", "prepare", "in", "--out", "done", "--field", "body")[0] == 0
    assert [document.text for document in documents(tmp_path / "done")] == ["one", "two"]


def test_prompts_and_a_split(bigplan: Run, tmp_path: Path) -> None:
    write_pairs(tmp_path / "a.jsonl", [(f"question {i}", f"answer {i}") for i in range(50)])
    code, out, _ = bigplan(
        *("data", "prepare", "a.jsonl", "--out", "done", "--validation-fraction", 0.3),
        *("--prompt-field", "prompt", "--response-field", "response"),
    )
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["done/train", "done/validation"]
    assert out.count("loss on ") == 2
    both = [d for part in ("train", "validation") for d in documents(tmp_path / "done" / part)]
    assert len(both) == 50


def test_a_conversation(bigplan: Run, tmp_path: Path) -> None:
    """Of words: what the template writes is the question, and then the answer, which counts."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "user", "assistant", "why", "because", "</s>"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    config = {"eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    options = ("--tokenizer", ".", "--messages-field", "messages")
    code, out, _ = bigplan("data", "prepare", "a.jsonl", "--out", "done", *options)
    assert code == 0
    assert "5 tokens, loss on 1 in 1 document" in out
    (document,) = documents(tmp_path / "done")
    assert document.ids == [1, 3, 2, 4, 5]
    assert document.counts == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-field", "p"), "--prompt-field alone"),
        (("--field", "a", "--prompt-field", "p", "--response-field", "r"), "leave one out"),
        (("--messages-field", "m", "--field", "a"), "leave --field, --prompt-field and"),
        (("--messages-field", "m"), "--messages-field needs a --tokenizer"),
        (("--validation-fraction", "1"), "--validation-fraction 1.0"),
        (("--end-of-document", "</s>"), "name a --tokenizer"),
        (("--tokenizer", "none.json"), "tokenizer none.json: no such file"),
        (("--field", "body"), "a.jsonl:1: no field 'body'; it has text"),
        (("--model", "tiny-llama-tes"), "tiny-llama-test"),
    ],
)
def test_refusals(bigplan: Run, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    write_texts(tmp_path / "a.jsonl", ["one"])
    code, out, err = bigplan("data", "prepare", "a.jsonl", "--out", "done", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "options",
    [("--field", "text"), ("--prompt-field", "p", "--response-field", "r")],
)
def test_text_has_no_fields(bigplan: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "a.txt").write_text("three\n")
    code, out, err = bigplan("data", "prepare", "a.txt", "--out", "done", *options)
    assert (code, out) == (2, "")
    assert tells(err, "a.txt", "text", "no fields", options[0])
    assert not (tmp_path / "done").exists()
    write_texts(tmp_path / "b.jsonl", ["one"], field="body")  # beside it --field says something
    assert (
        bigplan("data", "prepare", "a.txt", "b.jsonl", "--out", "done", "--field", "body")[0] == 0
    )


@pytest.mark.parametrize("again", ["in/a.txt", "in", "../in/a.txt", "link.txt"])
def test_a_file_that_is_there_twice(bigplan: Run, tmp_path: Path, again: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("three\n")
    (tmp_path / "link.txt").symlink_to("in/a.txt")
    again = again.replace("..", f"../{tmp_path.name}")
    code, out, err = bigplan("data", "prepare", "in/a.txt", again, "--out", "done")
    assert (code, out) == (2, "")
    assert "is there twice" in err
    assert ("the other time as in/a.txt" in err) == (again not in ("in/a.txt", "in"))
    assert not (tmp_path / "done").exists()


def test_a_missing_package_names_the_extra(
    bigplan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"tokenizers", "pyarrow"}
    monkeypatch.setattr(tokenizer, "find_spec", lambda n: None if n in missing else find_spec(n))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    write_texts(tmp_path / "a.jsonl", ["one"])
    for arguments in (("a.parquet",), ("a.jsonl", "--tokenizer", "tokenizer.json")):
        code, _, err = bigplan("data", "prepare", *arguments, "--out", "done")
        assert code == 2
        assert "pip install 'bigplan[data]'" in err


def test_files_that_are_not_what_they_seem(bigplan: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("tokenizers")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    code, _, err = bigplan("data", "prepare", "a.parquet", "--out", "done")
    assert code == 2
    assert "a.parquet: not a whole Parquet file" in err
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    write_texts(tmp_path / "a.jsonl", ["one"])
    code, _, err = bigplan(
        "data", "prepare", "a.jsonl", "--out", "done", "--tokenizer", "tokenizer.json"
    )
    assert code == 2
    assert "no file of Hugging Face's tokenizers" in err


def test_no_end_of_document_is_guessed(bigplan: Run, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "<eos>": 2}, "[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    write_texts(tmp_path / "a.jsonl", ["one"])
    command = ("data", "prepare", "a.jsonl", "--tokenizer", "tokenizer.json", "--out")
    code, _, err = bigplan(*command, "done")
    assert code == 2
    assert "</s> and <eos>: add --end-of-document TOKEN" in err
    code, _, err = bigplan(*command, "done", "--end-of-document", "<end>")
    assert "'<end>' is not in the vocabulary" in err
    assert bigplan(*command, "one", "--end-of-document", "<eos>")[0] == 0
    assert documents(tmp_path / "one")[0].ids == [0, 2]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert bigplan(*command, "two")[0] == 0
    assert documents(tmp_path / "two")[0].ids == [0, 1]
