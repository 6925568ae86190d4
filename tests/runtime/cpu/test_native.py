"""The compiled kernels: torch's bits, every 16-bit value, and what happens where none compile."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.spec.detect import machine
from bigplan.spec.optimizer import Optimizer
from tests.examples import examples

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.runtime.cpu import native
from bigplan.runtime.cpu.native import Native, Piece
from bigplan.runtime.layers import lookup
from bigplan.runtime.optimizer import fused
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.fused import Kernel, fused_step
from bigplan.runtime.optimizer.sgd import sgd_kernel
from tests.runtime.cpu.compiling import compile_it
from tests.runtime.processes import start

OPTIMIZERS = {
    "adamw": Optimizer(),
    "adamw, beta1 below 0.5": Optimizer(beta1=0.3, beta2=0.5),
    "momentum": Optimizer(name="sgd"),
    "plain": Optimizer(name="sgd", momentum=0.0),
}
NARROW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *NARROW)
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-41, -1e-30, 6e-8, 3e38, 65520.0)
# Made of AVX2's and AVX-512's fused multiply-adds, torch's results are ours. A build for another
# CPU adds its products unfused, or fuses others: one rounding (2^-24) more or less of each term.
SAME = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
TOLERANCE = 0.0 if SAME else 1e-6


@pytest.fixture(scope="module")
def library() -> Native:
    found = native.native()
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def _kernel(name: str, decay: float = 0.1, rate: float = 1e-2) -> Kernel:
    optimizer = OPTIMIZERS[name]
    if optimizer.name == "sgd":
        return sgd_kernel(optimizer, rate, decay)
    return adamw_kernel(optimizer, 7, rate, decay)


def _piece(name: str, count: int, gradient: torch.dtype, copy: torch.dtype | None) -> Piece:
    """Values of usual sizes, and special ones among the gradients, in vectors and in the rest."""
    generator = torch.Generator().manual_seed(count)
    parameter, values, average = torch.randn(3, count, generator=generator)
    square = torch.rand(count, generator=generator) * 1e-4
    values *= 1e-2
    for place, value in enumerate(SPECIAL):
        values[place * 37 % count] = values[-1 - place % count] = value
    state = (average * 1e-3, square)[: OPTIMIZERS[name].kept]
    kept = None if copy is None else torch.full((count,), 7.0, dtype=copy)
    return Piece(parameter, values.to(gradient), state, kept)


def _clone(piece: Piece) -> Piece:
    copy = None if piece.copy is None else piece.copy.clone()
    state = tuple(tensor.clone() for tensor in piece.state)
    return Piece(piece.parameter.clone(), piece.gradient.clone(), state, copy)


def _results(piece: Piece) -> list[Tensor]:
    return [piece.parameter, *piece.state, *([] if piece.copy is None else [piece.copy])]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("gradient", DTYPES)
@pytest.mark.parametrize("copy", [None, *NARROW])
@pytest.mark.parametrize(("divisor", "decay"), [(1.0, 0.1), (2.7, 0.1), (65536.0, 0.0)])
def test_torchs_kernels_give_the_same(
    library: Native,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    gradient: torch.dtype,
    copy: torch.dtype | None,
    divisor: float,
    decay: float,
) -> None:
    ours = _piece(name, 2_500 + 11, gradient, copy)
    assert library.takes(ours.gradient, ours.copy) or torch.float16 in (gradient, copy)
    theirs, kernel = _clone(ours), _kernel(name, decay)
    fused_step([ours], kernel, divisor)
    monkeypatch.setattr(fused, "native", lambda: None)
    fused_step([theirs], kernel, divisor)
    for one, two in zip(_results(ours), _results(theirs), strict=True):
        torch.testing.assert_close(one, two, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    count=st.integers(1, 3000),
    data=st.data(),
    divisor=st.sampled_from((1.0, 2.7)),
    gradient=st.sampled_from(DTYPES),
    copy=st.sampled_from((None, *NARROW)),
)
def test_cuts_change_no_bit(
    library: Native,
    name: str,
    count: int,
    data: st.DataObject,
    divisor: float,
    gradient: torch.dtype,
    copy: torch.dtype | None,
) -> None:
    whole = _piece(name, count, gradient, copy)
    cut, kernel = _clone(whole), _kernel(name)
    edges = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=12))})
    fused_step([whole], kernel, divisor)
    fused_step([cut.part(a, b) for a, b in pairwise(edges)], kernel, divisor)
    for one, two in zip(_results(whole), _results(cut), strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_many_threads_change_no_bit(library: Native, gradient: torch.dtype) -> None:
    """Over several chunks of several pieces, by more threads than there is work for, too."""
    counts = (2**18 + 5, 3, 2**17, 2**17 - 1)
    pieces = [_piece("adamw", count, gradient, torch.bfloat16) for count in counts]
    kernel = _kernel("adamw")
    for threads in (2, 5, 50):
        alone = [_clone(piece) for piece in pieces]
        for piece in alone:
            library.step(kernel.native, [piece], 2.7)
        together = [_clone(piece) for piece in pieces]
        library.step(kernel.native, together, 2.7, threads)
        for one, two in zip(alone, together, strict=True):
            for a, b in zip(_results(one), _results(two), strict=True):
                torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def test_nothing_to_do(library: Native) -> None:
    piece = _piece("adamw", 40, torch.float32, None)
    before, empty = _clone(piece), piece.part(7, 7)
    library.step(_kernel("adamw").native, [], 1.0, 3)
    library.step(_kernel("adamw").native, [empty, empty], 1.0, 3)
    for new, old in zip(_results(piece), _results(before), strict=True):
        assert torch.equal(new, old)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_16_bit_gradient_is_read_exactly(library: Native, dtype: torch.dtype) -> None:
    gradient = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    if not library.takes(gradient, None):
        pytest.skip("this CPU does not convert it")
    before, parameter = gradient.clone(), torch.zeros(gradient.numel())
    library.step(_kernel("plain", 0.0, rate=1.0).native, [Piece(parameter, gradient)])
    torch.testing.assert_close(-parameter, before.float(), rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(gradient.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("dtype", NARROW)
def test_copies_are_rounded_as_torch_rounds(library: Native, dtype: torch.dtype) -> None:
    """Of random bits: all exponents, infinite and NaN, and halfway between two 16-bit values."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, (200_003,), generator=generator)
    usual = (torch.randn(100_000, generator=generator) * 30).view(torch.int32)
    halfway = (drawn & ~0xFFFF | 0x8000, usual & ~0x1FFF | 0x1000)  # of bf16, of fp16
    parts = [bits.to(torch.int32) for bits in (drawn, *halfway)]
    parameter = torch.cat(parts).view(torch.float32)
    copy = torch.zeros(parameter.numel(), dtype=dtype)
    if not library.takes(parameter, copy):
        pytest.skip("this CPU does not convert it")
    expected, still = parameter.to(dtype), torch.zeros_like(parameter)
    library.step(_kernel("plain", 0.0).native, [Piece(parameter, still, (), copy)])
    torch.testing.assert_close(copy, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100, 1024, 1055, 2100])
def test_copies_may_begin_anywhere_and_nothing_beside_is_written(
    library: Native, count: int
) -> None:
    for offset in (*range(34), 63):
        piece = _piece("adamw", count + 200, torch.bfloat16, torch.bfloat16)
        before = _clone(piece)
        part = piece.part(offset, offset + count)
        library.step(_kernel("adamw").native, [part], 2.0)
        assert part.copy is not None
        assert torch.equal(part.copy, part.parameter.bfloat16()) or part.parameter.isnan().any()
        for new, old in zip(_results(piece), _results(before), strict=True):
            assert torch.equal(new[:offset], old[:offset])
            assert torch.equal(new[offset + count :], old[offset + count :])


def test_other_dtypes_are_left_to_torch(library: Native) -> None:
    wide = torch.zeros(16)
    assert library.takes(wide, None)
    assert not library.takes(wide.double(), None)
    assert not library.takes(wide, wide)  # a copy of 16 bits, or none
    with pytest.raises(AssertionError):
        library.step(_kernel("plain").native, [Piece(wide.double(), wide)])


@given(
    count=st.integers(0, 5000),
    offset=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 3),
)
@settings(max_examples=examples(60), deadline=None)
def test_sums_are_torchs(
    library: Native, count: int, offset: int, dtype: torch.dtype, threads: int
) -> None:
    """Bit for bit, from anywhere in a tensor, and nothing beside is written."""
    total, part = (_piece("plain", 5200 + n, dtype, None).gradient[:5200] for n in (0, 1))
    if not library.takes(total):
        pytest.skip("this CPU does not convert it")
    expected, inside = total.clone(), slice(offset, offset + count)
    expected[inside] += part[inside]
    library.add(total[inside], part[inside], threads)
    torch.testing.assert_close(total, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", NARROW)
def test_sums_are_rounded_as_torch_rounds(library: Native, dtype: torch.dtype) -> None:
    """All 16-bit values and others of random bits."""
    total = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    order = torch.randperm(len(total), generator=torch.Generator().manual_seed(1))
    if not library.takes(total):
        pytest.skip("this CPU does not convert it")
    part = total[order]
    expected = total + part
    library.add(total, part)
    torch.testing.assert_close(total, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1024, 1025, 2**17, 2**18 + 77])
def test_sums_of_squares(library: Native, dtype: torch.dtype, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    if not library.takes(values):
        pytest.skip("this CPU does not convert it")
    found = library.square_sum(values)
    # A lane adds 16 squares in fp32, each sum rounded by 2^-24.
    assert found == pytest.approx(float(values.double().square().sum()), rel=1e-6)
    assert [library.square_sum(values, threads) for threads in (2, 5, 50)] == [found] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_value_is_seen_in_the_sum_of_squares(library: Native, dtype: torch.dtype) -> None:
    values = torch.ones(3000).to(dtype)
    if not library.takes(values):
        pytest.skip("this CPU does not convert it")
    for place in (0, 1023, 2999):
        for bad in (float("inf"), float("nan")):
            changed = values.clone()
            changed[place] = bad
            assert library.square_sum(changed) == pytest.approx(bad, nan_ok=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which says what it missed")
@pytest.mark.parametrize("source", native.SOURCES, ids=lambda path: path.name)
def test_loops_over_elements_are_in_vectors(source: Path) -> None:
    """In every form of them: as scalars one core reaches a fifth of the rate."""
    lines = source.read_text(encoding="utf-8").splitlines()
    told = "-fopt-info-vec-optimized-missed"  # whatever a compiler says beside costs time
    command = ["g++", *native.FLAGS, told, "-S", str(source), "-o", os.devnull]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()
    loops = [2 + place for place, line in enumerate(lines) if line == "#pragma GCC ivdep"]
    assert loops
    for loop in loops:
        mine = [line for line in said if line.startswith(f"{source}:{loop}:")]
        assert any("loop vectorized" in line for line in mine)
        assert not any("couldn't vectorize loop" in line for line in mine)


@pytest.mark.parametrize("total", DTYPES, ids=str)
@pytest.mark.parametrize("gradient", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [3, 1030])
def test_rows_are_added_as_torch_adds_them(
    library: Native, monkeypatch: pytest.MonkeyPatch, total: torch.dtype, gradient: torch.dtype,
    columns: int,
) -> None:  # fmt: skip
    """By any number of threads: one row has more gradients than a thread takes places."""
    generator = torch.Generator().manual_seed(columns)
    rows = torch.cat((torch.full((30,), 5), torch.randint(0, 40, (71,), generator=generator)))
    gradients = torch.randn(len(rows), columns, generator=generator).to(gradient)
    sums = torch.randn(40, columns, generator=generator).to(total)
    ranked, order = rows.sort(stable=True)
    found = [sums.clone() for _ in range(3)]
    for one, threads in zip(found, (1, 2, 7), strict=True):
        library.add_rows(one, ranked, order, gradients, threads)
    monkeypatch.setattr(lookup, "native", lambda: None)
    lookup.add_rows(sums, rows, gradients)
    for one in found:
        assert torch.equal(one, sums)


# Where nothing has been compiled yet.

REMEMBERS = """
[ "$1" = --version ] && exec {compiler} "$@"
for to; do :; done
[ -e {kept} ] || {{ {compiler} "$@" -O0 && mv "$to" {kept}; }} && cp {kept} "$to"
"""
WAITS = """
[ "$1" = --version ] || {{
    touch {begun}.$$
    until [ "$(ls {begun}.* | wc -l)" -eq 2 ]; do sleep 0.05; done
}}
exec {compiler} "$@"
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that takes its ease, and gives out again what it made first.

    Each of nine times it would otherwise take 8 s of a core.
    """
    if native.native() is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("compiler")
    return _script(folder / "quick", REMEMBERS.format(compiler=_compiler(), kept=folder / "kept"))


@pytest.fixture
def anew(quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", quick)
    native._native.cache_clear()
    yield tmp_path / "cache" / "bigplan"
    native._native.cache_clear()


def _compiler() -> str:
    return shlex.join(machine.compiler() or [])


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def _works() -> None:
    """A step on the CPU, by whatever kernel there is."""
    piece = Piece(torch.ones(40), torch.ones(40))
    fused_step([piece], _kernel("plain", 0.0, rate=0.25))
    assert torch.equal(piece.parameter, torch.full((40,), 0.75))


def test_it_is_compiled_once(anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    wrapped = _script(tmp_path / "cxx", f'echo "$*" >> {calls}; exec {_compiler()} "$@"')
    monkeypatch.setenv("CXX", wrapped)
    for _ in range(2):
        native._native.cache_clear()
        assert native.native() is not None
        assert native.native() is native.native()
    assert calls.read_text(encoding="utf-8").count("-shared") == 1
    assert len(list(anew.iterdir())) == 1, "nothing but the library is left"


def test_without_a_compiler_torch_does_it(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _works()
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()
    assert "36 bytes" in record.getMessage()


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("exit 1", "failed: 1"),
        ('[ "$1" = --version ] || { echo no such architecture >&2; exit 1; }', "no such arch"),
        ('[ "$1" = --version ] || exec sleep 60', "timed out"),
        ("", "No such file"),  # says that it is done, and has written nothing
    ],
)
def test_a_compiler_that_fails(
    anew: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    does: str,
    told: str,
) -> None:
    if "sleep" in does:
        monkeypatch.setattr(native, "SECONDS", 0.5)
    monkeypatch.setenv("CXX", _script(tmp_path / "cxx", does))
    with caplog.at_level(logging.WARNING):
        assert native.native() is None
        _works()
    (record,) = caplog.records
    assert told in record.getMessage()
    assert not list(anew.glob("*"))


def test_a_cache_that_cannot_be_written(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled elsewhere, and usable after that is gone."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.native() is not None
    _works()
    assert not caplog.records


def _cut(made: Path) -> None:
    """To map such a file succeeds, and to touch what is missing ends the process."""
    content = made.read_bytes()
    made.unlink()  # not written over: it is mapped
    made.write_bytes(content[: len(content) // 2])


def _empty(made: Path) -> None:
    made.unlink()
    made.touch()


def _open_to_all(made: Path) -> None:
    made.chmod(0o666)


def _link(made: Path) -> None:
    made.replace(made.parent.parent / made.name)
    made.symlink_to(made.parent.parent / made.name)


def test_what_may_not_be_as_it_was_compiled_is_replaced(anew: Path) -> None:
    assert native.native() is not None
    (made,) = anew.iterdir()
    content = made.read_bytes()
    for spoil in (_empty, _open_to_all, _link, _cut):
        made.unlink()
        made.write_bytes(content)
        made.chmod(0o600)
        assert native._is_whole(made)
        spoil(made)
        assert not native._is_whole(made)
    native._native.cache_clear()
    assert native.native() is not None
    _works()
    (again,) = anew.iterdir()
    assert native._is_whole(again)


def test_a_cache_folder_is_its_owners_alone(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anew.mkdir(parents=True)
    anew.chmod(0o777)
    assert native.native() is not None
    assert anew.stat().st_mode & 0o777 == 0o755
    (made,) = anew.iterdir()
    loaded = list[Path]()
    monkeypatch.setattr(native, "Native", loaded.append)
    native._made()
    assert loaded == [made]
    monkeypatch.setattr(os, "geteuid", lambda: anew.stat().st_uid + 1)  # all is somebody else's
    with pytest.raises(PermissionError, match="another user's folder"):
        native._kept(machine.compiler() or [], anew, "host")


def test_processes_may_compile_at_once(anew: Path, quick: str, tmp_path: Path) -> None:
    """Neither compiler ends before both have begun."""
    _script(tmp_path / "both", WAITS.format(begun=tmp_path / "begun", compiler=quick))
    start(compile_it, tmp_path, 2)
    assert [path.suffix for path in anew.iterdir()] == [".so"]
