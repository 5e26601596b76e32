"""What a process has of memory, tasks and disk at the moment, as the kernel tells.

What is read here is in the hand of whoever runs in the process as little as can be: numbers of the kernel, and sizes of
files, of which there may be any number.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from moonpool.runtime.nest import children_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.process import ChildProcess

_BLOCK_BYTES = 512
# A file takes some memory of the kernel's, also an empty one.
_FILE_BYTES = 1024


def memory_and_threads(process: ChildProcess) -> tuple[int, int] | None:
    """Its resident memory, without what it shares by memory of the runtime, and its threads; None once it has ended."""
    fields: dict[bytes, int] = {}
    try:
        with open(f"/proc/{process.pid}/status", "rb") as file:
            for line in file:
                name, _, value = line.partition(b":")
                if name in (b"RssAnon", b"RssFile", b"Threads"):
                    fields[name] = int(value.split()[0])
    except OSError:
        return None
    # Looked at afterwards: so the number was its own when the file was read.
    if not process.is_there() or len(fields) < 3:
        return None
    return (fields[b"RssAnon"] + fields[b"RssFile"]) << 10, fields[b"Threads"]


def tasks_of(process: ChildProcess, threads: int) -> int:
    """Its threads, and those of the processes that it and its children have started."""
    tasks = threads
    for child in descendants_of(process):
        # It may have ended by now.
        with contextlib.suppress(OSError):
            tasks += len(os.listdir(f"/proc/{child}/task"))
    return tasks


def memory_of_all(process: ChildProcess, enough_bytes: int) -> int:
    """Return the memory, without that of files, of a process and all that it has started.

    Memory that forks share is counted once if the kernel lets this process see that. Up to `enough_bytes` a quick
    sum is returned, in which it may count several times.
    """
    pids = [process.pid, *descendants_of(process)]
    # Quick, and too much if they share memory. Shared memory counts only for the descendants: that of the process itself
    # is the memory of its requests, which the runtime counts.
    simple = sum(
        _field(pid, "status", _RESIDENT if number else _RESIDENT[:1])
        for number, pid in enumerate(pids)
    )
    if simple <= enough_bytes:
        return simple
    shares = [
        _field(pid, "smaps_rollup", _SHARES if number else _SHARES[:1])
        for number, pid in enumerate(pids)
    ]
    return sum(shares) if all(shares) else simple


_RESIDENT = (b"RssAnon", b"RssShmem")
_SHARES = (b"Pss_Anon", b"Pss_Shmem")


def _field(pid: int, name: str, fields: Sequence[bytes]) -> int:
    """Return the bytes of these lines of a file in /proc; 0 if it cannot be read."""
    total_bytes = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        for line in file:
            field, _, value = line.partition(b":")
            if field in fields:
                total_bytes += int(value.split()[0]) << 10
    return total_bytes


def descendants_of(process: ChildProcess) -> list[int]:
    """List the processes that a process and its descendants have started, with known orphans."""
    found = [] if process.nest is None else process.nest.orphans()
    parents = [process.pid, *found]
    while parents:
        children = children_of(parents.pop())
        found += children
        parents += children
    return found


def size_of_folder(path: str, enough_bytes: int) -> int:
    """What the files in a folder take, or a little more than enough. Follows no link.

    A folder that hides what is in it, by its rights or the length of its path, counts as more than enough.
    """
    size_bytes, folders = 0, [path]
    while folders and size_bytes <= enough_bytes:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    size_bytes += status.st_blocks * _BLOCK_BYTES + _FILE_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if size_bytes > enough_bytes:
                        break
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was removed meanwhile
        except OSError:
            return enough_bytes + 1
    return size_bytes
