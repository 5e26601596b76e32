"""How much memory may still be taken before the kernel ends a process for it."""

from __future__ import annotations

import os

# Files that say how much a control group may use and uses, and the line of memory.stat that
# says how much of that is cache which the kernel gives up; versions 2 and 1.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Version 1 has a number for "no limit": the largest whole number of pages.
_UNLIMITED_BYTES = 1 << 60


def headroom_bytes(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Bytes left to this process, by the machine and by its control groups, less a sixteenth.

    None where the system does not tell. An estimate: others take memory at the same time.
    """
    rooms = [_machine(proc), *_groups(proc, cgroups)]
    known = [room for room in rooms if room is not None]
    if not known:
        return None
    least = max(0, min(known))
    return least - least // 16


def _machine(proc: str) -> int | None:
    lines = _table(f"{proc}/meminfo")
    available = lines.get("MemAvailable:")
    return None if available is None else (available + lines.get("SwapFree:", 0)) * 1024


def _groups(proc: str, cgroups: str) -> list[int | None]:
    """The room in each group that this process is in, those around it included."""
    rooms = []
    for line in _text(f"{proc}/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for folder, limit, usage, cache in _VERSIONS:
            if folder in controllers.split(","):
                # The path may be the host's, and what a container has mounted be the group itself:
                # then only the last step up finds files.
                while True:
                    base = os.path.join(cgroups, folder, path.strip("/"))
                    rooms.append(_group(base, limit, usage, cache))
                    if path in ("", "/"):
                        break
                    path = os.path.dirname(path)
    return rooms


def _group(base: str, limit: str, usage: str, cache: str) -> int | None:
    try:
        allowed = int(_text(f"{base}/{limit}"))
        used = int(_text(f"{base}/{usage}"))
    except ValueError:  # "max", or no such file
        return None
    if allowed >= _UNLIMITED_BYTES:
        return None
    return allowed - used + _table(f"{base}/memory.stat").get(cache, 0)


def _table(path: str) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
