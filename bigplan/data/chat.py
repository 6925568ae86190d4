"""Conversations as text, by the chat template of a tokenizer; the loss counts what it answers.

A template is a Jinja program of the model's authors (chat_template.jinja, or `chat_template` in
tokenizer_config.json, beside tokenizer.json). It runs in Jinja's sandbox, with the names that
transformers gives it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bigplan.data.sources import Document, Span, require_text
from bigplan.errors import InputError, quoted
from bigplan.paths import exists, is_dir, is_file
from bigplan.spec.files.reading import INDEX, read_bytes, read_json

ANSWERS = "assistant"
# Who speaks in the other usual form of conversations: {"from": "human", "value": "..."}.
SPEAKERS = {"human": "user", "gpt": ANSWERS}
UNCOUNTED = Span("", counts=False)

Message = dict[str, object]


class _Generation(Extension):
    """{% generation %} tells where answers are; they are found without it, so its body is kept."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class Chat:
    """A field with a list of messages, each with a role and content."""

    field: str
    template: Template
    special: Mapping[str, str]  # tokens by the names that templates have for them

    @classmethod
    def of(cls, field: str, tokenizer: Path) -> Chat:
        """The template beside a tokenizer.json, or in its folder. Raises InputError."""
        if not exists(tokenizer):
            raise InputError(
                f"tokenizer {tokenizer}: no such file; name a tokenizer.json, or a folder that "
                "holds one and a chat template"
            )
        folder = tokenizer if is_dir(tokenizer) else tokenizer.parent
        config = _config(folder)
        special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _token(config.get(name))) is not None
        }
        return cls(field, _template(folder, config), special)

    @property
    def names(self) -> tuple[str, ...]:
        """See sources.Layout."""
        return (self.field,)

    @property
    def masked(self) -> bool:
        """See sources.Layout."""
        return True

    def documents(self, row: Mapping[str, object], where: str) -> list[Document]:
        """One with the loss on all answers, up to the last.

        A template may write earlier turns otherwise than when they were last (Qwen3 leaves out
        what was thought before). Then each answer ends a document of its own, with the loss on it.
        The token that ends a document follows, and is not counted: the template ends answers.
        """
        messages = messages_of(row[self.field], f"field {quoted(self.field)}", where)
        turns = [i for i, message in enumerate(messages) if message["role"] == ANSWERS]
        if not turns:
            raise InputError(
                f"{where}: no message has the role {ANSWERS!r}, so the loss would count nothing: "
                "leave this conversation out"
            )
        if turns[0] == 0:
            raise InputError(
                f"{where}: the first message has the role {ANSWERS!r}, and answers nothing: put "
                "what was asked before it, or leave this conversation out"
            )
        found = [self.answered(messages[:i], messages[: i + 1], where) for i in turns]
        asked, answers = [before for before, _ in found], [Span(answer) for _, answer in found]
        whole = [before + answer for before, answer in found]
        if not all(later.startswith(one) for one, later in zip(whole, asked[1:], strict=False)):
            return [
                (Span(before, counts=False), answer, UNCOUNTED)
                for before, answer in zip(asked, answers, strict=True)
            ]
        between = [asked[0], *(b[len(a) :] for a, b in zip(whole, asked[1:], strict=False))]
        spans = zip(between, answers, strict=True)
        return [(*(s for b, a in spans for s in (Span(b, counts=False), a)), UNCOUNTED)]

    def answered(self, asked: list[Message], whole: list[Message], where: str) -> tuple[str, str]:
        """The text before an answer, and that of the answer, with which `whole` goes on.

        Raises InputError where the template does not keep them apart.
        """
        before, after = self._text(asked, where, asking=True), self._text(whole, where)
        if not after.startswith(before):
            raise InputError(
                f"{where}: the chat template does not put an answer behind what it writes "
                "where one is asked for, so answers are not to be told from the rest: mend "
                "the template (add_generation_prompt)"
            )
        return before, after[len(before) :]

    def _text(self, messages: list[Message], where: str, *, asking: bool = False) -> str:
        try:
            text = self.template.render(
                messages=messages, add_generation_prompt=asking, **self.special
            )
        except Exception as error:  # noqa: BLE001 - a template is a program, and may raise any
            raise InputError(
                f"{where}: the chat template does not take this conversation: {error}"
            ) from None
        return require_text(text, "what the chat template makes", where)


def messages_of(value: object, name: str, where: str) -> list[Message]:
    """A list of messages, each with a role. Raises InputError for another value."""
    if not isinstance(value, list) or not value:
        raise InputError(
            f"{where}: {name} is {str(value)[:40]!r}, not a list of messages such as "
            '[{"role": "user", "content": "..."}]'
        )
    return [_message(one, f"message {i} of {name}", where) for i, one in enumerate(value, start=1)]


def _message(value: object, name: str, where: str) -> Message:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {name} is {str(value)[:40]!r}, not an object with a role")
    if "role" not in value and {"from", "value"} <= value.keys():
        speaker = require_text(value["from"], f"'from' of {name}", where)
        said = require_text(value["value"], f"'value' of {name}", where)
        return {"role": SPEAKERS.get(speaker, speaker), "content": said}
    # Parquet gives every row all keys; a template asks whether there is one.
    message = {key: one for key, one in value.items() if one is not None or key == "content"}
    require_text(message.get("role"), f"'role' of {name}", where)
    content = message.get("content")
    if content is not None:
        message["content"] = _content(content, f"'content' of {name}", where)
    elif message.keys() <= {"role", "content"}:  # a call of a tool may stand alone
        raise InputError(f"{where}: {name} says nothing: leave this conversation out")
    return message


def _content(value: object, name: str, where: str) -> str:
    """Text, or the texts of its parts one behind the other.

    Templates of text models would write a list as Python does, brackets and all.
    """
    if not isinstance(value, list):
        return require_text(value, name, where)
    kinds = [part.get("type") if isinstance(part, dict) else None for part in value]
    for i, kind in enumerate(kinds, start=1):
        if kind != "text":
            raise InputError(
                f"{where}: part {i} of {name} has the type {str(kind)[:40]!r}, and only parts such "
                'as {"type": "text", "text": "..."} are read: leave this conversation out'
            )
    texts = enumerate((part.get("text") for part in value), start=1)
    return "".join(require_text(text, f"part {i} of {name}", where) for i, text in texts)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not is_file(path):
        return {}
    found = read_json(path).data
    return found if isinstance(found, dict) else {}


def _token(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _template(folder: Path, config: Mapping[str, Any]) -> Template:
    path, found = folder / "chat_template.jinja", config.get("chat_template")
    if is_file(path):
        try:
            found = read_bytes(path, INDEX).decode()
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text; save the file as UTF-8") from None
    elif isinstance(found, list):  # several, each with a name
        path = folder / "tokenizer_config.json"
        found = dict(_named(found)).get("default")
    else:
        path = folder / "tokenizer_config.json"
    if not isinstance(found, str):
        raise InputError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): take the tokenizer of a model that chats, or put a template "
            "there"
        )
    try:
        return _environment().from_string(found)
    except TemplateError as error:
        raise InputError(f"{path}: its chat template is no Jinja template: {error}") from None


def _named(templates: list[Any]) -> Iterator[tuple[str, str]]:
    for one in templates:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            yield one["name"], one.get("template", "")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own escapes HTML


def _refuse(message: str) -> None:
    raise TemplateError(message)
