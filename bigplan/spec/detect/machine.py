"""What this machine has: memory, cores and GPUs, as the system reports them (no torch)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bigplan.errors import InputError

COMPILERS = ("c++", "g++", "clang++")  # tried after $CXX
# Allowed for nvidia-smi, which starts every GPU where nothing else keeps the driver loaded.
SMI_SECONDS = 60.0
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class FoundGpu:
    """One line of nvidia-smi: name, memory in bytes, PCIe generation and width (0: unknown)."""

    name: str
    memory: int
    pcie_generation: int
    pcie_width: int


def available_memory(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """Bytes that a new process may use: the kernel's estimate, within the cgroup's limit."""
    amounts = [_meminfo_available(proc / "meminfo")]
    for folder in _own_cgroups(proc, cgroups):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            # File cache counts as used, but the kernel gives it back on demand.
            amounts.append(max(0, limit - used + _inactive_file(folder / "memory.stat")))
    return min(amounts)


def load_told(cores: int) -> str | None:
    """What a user should know of other processes before so many cores are measured."""
    load, _, _ = os.getloadavg()
    if load <= cores / 2:
        return None
    return (
        f"other processes asked for {load:.1f} cores before measuring started, and there are "
        f"{cores}: rates will be too low and vary; stop what runs and measure again"
    )


def available_cores(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may run on, within the cgroup's CPU quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _own_cgroups(proc, cgroups):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def cpu_name(proc: Path = Path("/proc")) -> str:
    """The processor's marketing name, or 'CPU'."""
    for line in _text(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return "CPU"


def compiler() -> list[str] | None:
    """The command of the first C++ compiler that exists."""
    for command in (shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS)):
        if command and shutil.which(command[0]):
            return command
    return None


def cache_folder() -> Path:
    """Where code compiled for this user is kept. Raises RuntimeError where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "bigplan"


def find_gpus() -> tuple[FoundGpu, ...]:
    """GPUs that nvidia-smi lists; none where it is absent or fails.

    Raises InputError where it does not answer: there may be GPUs.
    """
    return parse_gpus(_listed())


def visible_gpus() -> tuple[FoundGpu, ...]:
    """GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves to this process.

    Raises InputError as find_gpus.
    """
    return parse_gpus(_listed(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _listed() -> str:
    query = "index,uuid,name,memory.total,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True
        ).stdout
    except subprocess.TimeoutExpired:
        raise InputError(
            f"nvidia-smi has not answered for {SMI_SECONDS:.0f} s, so GPUs cannot be told; try it "
            "again when the machine is less busy (with `nvidia-smi -pm 1` it answers sooner), or "
            "name devices of the CPU with --cpu-devices"
        ) from None
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_gpus(listing: str, visible: str | None = None) -> tuple[FoundGpu, ...]:
    """GPUs in nvidia-smi's CSV; lines without a memory size are skipped (MIG parents).

    `visible` has the form of CUDA_VISIBLE_DEVICES: numbers, or beginnings of UUIDs, up to the first
    that names no GPU (CUDA C++ Programming Guide, "CUDA Environment Variables"). Parts of a GPU
    (MIG) are not listed here, so with these every GPU counts.
    """
    found = dict[tuple[str, str], FoundGpu]()
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 6 and cells[3].isdigit():
            generation, width = (int(cell) if cell.isdigit() else 0 for cell in cells[4:])
            gpu = FoundGpu(cells[2], int(cells[3]) * 2**20, generation, width)
            found[cells[0], cells[1]] = gpu
    if visible is None or "MIG-" in visible:
        return tuple(found.values())
    chosen = list[FoundGpu]()
    for name in (part.strip() for part in visible.split(",")):
        named = [gpu for (index, uuid), gpu in found.items() if _names(name, index, uuid)]
        if not named:
            break
        chosen += named[:1]
    return tuple(chosen)


def _names(name: str, index: str, uuid: str) -> bool:
    return name == index or (name.startswith("GPU-") and uuid.startswith(name))


def _own_cgroups(proc: Path, cgroups: Path) -> list[Path]:
    """Folders of this process's cgroup and its ancestors (v2), or v1's memory controller."""
    folders = [cgroups, cgroups / "memory"]
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition("::")
        folder = cgroups
        for part in Path(rest.strip("/")).parts:
            folder = folder / part
            folders.append(folder)
    return [folder for folder in folders if folder.is_dir()]


def _meminfo_available(path: Path) -> int:
    for line in _text(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _inactive_file(path: Path) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that holds one ('max' is none)."""
    for path in paths:
        text = _text(path).strip()
        if text.isdigit():
            return int(text)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
