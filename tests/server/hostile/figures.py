"""Memory, descriptors and threads of a server and its stubs together."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Figures(NamedTuple):
    """List a process and all below it."""

    processes: int
    descriptors: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Figures:
        family = _family(pid)
        return cls(
            len(family),
            sum(len(os.listdir(f"/proc/{each}/fd")) for each in family),
            sum(len(os.listdir(f"/proc/{each}/task")) for each in family),
            sum(map(_resident_bytes, family)),
        )


def _family(pid: int) -> list[int]:
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # Threads end while they are being listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (thread / "children").read_text().split():
                found += _family(int(child))
    return found


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process alone. Memory that it shares, such as regions, is counted elsewhere."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return 0 if found is None else int(found[1]) * 1024
