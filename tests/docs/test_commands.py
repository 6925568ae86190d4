"""Commands in the pages: all of them are commands with such options, and those with output run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bigplan.cli.app import app
from tests.cli.conftest import Run, bigplan

__all__ = ["bigplan"]  # a fixture

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
_FENCE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sessions(page: Path) -> Iterator[tuple[str, str]]:
    """Commands of a page's console blocks, each with what it prints."""
    for block in _FENCE.findall(page.read_text()):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed


def commands(page: Path) -> Iterator[str]:
    """Lines that begin with the program's name, comments left out; `...` and names in capitals
    stand for what a reader puts there.
    """
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if re.match(r"(    |\$ )bigplan ", line):
            yield re.sub(r"\s# .*", "", line.removeprefix("$")).strip()


def _words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    for line in commands(page):
        found: Any = get_command(app)
        words = shlex.split(line)[1:]
        while words and hasattr(found, "commands") and not words[0].startswith("-"):
            assert words[0] in found.commands, line
            found = found.commands[words.pop(0)]
        known = {option for parameter in found.params for option in parameter.opts}
        known |= {option for parameter in found.params for option in parameter.secondary_opts}
        known |= {"--help", "-h", "--install-completion", "--show-completion"}
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= known, line


@pytest.mark.parametrize(
    "page", [page for page in PAGES if list(sessions(page))], ids=lambda page: page.name
)
def test_what_is_shown_is_printed(page: Path, bigplan: Run) -> None:
    for command, shown in sessions(page):
        program, *arguments = shlex.split(command)
        assert program == "bigplan"
        _, out, err = bigplan(*arguments)
        pattern = r"\s?.*".join(re.escape(_words(part)) for part in shown.split("..."))
        assert re.fullmatch(pattern, _words(out + err), re.DOTALL), (command, out, err)
