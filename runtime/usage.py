"""What a process takes of the machine, as the kernel counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Places in proc_pid_stat(5), counted behind the command's name.
_UTIME, _STIME, _START, _RSS = 11, 12, 19, 21
# The kernel counts starts from the boot; for how much that moves against the clock nobody cares.
_BOOT_S = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Usage(NamedTuple):
    """Memory that is resident now, shared memory included, and processor time since the start."""

    rss_bytes: int
    cpu_s: float
    started_s: float
    """When it began, in seconds since the epoch."""


def usage_of(pid: int) -> Usage | None:
    """None where there is no such process any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of a command may hold anything, also brackets and spaces.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    cpu_s = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    started_s = _BOOT_S + int(fields[_START]) / _TICKS_PER_S
    return Usage(int(fields[_RSS]) * _PAGE_BYTES, cpu_s, started_s)


def machine_memory_bytes() -> int:
    """The memory of the machine, or of the container that this process is in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(limits)
