"""Clock and power of a working GPU, and what limits its clock, read through NVIDIA's NVML.

NVML is called in the driver's own library, which is present wherever nvidia-smi is. Other ways cost
more: torch.cuda.clock_rate and torch.cuda.power_draw want another package (nvidia-ml-py), and a
process of nvidia-smi for every reading would take cores from what is measured. Where there is no
NVML nothing is read.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM
# Either function says what limits the clock; drivers before 535 have only the second.
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
# Bits of that answer, and their wording.
LIMITS = {
    0x2: "a clock that was set",
    0x4: "power",
    0x8: "the hardware",
    0x20: "temperature",
    0x40: "temperature",
    0x80: "the power supply",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a GPU: SM clock in Hz, power in W, bits of LIMITS."""

    clock: float
    power: float
    reasons: int


@dataclass(slots=True)
class Watch:
    """Readings taken for the length of a block."""

    readings: list[Reading] = field(default_factory=list)

    @property
    def mean(self) -> Reading | None:
        """Mean clock and power, and the reasons of at least half of the readings."""
        return mean(self.readings)

    def __str__(self) -> str:
        """Such as '1.32 GHz, 690 W, limited by power'; '' where nothing was read."""
        found = self.mean
        return "" if found is None else told(found)


def mean(readings: Sequence[Reading]) -> Reading | None:
    """One reading of several, as Watch.mean describes it; None where there are none."""
    if not readings:
        return None
    often = sum(
        bit
        for bit in LIMITS
        if 2 * sum(bool(reading.reasons & bit) for reading in readings) >= len(readings)
    )
    clock, power = (fmean(getattr(r, name) for r in readings) for name in ("clock", "power"))
    return Reading(clock, power, often)


def told(reading: Reading) -> str:
    """A reading in words."""
    limits = dict.fromkeys(word for bit, word in LIMITS.items() if reading.reasons & bit)
    held = f", limited by {' and '.join(limits)}" if limits else ""
    return f"{reading.clock / 1e9:.2f} GHz, {reading.power:.0f} W{held}"


@contextmanager
def watching(device: torch.device, every: float) -> Iterator[Watch]:
    """Read the device every `every` seconds, in a thread, until the block ends."""
    watch = Watch()
    read = reader(device)
    if read is None:
        yield watch
        return
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every):
            if (reading := read()) is not None:
                watch.readings.append(reading)

    thread = threading.Thread(target=run, name="sensors", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


def uuid_of(device: torch.device) -> str:
    """The UUID by which NVML and nvidia-smi know a device, without the prefix 'GPU-'."""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def reader(device: torch.device) -> Callable[[], Reading | None] | None:
    """A function that reads a CUDA device; None where there is no NVML.

    The function returns None where NVML refuses.
    """
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    handle, uuid = ctypes.c_void_p(), f"GPU-{uuid_of(device)}".encode()
    if library.nvmlInit_v2() != 0:
        return None
    if library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0:
        return None
    return lambda: _read(library, handle)


def _read(library: Any, handle: ctypes.c_void_p) -> Reading | None:
    megahertz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
    reasons = ctypes.c_ulonglong()
    if library.nvmlDeviceGetClockInfo(handle, SM_CLOCK, ctypes.byref(megahertz)) != 0:
        return None
    if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) != 0:
        return None
    ask = next((getattr(library, name) for name in REASONS if hasattr(library, name)), None)
    if ask is not None:  # where NVML refuses, no reason is known
        ask(handle, ctypes.byref(reasons))
    return Reading(megahertz.value * 1e6, milliwatts.value / 1e3, reasons.value)
