"""Conversations are written as transformers writes them, and the loss counts their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

import tokenizers

from bigplan.data.chat import Chat
from bigplan.data.prepare import Preparation, prepare
from bigplan.data.sources import Document
from bigplan.errors import InputError
from tests.data.texts import documents
from tests.examples import examples

# Turns in marks; a system's turn is one of them.
MARKED = """\
{% for message in messages %}
<|{{ message.role }}|>{{ message.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
# The same with what only training reads, and special tokens.
TRACKED = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|assistant|>{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}
<|{{ message.role }}|>{{ message.content | trim | tojson }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
# Thoughts stay in the last answer alone.
THINKING = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|assistant|>
{%- if loop.last %}<think>{{ message.thought or '' }}</think>{% endif %}
{{- message.content }}<|end|>
{%- else %}
<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ASKED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
SAID = st.text(st.characters(codec="utf-8"), max_size=9)


def _folder(path: Path, template: object, **config: object) -> Path:
    """Every character that tests write is a token, and so are marks."""
    characters = sorted({chr(i) for i in range(32, 127)} | {"\n"})
    marks = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<s>", "</s>"]
    names = ["[UNK]", *marks, *characters]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(path / "tokenizer.json"))
    written = SPECIAL | {"chat_template": template} | config
    (path / "tokenizer_config.json").write_text(json.dumps(written))
    return path


def _rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, "[UNK]"))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **SPECIAL)
    text = fast.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def _whole(document: Document) -> str:
    return "".join(span.text for span in document)


def _counted(document: Document) -> list[str]:
    return [span.text for span in document if span.counts]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": draw(SAID)}] if draw(st.booleans()) else []
    turns = draw(st.integers(1, 3))
    spoken = [
        {"role": role, "content": draw(SAID)}
        for _ in range(turns)
        for role in ("user", "assistant")
    ]
    return [*system, *spoken, *([{"role": "user", "content": "?"}] * draw(st.integers(0, 1)))]


@pytest.fixture(scope="module", params=[MARKED, TRACKED], ids=["marked", "tracked"])
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@given(messages=conversations())
@settings(max_examples=examples(25), deadline=None)
def test_a_conversation_is_one_document_as_transformers_writes_it(
    template: str, tmp_path_factory: pytest.TempPathFactory, messages: list[dict[str, Any]]
) -> None:
    chat = Chat.of("messages", _folder(tmp_path_factory.mktemp("of"), template))
    (document,) = chat.documents({"messages": messages}, "here")
    last = max(i for i, one in enumerate(messages) if one["role"] == "assistant")
    assert _whole(document) == _rendered(template, messages[: last + 1])
    ends = "</s>" if template == TRACKED else "<|end|>\n"
    answers = [one["content"] + ends for one in messages if one["role"] == "assistant"]
    assert _counted(document) == answers
    assert not document[-1].counts  # the token that ends the document goes with it


def test_a_template_that_rewrites_earlier_turns_has_a_document_for_each_answer(
    tmp_path: Path,
) -> None:
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "thought": "easy"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
    chat = Chat.of("messages", _folder(tmp_path, THINKING))
    found = chat.documents({"messages": messages}, "here")
    assert [_whole(one) for one in found] == [
        _rendered(THINKING, messages[:2]),
        _rendered(THINKING, messages),
    ]
    assert [_counted(one) for one in found] == [
        ["<think>easy</think>2<|end|>"],
        ["<think></think>4<|end|>"],
    ]


def test_texts_in_parts_are_one_text(tmp_path: Path) -> None:
    chat = Chat.of("messages", _folder(tmp_path, MARKED))
    parts = [{"type": "text", "text": one, "image_url": None} for one in ("ye", "s")]
    said = [ASKED[0], {"role": "assistant", "content": parts}]
    assert chat.documents({"messages": said}, "") == chat.documents({"messages": ASKED}, "")


def test_tokens_and_their_mask_reach_the_files(tmp_path: Path) -> None:
    """Also in the form with speakers, out of JSONL as out of Parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tokenizer, rows = _folder(tmp_path, MARKED), tmp_path / "a.jsonl"
    spoken = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    rows.write_text(json.dumps({"talk": spoken}) + "\n")
    parquet.write_table(pyarrow.table({"talk": [spoken]}), tmp_path / "a.parquet")
    chat = Chat.of("talk", tokenizer / "tokenizer.json")
    for source in (rows, tmp_path / "a.parquet"):
        out = tmp_path / source.suffix[1:]
        prepare(Preparation((source,), chat, tokenizer=tokenizer), out)
        (document,) = documents(out)
        inner = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        before, answer, end = (
            inner.encode(text, add_special_tokens=False).ids
            for text in ("<|user|>hi<|end|>\n<|assistant|>", "yes<|end|>\n", "</s>")
        )
        assert document.ids == [*before, *answer, *end]
        assert document.counts == [False] * len(before) + [True] * len(answer) + [False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("hi", "field 'messages' is 'hi', not a list of messages"),
        ([], "not a list of messages"),
        (["hi"], "message 1 of field 'messages' is 'hi', not an object"),
        ([{"content": "hi"}], "'role' of message 1 of field 'messages' is 'None', not text"),
        ([{"from": "human", "value": 3}], "'value' of message 1 .*'3', not text"),
        ([{"role": "user", "content": "hi"}], "no message has the role 'assistant'"),
        ([{"role": "assistant", "content": "hi"}], "first message .* answers nothing"),
        ([{"role": "user", "content": "\ud800"}, *ASKED], "lone surrogate"),
        ([{"role": "user", "content": 3}, *ASKED], "'content' of message 1 .*'3', not text"),
        ([{"role": "user", "content": None}, *ASKED], "message 1 .* says nothing"),
        ([{"role": "user"}, *ASKED], "message 1 .* says nothing"),
        (
            [{"role": "user", "content": [{"type": "image"}]}, *ASKED],
            "part 1 of 'content' of message 1 .* has the type 'image'",
        ),
        ([{"role": "user", "content": ["hi"]}, *ASKED], "part 1 .* has the type 'None'"),
        ([{"role": "user", "content": [{"type": "text"}]}, *ASKED], "part 1 .* 'None', not text"),
    ],
)
def test_bad_conversations_are_named(tmp_path: Path, row: object, message: str) -> None:
    chat = Chat.of("messages", _folder(tmp_path, MARKED))
    with pytest.raises(InputError, match=f"a:3: .*{message}"):
        chat.documents({"messages": row}, "a:3")


def test_what_a_template_refuses_is_told(tmp_path: Path) -> None:
    refusing = "{{ raise_exception('no ' + messages[0].role) }}"
    chat = Chat.of("messages", _folder(tmp_path, refusing))
    with pytest.raises(InputError, match=r"a:1: .* does not take this conversation: no user"):
        chat.documents({"messages": ASKED}, "a:1")
    reaching = "{{ messages.__class__.__mro__ }}"  # out of the sandbox
    chat = Chat.of("messages", _folder(tmp_path, reaching))
    with pytest.raises(InputError, match=r"does not take this conversation: .*unsafe"):
        chat.documents({"messages": ASKED}, "a:1")
    elsewhere = "{% if add_generation_prompt %}A:{% endif %}{{ messages | length }}"
    chat = Chat.of("messages", _folder(tmp_path, elsewhere))
    with pytest.raises(InputError, match=r"mend the template \(add_generation_prompt\)"):
        chat.documents({"messages": ASKED}, "a:1")


def test_templates_are_found_in_files_and_by_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": MARKED}]
    token = {"content": "</s>", "special": True}
    chat = Chat.of("messages", _folder(tmp_path, named, eos_token=token))
    (document,) = chat.documents({"messages": ASKED}, "a:1")
    assert _counted(document) == ["yes<|end|>\n"]
    (tmp_path / "chat_template.jinja").write_text(TRACKED)  # a file goes first
    (document,) = Chat.of("messages", tmp_path).documents({"messages": ASKED}, "a:1")
    assert _counted(document) == ["yes</s>"]
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(InputError, match=r"chat_template\.jinja: .* no Jinja template"):
        Chat.of("messages", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template"):
        Chat.of("messages", _folder(tmp_path, None))


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"tokenizer {tmp_path}/none/here: no such file; name"):
        Chat.of("messages", tmp_path / "none" / "here")
