"""DeepSpeed's compiled operators: built once for this machine, in a folder of bigplan's own.

    python -m bigplan.runtime.deepspeed.ops cpu_adam pin_memory --device cuda

torch's extension builder makes a file named `lock` in an operator's folder. A killed build leaves
that file, and every later build waits for it without end. So here a process that builds or loads
holds a lock of the system (flock) on the whole folder, which ends with the process. Once the flock
is held, a `lock` file that is there belongs to no process, and is removed.

DeepSpeed compiles file by file. 13 of its 17 files read torch's headers, for 35 s of a core each,
and have little to add. A machine with GPUs has cores to compile them side by side; for CPU devices
those of an operator are one file to the compiler.

A process that loads these operators compiles no Triton kernel. On a GPU with CUDA 13 Triton's
compiler failed once they were loaded ("PassManager::run failed").
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bigplan.errors import PreflightError
from bigplan.runtime.cpu.native import cpu
from bigplan.spec.detect.machine import cache_folder

BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
}
# Folders of its sources whose files read torch's headers. They define nothing twice.
TOGETHER = ("adam", "pin_memory", "py_lib")
# Built by DeepSpeed on a CPU device whenever a process group is made, for minutes: sums of small
# tensors of an inference through shared memory, which a training has none of.
UNUSED = "deepspeed_shm_comm"

_log = logging.getLogger(__name__)


def set_environment(device: str, *, native_pin: bool) -> None:
    """What DeepSpeed reads from the environment while it is imported and built.

    `native_pin`: page-lock blocks in their own size; torch's allocator rounds each of them up to a
    power of two.
    """
    os.environ["DS_ACCELERATOR"] = device
    os.environ["DS_PIN_MEMORY_BACKEND"] = "native" if native_pin else "torch"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(ops_folder(device))
    if device == "cuda":  # images set "9.0a" for some GPUs, which DeepSpeed cannot parse
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"


def ops_folder(device: str) -> Path:
    """Named after all that compiled operators depend on."""
    parts = (version("deepspeed"), torch.__version__, sys.version, device, cpu())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"deepspeed-{version('deepspeed')}-{digest}"


def import_deepspeed() -> None:
    """Import it, silent but for errors, and without what no training needs."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__[UNUSED] = False


def load(names: Sequence[str], device: str) -> None:
    """Load these operators, each compiled first where it is not there yet.

    The environment is set. Raises PreflightError where one cannot be built.
    """
    from deepspeed.accelerator import get_accelerator

    folder = ops_folder(device)
    for name in _with_what_they_load(names):
        with _alone(folder):
            _drop_stale_locks(folder)
            builder = get_accelerator().create_op_builder(BUILDERS[name])
            if device == "cpu":
                _spare(builder, folder / f"{name}.cpp")
            try:
                builder.load(verbose=False)
            except Exception as error:
                raise PreflightError(_told(name, error)) from error


def _with_what_they_load(names: Sequence[str]) -> list[str]:
    """async_io loads pin_memory, and would compile it file by file where it is not loaded yet."""
    loaded = {*names, "pin_memory"} if "async_io" in names else names
    return [name for name in BUILDERS if name in loaded]


def _spare(builder: Any, merged: Path) -> None:
    """Let it compile fewer files, and no debug information, which takes two fifths of the time."""
    sources, options = builder.sources, builder.cxx_args
    builder.sources = lambda: _together(sources(), merged)
    builder.cxx_args = lambda: [*options(), "-g0"]


def _together(sources: Sequence[str], path: Path) -> list[str]:
    """These sources, those in TOGETHER as one file at `path`, which is written where it changed.

    Names are relative to DeepSpeed's operators. Not all headers guard themselves against being read
    twice: #import reads each of them once, whoever includes it then.
    """
    import deepspeed

    top = Path(deepspeed.__file__).parent / "ops"
    merged = [top / name for name in sources if Path(name).parent.name in TOGETHER]
    headers = sorted({header for source in merged for header in source.parent.glob("*.h")})
    text = "".join(f'#import "{header}"\n' for header in headers)
    text += "".join(f'#include "{source}"\n' for source in merged)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return [str(path), *(name for name in sources if top / name not in merged)]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder: one process builds, the others then load what it built."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _drop_stale_locks(folder: Path) -> None:
    """Of all operators: async_io builds pin_memory inside its own build."""
    for lock in folder.glob("*/lock"):
        _log.warning(
            "%s was left by a build that was killed, and would be waited for without end: removed",
            lock,
        )
        lock.unlink()


def _told(name: str, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    hint = "a C++ compiler (g++) and ninja are needed"
    if name == "async_io":
        hint += ", and libaio's headers (Debian, Ubuntu: apt-get install libaio-dev)"
    return (
        f"DeepSpeed's operator {name} could not be built: {lines[0]}; {hint}. Without it, plan "
        "with --engine native"
    )


def main() -> None:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=BUILDERS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    args = parser.parse_args()
    set_environment(args.device, native_pin=False)
    import_deepspeed()
    try:
        load(args.names, args.device)
    except PreflightError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
