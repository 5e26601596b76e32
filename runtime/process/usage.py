"""Measures what processes use of the machine, and what is left: memory, processor time, idle processors.

Theory of operation. Only `MemoryAccount` has a lock. A charge gives its bytes back when nothing refers to it any more,
perhaps in the garbage collector, where no lock may be taken. So it appends to a deque, and the next call of the
account collects that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moonpool.runtime.process.process_tree import children_of

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Places in proc_pid_stat(5), counted after the command's name.
_UTIME, _STIME, _START, _RSS = 11, 12, 19, 21
# The kernel counts starts from the boot. The small drift of that against the clock does not matter here.
_BOOT_S = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class ProcessUsage(NamedTuple):
    """Resident memory, shared memory included, and processor time since the start."""

    rss_bytes: int
    cpu_s: float
    started_s: float
    """The start, in seconds since the epoch."""


def usage_of(pid: int) -> ProcessUsage | None:
    """Return the usage of a process; None if it does not exist any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of a command may have any characters, brackets and spaces included.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    cpu_s = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    started_s = _BOOT_S + int(fields[_START]) / _TICKS_PER_S
    return ProcessUsage(int(fields[_RSS]) * _PAGE_BYTES, cpu_s, started_s)


def cpu_s_of(pid: int) -> float:
    """Return the processor time of a process, more exactly than `usage_of` does; 0.0 if it does not exist any more."""
    try:
        # The number of the clock of a process, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        usage = usage_of(pid)
        return 0.0 if usage is None else usage.cpu_s


def addresses_of(pid: int) -> int:
    """Return the addresses that a process has in use, in bytes; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[0]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def peak_bytes_of(pid: int) -> int:
    """Return the most memory that a process has had at a time; 0 if it has ended."""
    try:
        (row,) = status_rows(pid, b"VmHWM")
    except OSError:
        return 0
    return int(row[0]) << 10 if row else 0


def status_rows(pid: int, *names: bytes) -> list[list[bytes]]:
    """Return the words of rows of /proc/PID/status, none for a row that is not there. Raises OSError."""
    with open(f"/proc/{pid}/status", "rb") as file:
        text = file.read()
    # The kernel escapes the ends of lines in a name, so no process can forge a row.
    return [text.partition(b"\n%b:" % name)[2].partition(b"\n")[0].split() for name in names]


def with_descendants(pids: Iterable[int]) -> list[int]:
    """Return processes and all that they have started, each once."""
    found: dict[int, None] = {}
    left = list(pids)
    while left:
        pid = left.pop()
        if pid not in found:
            found[pid] = None
            left += children_of(pid)
    return list(found)


class ProcessMemory(NamedTuple):
    """The part of the machine's memory that a process has."""

    own_bytes: int
    """Its own pages, and those of files."""
    shared_bytes: int
    """Shared memory, as far as the process has touched it."""


_NO_MEMORY = ProcessMemory(0, 0)


def memory_of(pid: int) -> ProcessMemory:
    """Return the part of the machine's memory that a process has; nothing if it has ended.

    A page that several processes share counts for each with its part, so the sum over all of them has it once. The
    kernel shows that to the owner of a process alone. Of a process that hides it, all resident pages count, which is
    never too little.
    """
    try:
        rows = _rows(f"/proc/{pid}/smaps_rollup")
        shared_bytes = rows.get("Pss_Shmem", 0)
        return ProcessMemory(rows.get("Pss", 0) - shared_bytes, shared_bytes)
    except PermissionError:
        pass
    except OSError:  # it has ended
        return _NO_MEMORY
    try:
        rows = _rows(f"/proc/{pid}/status")
    except OSError:
        return _NO_MEMORY
    return ProcessMemory(rows.get("RssAnon", 0) + rows.get("RssFile", 0), rows.get("RssShmem", 0))


def proportional_bytes(pid: int) -> int:
    """Return the sum of what `memory_of` returns."""
    return sum(memory_of(pid))


def _rows(path: str) -> dict[str, int]:
    """Return the rows of such a file that are sizes, in bytes."""
    # The name of a command, in the first row of one of them, may have any bytes.
    with open(path, encoding="ascii", errors="replace") as file:
        parts = (line.split() for line in file)
        return {part[0][:-1]: int(part[1]) << 10 for part in parts if part[2:] == ["kB"]}


def available_memory_bytes() -> int:
    """Return the memory that new processes may have: what the machine has left, and the container in which this process
    runs.
    """
    free = [machine_memory_bytes()]
    with contextlib.suppress(OSError, ValueError, LookupError):
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        free.append(int(rows["MemAvailable"].split()[0]) << 10)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        free.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")))
    return max(0, min(free))


def machine_memory_bytes() -> int:
    """Return the memory of the machine, or of the container in which this process runs."""
    limits = [os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, "rb") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(limits)


def part_of_memory(part: int, most_bytes: int) -> int:
    """Return a bound in bytes: one `part`th of the machine's memory, and `most_bytes` at most."""
    return min(machine_memory_bytes() // part, most_bytes)


class MemoryAccount:
    """Counts memory of this process that many take under one limit. Any thread may call any method."""

    __slots__ = ("__weakref__", "_given_back", "_lock", "_used_bytes")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._given_back: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        """The bytes of all charges together."""
        with self._lock:
            return self._collected()

    def charge(self, size_bytes: int, limit_bytes: int) -> MemoryCharge | None:
        """Count so many bytes more, before they are taken. None if all together would exceed the limit."""
        with self._lock:
            if self._collected() + size_bytes > limit_bytes:
                return None
            self._used_bytes += size_bytes
        return MemoryCharge(self, size_bytes)

    def _collected(self) -> int:
        while self._given_back:
            self._used_bytes -= self._given_back.popleft()
        return self._used_bytes


class MemoryCharge:
    """Bytes that an account counts until nothing refers to this object any more."""

    __slots__ = ("_account", "_size_bytes")

    def __init__(self, account: MemoryAccount, size_bytes: int) -> None:
        self._account = account
        self._size_bytes = size_bytes

    def __del__(self) -> None:
        self._account._given_back.append(self._size_bytes)


# The columns of /proc/stat, after the name, for time that a processor was idle or waited for a disk.
_IDLE, _IOWAIT = 3, 4
_GROUPS = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts at one moment; two of them make a measurement."""

    at_s: float
    # Idle seconds of each processor, by its number.
    idle_s: dict[int, float]
    # For each group with a quota: the processors that it may use at once, and the seconds that it used.
    quotas: tuple[tuple[float, float], ...]


def reading(read: Callable[[str], str] | None = None) -> Reading:
    """Read the counts as they are now. Raises OSError if the kernel does not show them."""
    read = read or _read
    idle_s = {}
    for line in read("/proc/stat").splitlines():
        name, *ticks = line.split()
        # The first line, `cpu`, is the sum.
        if name.startswith("cpu") and name != "cpu":
            idle_s[int(name[3:])] = (int(ticks[_IDLE]) + int(ticks[_IOWAIT])) / _TICKS_PER_S
    return Reading(time.monotonic(), idle_s, tuple(_quotas(read)))


def spare_cores(before: Reading, after: Reading, cpus: Collection[int] = ()) -> float:
    """Return how many of `cpus` (of those that this process may use, if empty) had nothing to do from one reading to
    the next.
    """
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return 0.0
    allowed = cpus or os.sched_getaffinity(0)
    idle_s = sum(
        min(seconds, max(0.0, after.idle_s[cpu] - before.idle_s[cpu]))
        for cpu in allowed
        if cpu in before.idle_s and cpu in after.idle_s
    )
    spare = [idle_s / seconds]
    # The quota of a container may leave fewer processors than are idle.
    if len(before.quotas) == len(after.quotas):
        for (_, used_s), (most, now_s) in zip(before.quotas, after.quotas, strict=True):
            spare.append(max(0.0, most - (now_s - used_s) / seconds))
    return min(spare)


def _quotas(read: Callable[[str], str]) -> Iterator[tuple[float, float]]:
    """Find the quotas. With cgroup v2, those of each group from this process's own upwards; with v1, that of the
    topmost one.
    """
    for group in _groups(read):
        try:
            quota, period = read(f"{group}/cpu.max").split()
            counts = dict(line.split(None, 1) for line in read(f"{group}/cpu.stat").splitlines())
            if quota != "max":
                yield int(quota) / int(period), int(counts["usage_usec"]) / 1e6
        except (OSError, ValueError, LookupError):  # the root has no quota
            continue
    try:
        quota_us = int(read(f"{_GROUPS}/cpu/cpu.cfs_quota_us"))
        period_us = int(read(f"{_GROUPS}/cpu/cpu.cfs_period_us"))
        used_s = int(read(f"{_GROUPS}/cpuacct/cpuacct.usage")) / 1e9
    except (OSError, ValueError):
        return
    if quota_us > 0 and period_us > 0:
        yield quota_us / period_us, used_s


def _groups(read: Callable[[str], str]) -> list[str]:
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        return []
    inside = next((line[3:] for line in lines if line.startswith("0::/")), None)
    if inside is None or ".." in inside:
        return []
    path = Path(_GROUPS + inside)
    above = [path, *path.parents]
    return [str(group) for group in above if str(group).startswith(_GROUPS)]


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
