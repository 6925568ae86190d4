"""What works on this machine, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bigplan.doctor import packages
from bigplan.doctor.finding import Finding
from bigplan.system import SYSTEM

__all__ = ["Finding", "examine"]


def examine(folder: Path) -> Iterator[Finding]:
    """Every finding, in order of display; `folder` is where tensors may go."""
    yield from packages.examine()
    if SYSTEM != "Linux":
        told = f"{SYSTEM}: plans, reports and experiments work; training and measuring want Linux"
        yield Finding("machine", "system", "note", told, "launch on Linux (WSL 2 is one)")
        return
    from bigplan.doctor import compiler, drives, gpus, machine, network  # other systems lack parts

    yield from gpus.examine()
    yield from machine.examine()
    yield from drives.examine(folder)
    yield from compiler.examine()
    yield from network.examine()
