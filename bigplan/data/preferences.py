"""Rows with two responses to one prompt, of which one was chosen: a document for each.

A document is the whole prompt and one response, with the loss on the response alone. Both are
texts, or lists of messages that the tokenizer's chat template writes (chat.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bigplan.data.chat import ANSWERS, UNCOUNTED, Chat, Message, messages_of
from bigplan.data.sources import Document, Span, require_text
from bigplan.errors import InputError, quoted


@dataclass(frozen=True)
class PairFields:
    """Fields of a prompt, of the response that was chosen and of the one that was rejected.

    Without a field for it, the prompt is what the two conversations begin with alike.
    """

    prompt: str | None
    chosen: str
    rejected: str
    tokenizer: Path | None = None  # with a chat template, if the fields hold messages
    masked: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """See sources.Layout."""
        return tuple(name for name in (self.prompt, self.chosen, self.rejected) if name is not None)

    def documents(self, row: Mapping[str, object], where: str) -> list[Document]:
        """The chosen one, then the rejected one; of texts the end token is counted, too."""
        if isinstance(row[self.chosen], str):
            found = self._texts(row, where)
        else:
            found = self._conversations(row, where)
        if found[0] == found[1]:
            raise InputError(
                f"{where}: {quoted(self.chosen)} and {quoted(self.rejected)} are the same, so "
                "nothing was preferred: leave this pair out"
            )
        return found

    def _texts(self, row: Mapping[str, object], where: str) -> list[Document]:
        if self.prompt is None:
            raise InputError(
                f"{where}: field {quoted(self.chosen)} is text, and no field is named for the "
                "prompt that it answers: add --prompt-field"
            )
        prompt, *responses = (
            require_text(row[name], f"field {quoted(name)}", where) for name in self.names
        )
        return [(Span(prompt, counts=False), Span(response)) for response in responses]

    def _conversations(self, row: Mapping[str, object], where: str) -> list[Document]:
        prompt: list[Message] = []
        chosen, rejected = (
            messages_of(row[name], f"field {quoted(name)}", where)
            for name in (self.chosen, self.rejected)
        )
        if self.prompt is not None:
            if isinstance(row[self.prompt], str):
                raise InputError(
                    f"{where}: field {quoted(self.prompt)} is text, and {quoted(self.chosen)} a "
                    "list of messages: where that list has the prompt, too, leave --prompt-field "
                    "out; else name a prompt of messages"
                )
            prompt = messages_of(row[self.prompt], f"field {quoted(self.prompt)}", where)
        else:
            alike = next(
                (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
                min(len(chosen), len(rejected)),
            )
            # Equal ones have their last message as the response, and are refused as equal.
            alike = min(alike, len(chosen) - 1, len(rejected) - 1)
            prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
        if not prompt:
            raise InputError(
                f"{where}: {quoted(self.chosen)} and {quoted(self.rejected)} begin with no common "
                "message, so no prompt is known: name its field with --prompt-field"
            )
        return [self._answered(prompt, messages, where) for messages in (chosen, rejected)]

    def _answered(self, prompt: list[Message], response: list[Message], where: str) -> Document:
        if response[0]["role"] != ANSWERS:
            raise InputError(
                f"{where}: after the prompt comes a message of the role "
                f"{str(response[0]['role'])!r}, not {ANSWERS!r}: leave this pair out"
            )
        asked, answer = self._chat.answered(prompt, [*prompt, *response], where)
        return Span(asked, counts=False), Span(answer), UNCOUNTED

    @cached_property
    def _chat(self) -> Chat:
        """Raises InputError where there is no template."""
        if self.tokenizer is None:
            raise InputError(
                f"field {quoted(self.chosen)} holds messages, which need a --tokenizer: its chat "
                "template says how they are written"
            )
        return Chat.of(self.chosen, self.tokenizer)
