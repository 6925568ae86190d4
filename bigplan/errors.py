"""Every error that bigplan raises on purpose, in one tree.

The command line prints the message and exits with `exit_code`; a traceback means a bug.
Messages hold the value, the rule that it breaks and what to do about it.
"""

from __future__ import annotations

import re
from math import log10
from pathlib import PurePath

_SHOWN = 120


def quoted(value: object) -> str:
    """The value as messages quote it: text in quotation marks, and long values shortened."""
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        # Python refuses to print very long integers, so their digits are estimated.
        return f"an integer of about {round(value.bit_length() * log10(2))} digits"
    return shortened(str(value) if isinstance(value, PurePath) else repr(value))


def shortened(text: str, most: int = _SHOWN) -> str:
    """The text; where it has more characters than `most`, without its middle."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


# Control characters except newline and tab. They are invisible, and some act on a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def control_character(text: str) -> str | None:
    """The first control character that no terminal should get, if any."""
    found = _CONTROL.search(text)
    return found[0] if found else None


def printable(text: str) -> str:
    """The text with control characters escaped, as Python writes them: `\\x1b`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class BigplanError(Exception):
    """Root of the tree."""

    exit_code: int = 1


class InputError(BigplanError, ValueError):
    """The user gave a value that breaks a rule.

    It is also a ValueError, so that pydantic reports it with the place of the value.
    """

    exit_code = 2


class RefusedError(InputError):
    """The input was understood, but is not supported. The message names what is supported."""


class OutputError(BigplanError):
    """The output cannot be written to where the user sends it."""

    exit_code = 2


class InfeasibleError(BigplanError):
    """Nothing fits: `bytes_short` bytes are missing on `tier`, and `remedy` would help.

    `written` is set where a limit on wear forbids the plans that fit. It is the bytes that a node
    would have to write to its drives in a step.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        tier: str = "",
        stage: str = "",
        bytes_short: int = 0,
        remedy: str = "",
        written: float | None = None,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.stage = stage
        self.bytes_short = bytes_short
        self.remedy = remedy
        self.written = written


class LateError(InfeasibleError):
    """Plans fit, and none ends in the time that the training may take."""


class PreflightError(BigplanError):
    """This machine has less than the plan promises; raised before anything is allocated."""

    exit_code = 4


class NoRoomError(PreflightError):
    """Too few nodes have the resources free that a plan's ranks need."""


class WorkerError(BigplanError):
    """A worker failed or died while it ran."""

    exit_code = 5


class LostError(WorkerError):
    """A rank died or lost contact with the others. New ranks may go on from a checkpoint."""


class NodeLostError(LostError):
    """A node was lost with the processes of `ranks`, whose locks nobody may release."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class DivergedError(WorkerError):
    """The training has lost its weights; the same steps would lose them again."""


class CheckpointError(BigplanError):
    """A checkpoint could not be written, is damaged, or belongs to another training."""

    exit_code = 6


class VerificationError(BigplanError):
    """A program breaks a rule of the verifier. This is a bug of bigplan, not of the user."""
