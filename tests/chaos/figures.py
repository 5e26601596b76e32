"""What a process has that could grow."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# `socket:[1234]`, `/memfd:moonpool-17 (deleted)`: without the numbers.
_KIND = re.compile(r"[^\[]*?(?=:\[|-\d|$)")
STUB = b"triton_python_backend_stub"


class Figures(NamedTuple):
    """Of one process at one moment. A descriptor is counted as a kind: what is restarted has another number."""

    descriptors: dict[str, int]
    threads: int
    stubs: int
    others: int
    shared_bytes: int


def figures_of(pid: int, open_files: Callable[[], int] | None = None) -> Figures:
    """Read the figures of this process, or of another one of ours.

    `open_files` is asked for the number of descriptors if the process is closed to us: a server that hosts strict models
    can be looked into by nobody but root.
    """
    descriptors: Counter[str] = Counter()
    shared: dict[int, int] = {}
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        if open_files is None:
            raise
        fds = []
        descriptors["socket"] = open_files()
    for fd in fds:
        with suppress(FileNotFoundError):
            path = f"/proc/{pid}/fd/{fd}"
            target = os.readlink(path)
            # What is open for a moment only.
            if target.startswith("/proc/"):
                continue
            if target.startswith("/memfd:"):
                found = os.stat(path)
                # A region that came back from a contained process: empty, and kept to be given to it again.
                if not found.st_blocks:
                    continue
                shared[found.st_ino] = found.st_size
            descriptors[_KIND.match(target)[0]] += 1  # type: ignore[index]
    children = children_of(pid)
    stubs = [child for child in children if STUB in command(child)]
    return Figures(
        dict(descriptors),
        len(os.listdir(f"/proc/{pid}/task")),
        len(stubs),
        len(children) - len(stubs),
        sum(shared.values()),
    )


def rss_bytes(pid: int) -> int:
    """What lies in memory; of this process without what its allocator keeps for later."""
    if pid == os.getpid():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> list[int]:
    """Children of all its threads, ended ones that nobody has reaped included."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def command(pid: int) -> bytes:
    """Its command line; empty for one that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
