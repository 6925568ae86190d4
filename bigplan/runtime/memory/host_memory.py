"""What a machine has lost of its host memory since a process began."""

from __future__ import annotations

from pathlib import Path

from bigplan.runtime.memory.slab import available_host_memory


class HostMemory:
    """The fall in available memory since this object was made, whoever took the memory.

    A process's own size leaves out page tables and the driver's records of page-locked memory.
    """

    def __init__(self) -> None:
        self.before = resident_bytes()  # of this process, taken by then
        self._available, self._most = available_host_memory(), 0

    def lost(self) -> int:
        """Bytes taken, at the fullest of all times that this was asked."""
        taken = self.before + self._available - available_host_memory()
        self._most = max(self._most, taken)
        return self._most


def resident_bytes() -> int:
    """Resident bytes of this process; 0 if the system does not tell."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(fields[1]) << 10 for fields in lines if fields[0] == "VmRSS:"), 0)
