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
    """The value as messages quote it: text in quotes, and none of it long."""
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        # Python refuses to print long ones, whose digits are therefore estimated.
        return f"an integer of about {round(value.bit_length() * log10(2))} digits"
    return shortened(str(value) if isinstance(value, PurePath) else repr(value))


def shortened(text: str, most: int = _SHOWN) -> str:
    """The text, its middle left out where it has more characters than `most`."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


# All but newline and tab: some make a terminal do what it should not, and none shows.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def control_character(text: str) -> str | None:
    """The first character that no terminal should get, newlines and tabs not counted."""
    found = _CONTROL.search(text)
    return found[0] if found else None


def printable(text: str) -> str:
    """The text with such characters written out, as Python writes them: `\\x1b`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class BigplanError(Exception):
    """Root of the tree."""

    exit_code: int = 1


class InputError(BigplanError, ValueError):
    """The user gave something that breaks a rule.

    It is a ValueError too, so that pydantic reports it with the place where it happened.
    """

    exit_code = 2


class RefusedError(InputError):
    """Understood, but not supported; the message names what is."""


class OutputError(BigplanError):
    """What is printed cannot be written to where the user sends it."""

    exit_code = 2


class InfeasibleError(BigplanError):
    """Nothing fits: `bytes_short` bytes are missing on `tier`, and `remedy` would help.

    `written`: bytes that the drives of a node would have to take in a step for a plan to fit, where
    a limit forbids them.
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


class PreflightError(BigplanError):
    """This machine has less than the plan promises; raised before anything is allocated."""

    exit_code = 4


class NoRoomError(PreflightError):
    """There are too few nodes with what a plan's ranks need, free."""


class WorkerError(BigplanError):
    """A worker failed or died while it ran."""

    exit_code = 5


class LostError(WorkerError):
    """A rank ended, or lost the others, while it ran: fresh ones may go on from a checkpoint."""


class NodeLostError(LostError):
    """A node was lost, and with it the processes of `ranks`, whose locks nobody may release."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class DivergedError(WorkerError):
    """The training has lost its weights; the same steps would again."""


class CheckpointError(BigplanError):
    """A checkpoint could not be written, is damaged, or belongs to another training."""

    exit_code = 6


class VerificationError(BigplanError):
    """A program breaks a rule of the verifier: a bug of ours, not of the user."""
