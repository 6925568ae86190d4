"""Microbenchmarks of multiprocessors: they compile, and on a GPU give figures near the shipped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from bigplan.profile.multiprocessor import (
    WORDS,
    GpuFigure,
    cycle,
    measure_multiprocessor,
    replaced,
)
from bigplan.spec.multiprocessor import find_multiprocessor

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bigplan.kernels.handwritten import probes as m
out = {"out": "*fp32"}
kernels = {
    m.chase: ({"table": "*i32", "place": "*i32", "steps": "i32"}, {}),
    m.exchange: ({**out, "steps": "i32"}, {"COLUMNS": 128}),
    m.read: ({"table": "*fp32", **out, "count": "i32", "turns": "i32"}, {"BLOCK": 4096}),
    m.powers: ({**out, "clocks": "*i64", "steps": "i32"}, {"BLOCK": 8192}),
    m.nothing: (out, {}),
}
for function, (types, constants) in kernels.items():
    signature = types | dict.fromkeys(constants, "constexpr")
    made = triton.compile(ASTSource(fn=function, signature=signature, constexprs=constants),
                          target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(function.__name__, made.asm["ptx"].count("ld.global"), made.asm["ptx"].count("clock64"))
"""


def test_all_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=clean, check=False
    )
    assert done.returncode == 0, done.stderr
    names = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in names] == ["chase", "exchange", "read", "powers", "nothing"]
    loads, clocks = ({name: int(row[i]) for name, *row in names} for i in (0, 1))
    assert loads["chase"] >= 2
    assert clocks["powers"] == 2


def test_a_chain_leads_through_all_lines() -> None:
    table = cycle(50, torch.device("cpu"))
    seen, at = [], 0
    for _ in range(50):
        seen.append(at)
        at = int(table[at])
    assert at == 0
    assert sorted(seen) == list(range(0, 50 * WORDS, WORDS))


def test_measured_figures_replace_shipped_ones() -> None:
    known = find_multiprocessor("h200-sxm")
    found = {"memory_latency": GpuFigure(612e-9, "a chain"), "load_bytes": GpuFigure(63.6, "reads")}
    ours = replaced(known, found)
    assert (ours.memory_latency, ours.load_bytes) == (612e-9, 64)
    assert "a chain" in ours.sources["memory_latency"]
    assert ours.registers == known.registers


@pytest.mark.gpu
def test_a_gpus_figures_are_near_the_shipped_ones() -> None:
    known, found = measure_multiprocessor(torch.device("cuda", 0))
    for name in ("clock", "special", "l2_bandwidth", "load_bytes", "memory_latency",
                 "shared_latency", "kernel_start"):  # fmt: skip
        assert 1 / 4 < getattr(found, name) / getattr(known, name) < 4, name
