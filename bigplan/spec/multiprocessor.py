"""The multiprocessors of a GPU as data, as the model of memory-bound kernels needs them."""

from __future__ import annotations

from pydantic import Field

from bigplan.spec.cluster import Gpu, find_gpu, list_gpus
from bigplan.spec.files import shipped
from bigplan.spec.part import MachinePart
from bigplan.units import Bandwidth, Bytes, Rate, Seconds


class Multiprocessor(MachinePart):
    """One streaming multiprocessor (SM) of a GPU, and the cache that all of them share."""

    capability: str = Field(pattern=r"^\d+\.\d$")
    """what CUDA calls its compute capability, such as 9.0"""
    clock: Rate = Field(gt=0)
    """cycles per second under load that is bound by memory, such as 1.98 G/s"""
    lanes: int = Field(gt=0, le=1024)
    """fp32 operations that it starts in a cycle"""
    special: int = Field(gt=0, le=1024)
    """exponentials, roots and reciprocals that it starts in a cycle"""
    registers: int = Field(gt=0, le=2**20)
    """32-bit registers"""
    threads: int = Field(gt=0, le=4096)
    """threads that reside at once at most"""
    programs: int = Field(gt=0, le=128)
    """thread blocks that reside at once at most"""
    shared_memory: Bytes = Field(gt=0)
    """shared memory that its resident thread blocks may use together"""
    load_bytes: int = Field(gt=0, le=1024)
    """bytes that it loads from the L2 cache in a cycle at most"""
    l2_memory: Bytes = Field(gt=0)
    """L2 cache of the whole GPU"""
    l2_bandwidth: Bandwidth = Field(gt=0)
    """reads and writes of the whole GPU that stay in its L2 cache"""
    memory_latency: Seconds = Field(gt=0)
    """from a load to its value, out of device memory, with nothing else under way"""
    shared_latency: Seconds = Field(gt=0)
    """the same out of shared memory; an exchange between the lanes of a warp takes as long"""
    kernel_start: Seconds = Field(ge=0)
    """between the end of a kernel and the first instruction of the next one in its stream"""


_FOLDER = shipped.PACKAGE / "hardware" / "multiprocessors"


def list_multiprocessors() -> tuple[str, ...]:
    """Names of the shipped GPU types whose multiprocessors are described, sorted."""
    return shipped.names(_FOLDER)


def find_multiprocessor(name: str) -> Multiprocessor:
    """The multiprocessor of a shipped GPU type. Raises InputError."""
    return shipped.find(_FOLDER, name, Multiprocessor, "GPU type with described multiprocessors")


def closest_to(major: int, minor: int) -> str:
    """The described GPU type whose compute capability is closest, older ones first.

    Kernels sized for a type are right on every GPU, and fast where multiprocessors are similar.
    """

    def distance(name: str) -> tuple[bool, int]:
        known = 10 * major + minor - int(find_multiprocessor(name).capability.replace(".", ""))
        return known < 0, abs(known)

    return min(list_multiprocessors(), key=distance)


def named_as(reported: str) -> str | None:
    """The shipped type of the GPU with this driver name, if its multiprocessors are described."""
    found: dict[str, Gpu] = {name: find_gpu(name) for name in list_gpus()}
    known = list_multiprocessors()
    return next((n for n, gpu in found.items() if gpu.name == reported and n in known), None)
