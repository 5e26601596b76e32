"""The figures of a process that could grow."""

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

# This matches `socket:[1234]` and `/memfd:moonpool-17 (deleted)` up to the numbers.
_KIND = re.compile(r"[^\[]*?(?=:\[|-\d|$)")
STUB = b"triton_python_backend_stub"


class Figures(NamedTuple):
    """The figures of one process at one moment. Descriptors are counted by kind, as a restarted stub has other
    numbers.
    """

    descriptors: dict[str, int]
    threads: int
    stubs: int
    others: int
    shared_bytes: int


def figures_of(pid: int, open_files: Callable[[], int] | None = None) -> Figures:
    """Read the figures of this process, or of another one of ours.

    `open_files` is asked for the number of descriptors if the process is closed to us: a server that hosts strict
    models can be read only by root.
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
            # Such descriptors are open for a moment only.
            if target.startswith("/proc/"):
                continue
            if target.startswith("/memfd:"):
                found = os.stat(path)
                # An empty region was given back by a contained process, and is kept to be given to it again.
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
    """Return the resident memory; for this process without the memory that its allocator keeps."""
    if pid == os.getpid():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> list[int]:
    """Return the children of all its threads, including ended ones that were not reaped."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def command(pid: int) -> bytes:
    """Return its command line; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
