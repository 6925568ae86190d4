"""Probes of toy size: a profile of a CPU in a second or two."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bigplan.profile import drive, gemm, host, machine
from bigplan.profile.bench import Bench
from bigplan.profile.machine import ProbeDone, Profile, Wish, profile_machine
from bigplan.spec.detect import cluster as detected
from bigplan.spec.detect.probes import probe_copy, probe_gemm


def detect_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine is detected by is measured for a moment, not two seconds on all cores."""
    monkeypatch.setattr(detected, "probe_gemm", partial(probe_gemm, budget=0.01))
    monkeypatch.setattr(detected, "probe_copy", partial(probe_copy, budget=0.01))


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors and files, few products."""
    detect_soon(monkeypatch)
    monkeypatch.setattr(host, "ELEMENTS", 2**18)
    monkeypatch.setattr(host, "FEW_ELEMENTS", 2**18)
    monkeypatch.setattr(host, "COPIED", 2**20)
    monkeypatch.setattr(drive, "MOST", 8 * 2**20)
    monkeypatch.setattr(drive, "MOVED", 2**20)
    monkeypatch.setattr(gemm, "CPU_LAYERS", gemm.CPU_LAYERS[:2] + gemm.CPU_LAYERS[4:6])
    monkeypatch.setattr(gemm, "CPU_OTHERS", gemm.CPU_OTHERS[:1])
    monkeypatch.setattr(machine, "QUICK_SECONDS", 0.5)


def bench(**changes: object) -> Bench:
    """Two cores, a thread each."""
    given = {"devices": (torch.device("cpu"),), "cores": 2, "threads": 1} | changes
    return Bench(**given)  # type: ignore[arg-type] # by name


def profiled(wish: Wish) -> tuple[Profile, list[ProbeDone]]:
    """A profile and the progress it told."""
    told: list[ProbeDone] = []
    return profile_machine(wish, told.append, lambda text: None), told
