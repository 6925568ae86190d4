"""Standard output that cannot take what is printed, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigplan.plan import load_plan
from tests.tiny import write_cluster
from tests.wording import tells

START = (
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'bigplan'; import bigplan.cli as cli; cli.main()",
)
FULL = Path("/dev/full")
SMALL = (
    "--model tiny-llama-test --cluster small.yaml --precision fp32 --seq-len 32 --global-batch 4"
)
# Short and long texts, of print and of rich: some fail while they are printed, some at the end.
PRINTING = pytest.mark.parametrize("arguments", ["models", "schema", "--version", "plan --help"])
full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def printed_to(
    out: int, arguments: str, folder: Path, err: int = subprocess.PIPE
) -> tuple[int, str]:
    """The exit code and standard error of a command with `out` as standard output."""
    done = subprocess.run(
        [*START, *arguments.split()],
        stdout=out, stderr=err, env=environment(), cwd=folder, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr or ""


@full
@PRINTING
def test_a_full_disk_is_told_in_a_line(tmp_path: Path, arguments: str) -> None:
    with FULL.open("w") as out:
        code, err = printed_to(out.fileno(), arguments, tmp_path)
    assert code == 2
    assert tells(err, "bigplan: ", "standard output", "No space left on device")
    assert err.count("\n") == 1


@PRINTING
def test_a_closed_pipe_ends_quietly(tmp_path: Path, arguments: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert printed_to(write, arguments, tmp_path) == (0, "")
    finally:
        os.close(write)


def test_a_closed_pipe_for_errors_too_keeps_the_code(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert printed_to(write, "plan nothing.yaml", tmp_path, subprocess.STDOUT) == (2, "")
        assert printed_to(write, "schema", tmp_path, subprocess.STDOUT) == (0, "")
    finally:
        os.close(write)


@full
def test_a_plan_is_written_before_it_is_shown(tmp_path: Path) -> None:
    write_cluster(tmp_path)
    small = f"{SMALL} --data nowhere"
    with FULL.open("w") as out:
        assert printed_to(out.fileno(), f"plan {small} --out a.yaml", tmp_path)[0] == 2
        assert load_plan(tmp_path / "a.yaml").model.name == "tiny-llama-test"
        # Warnings that nobody can be told of do not make a failure.
        done = subprocess.run(
            [*START, *f"plan {small} --json".split()],
            stdout=subprocess.PIPE, stderr=out, env=environment(), cwd=tmp_path, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout[:1]) == (0, b"{")


def test_characters_that_the_output_lacks_are_replaced(tmp_path: Path) -> None:
    write_cluster(tmp_path)
    encoding = {"PYTHONIOENCODING": "ascii"}
    for arguments, told in (("plan --help", b"--model"), (f"plan {SMALL}", b"##-")):
        done = subprocess.run(
            [*START, *arguments.split()],
            capture_output=True, env=environment(**encoding), cwd=tmp_path, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        assert told in done.stdout  # of bars


def test_a_file_name_that_is_no_text_is_printed_too(tmp_path: Path) -> None:
    write_cluster(tmp_path)
    done = subprocess.run(
        [*(text.encode() for text in (*START, "plan", *SMALL.split(), "--out")), b"\xff.yaml"],
        capture_output=True, env=environment(PYTHONIOENCODING="utf-8"), cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert "?.yaml" in done.stdout.decode()
