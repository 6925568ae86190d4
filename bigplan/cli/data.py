"""`bigplan data`: texts to packed token files, and checks of such files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.inputs import require_there
from bigplan.cli.interrupts import unwound
from bigplan.cli.spread import takes
from bigplan.errors import InputError
from bigplan.system import require_locks
from bigplan.units import counted

if TYPE_CHECKING:
    from bigplan.data.prepared import PreparedIndex
    from bigplan.data.sources import Layout

SILENT = 1.0  # seconds; shorter work shows no progress

data = typer.Typer(no_args_is_help=True, help="Prepare training data.")


class FormatName(StrEnum):
    """How a source is read."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"


@dataclass(frozen=True)
class PrepareOptions:
    """How texts become tokens."""

    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Hugging Face tokenizer.json, or its folder. Default: bytes."),
    ] = None
    end_of_document: Annotated[
        str | None,
        typer.Option(help="The token after a document. Default: the tokenizer's eos_token."),
    ] = None
    field: Annotated[
        str | None, typer.Option(help="Where a JSON object or row has its text. Default: text.")
    ] = None
    prompt_field: Annotated[
        str | None, typer.Option(help="The text before a response; no loss on it.")
    ] = None
    response_field: Annotated[
        str | None, typer.Option(help="The response; the loss is on it alone.")
    ] = None
    messages_field: Annotated[
        str | None,
        typer.Option(
            help="A conversation's messages, written by the tokenizer's chat template; the loss is "
            "on the assistant's."
        ),
    ] = None
    chosen_field: Annotated[
        str | None,
        typer.Option(
            help="The preferred of two responses to --prompt-field, for --preference: text, or "
            "messages, which may begin with the prompt."
        ),
    ] = None
    rejected_field: Annotated[str | None, typer.Option(help="The other response.")] = None
    longest_pair: Annotated[
        int | None,
        typer.Option(
            help="Leave out pairs of more tokens, both prompts and responses together.", min=2
        ),
    ] = None
    form: Annotated[
        FormatName | None,
        typer.Option("--format", help="Default: by the file's suffix."),
    ] = None
    validation_fraction: Annotated[
        float,
        typer.Option(help="Share held out: writes OUT/train and OUT/validation."),
    ] = 0.0
    model: Annotated[
        str | None, typer.Option(help="Refuse tokens beyond this model's vocabulary.")
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Replace what was prepared in OUT before.")
    ] = False


@data.command()
@takes(PrepareOptions)
def prepare(
    options: PrepareOptions,
    sources: Annotated[
        list[Path],
        typer.Argument(help="Text, JSONL and Parquet files, or folders of them."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; training.data names it.")],
    as_json: AsJson = False,
) -> None:
    """Turn texts into packed token files that training reads without conversion.

    Each document is followed by an end token; attention crosses it, unless a training has
    --isolate-documents. A prompt and a response are
    tokenised separately. Of a text file the last lines are held out; of other files, documents
    chosen by their text.
    """
    require_locks("data prepare")
    from bigplan.data.prepare import Preparation
    from bigplan.data.prepare import prepare as prepare_folder

    wanted = Preparation(
        sources=tuple(sources),
        fields=_fields(options),
        form=None if options.form is None else options.form.value,
        tokenizer=options.tokenizer,
        end_of_document=options.end_of_document,
        validation_fraction=options.validation_fraction,
        limit=_limit(options.model),
        longest_pair=options.longest_pair,
    )
    with unwound(), _shown() as progress:
        indices = prepare_folder(wanted, out, force=options.force, progress=progress)
    if as_json:
        found = {str(out / part): index.model_dump() for part, index in indices.items()}
        print_json({"folders": found})
        return
    for part, index in indices.items():
        print(f"{out / part}: {_described(index)}")
    if options.messages_field is not None:
        print("Attention crosses conversations unless a training has --isolate-documents.")


@data.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A prepared folder.")],
    as_json: AsJson = False,
) -> None:
    """Say what a prepared folder holds, after comparing every byte with its checksum."""
    from bigplan.data.prepared import check_folder

    require_there(folder, "a folder that `bigplan data prepare` wrote")
    index = check_folder(folder)
    if as_json:
        print_json({"folders": {str(folder): index.model_dump()}})
        return
    print(f"{folder}: {_described(index)}, checksums right")
    for source in index.sources:
        print(
            f"  {source.path}: {counted(source.documents, 'document')}, "
            f"{counted(source.tokens, 'token')}"
        )


def _limit(model: str | None) -> tuple[str, int] | None:
    from bigplan.spec.catalog import find_model

    if model is None:
        return None
    spec = find_model(model)
    return spec.name, spec.vocab


def _fields(options: PrepareOptions) -> Layout | None:
    """The named fields; None: none was named."""
    from bigplan.data.chat import Chat
    from bigplan.data.sources import Fields

    if options.chosen_field is not None or options.rejected_field is not None:
        return _pair_fields(options)
    if options.longest_pair is not None:
        raise InputError(
            "--longest-pair counts the tokens of two responses: name them with --chosen-field and "
            "--rejected-field, or leave it out"
        )
    field, prompt, response = options.field, options.prompt_field, options.response_field
    if (prompt is None) != (response is None):
        given = "--prompt-field" if response is None else "--response-field"
        raise InputError(f"{given} alone: a prompt and its response are two fields; name both")
    if field is not None and prompt is not None:
        raise InputError(
            "--field goes with a document's whole text, --prompt-field and --response-field with "
            "two parts of it: leave one out"
        )
    if options.messages_field is not None:
        if field is not None or prompt is not None:
            raise InputError(
                "--messages-field names a whole conversation: leave --field, --prompt-field and "
                "--response-field out"
            )
        if options.tokenizer is None:
            raise InputError(
                "--messages-field needs a --tokenizer: its chat template says how messages are "
                "written"
            )
        return Chat.of(options.messages_field, options.tokenizer)
    if field is None and prompt is None:
        return None
    return Fields(field or "text", prompt, response)


def _pair_fields(options: PrepareOptions) -> Layout:
    """Those of a chosen and a rejected response."""
    from bigplan.data.preferences import PairFields

    chosen, rejected = options.chosen_field, options.rejected_field
    if chosen is None or rejected is None:
        given = "--chosen-field" if rejected is None else "--rejected-field"
        raise InputError(f"{given} alone: a pair has two responses; name both")
    others = {
        "--field": options.field,
        "--response-field": options.response_field,
        "--messages-field": options.messages_field,
    }
    if wrong := [name for name, value in others.items() if value is not None]:
        raise InputError(
            f"--chosen-field and --rejected-field go with --prompt-field alone, or with none: "
            f"leave {' and '.join(wrong)} out"
        )
    return PairFields(options.prompt_field, chosen, rejected, options.tokenizer)


def _described(index: PreparedIndex) -> str:
    targets = f", loss on {index.targets:,}" if index.masked else ""
    documents = counted(index.documents, "document")
    if index.paired:
        documents = counted(index.documents // 2, "pair")
        if index.left_out:
            documents += f" ({index.left_out:,} longer than --longest-pair left out)"
    name = index.tokenizer if index.tokenizer == "bytes" else f"tokenizer {index.tokenizer[:12]}"
    return (
        f"{counted(index.tokens, 'token')}{targets} in {documents}, {index.dtype}, "
        f"{name}, largest id {index.largest}"
    )


@contextmanager
def _shown() -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar on stderr, on a terminal only."""
    from rich.status import Status

    from bigplan.units import format_bytes, format_count

    console, start = Console(stderr=True), time.perf_counter()
    status: Status | None = None

    def show(read: int, total: int, tokens: int) -> None:
        nonlocal status
        if not console.is_terminal or time.perf_counter() - start < SILENT:
            return
        of = f"{format_bytes(read)} of {format_bytes(total)}"
        text = f"{read / max(1, total):.0%}  {of} read, {format_count(tokens)} tokens written"
        if status is None:
            status = console.status(text)
            status.start()
        status.update(text)

    try:
        yield show
    finally:
        if status is not None:
            status.stop()
