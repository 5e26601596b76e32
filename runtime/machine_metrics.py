"""What Triton tells of the machine's processors and memory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from moonpool.runtime.exposition import Family, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

# Of a line of /proc/stat, behind its name: the times of all processors that did nothing, or waited for a disk.
_IDLE, _IOWAIT = 3, 4
# What a guest took stands in the columns before, too.
_COLUMNS = 8
NAMES = ("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes")


class MachineMetrics:
    """Processors and memory. Any thread may call any method."""

    def __init__(
        self,
        interval_s: float = 2.0,
        read: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Utilization is of the time between two readings that are at least `interval_s` apart."""
        self._interval_s = interval_s
        self._read = read or _read
        self._clock = clock
        self._lock = threading.Lock()
        self._at_s = clock()
        self._times = self._processor_times()
        self._utilization = 0.0

    def _processor_times(self) -> tuple[int, int]:
        """Ticks that were used, and all."""
        first = self._read("/proc/stat").partition("\n")[0]
        ticks = [int(word) for word in first.split()[1 : 1 + _COLUMNS]]
        return sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT], sum(ticks)

    def families(self) -> list[Family]:
        """As they are now. Raises `OSError` where the kernel does not tell."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._at_s >= self._interval_s:
                used, total = self._processor_times()
                passed = total - self._times[1]
                if passed > 0:
                    self._utilization = max(0.0, (used - self._times[0]) / passed)
                self._at_s, self._times = now_s, (used, total)
            utilization = self._utilization
        memory = self._memory()
        total_bytes = memory["MemTotal"]
        used_bytes = total_bytes - memory["MemAvailable"]
        values = (utilization, total_bytes, used_bytes)
        return [
            Family(name, text, "gauge", [Sample("", (), value)])
            for name, text, value in zip(NAMES, _TEXTS, values, strict=True)
        ]

    def _memory(self) -> dict[str, int]:
        """Bytes by name."""
        rows = (line.split() for line in self._read("/proc/meminfo").splitlines())
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1}


_TEXTS = (
    "CPU utilization rate [0.0 - 1.0]",
    "CPU total memory (RAM), in bytes",
    "CPU used memory (RAM), in bytes",
)


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
