"""How many files the server's process may have open, and how many of them are for clients."""

from __future__ import annotations

import contextlib
import resource

_FILES = resource.RLIMIT_NOFILE
# Enough for all that options ask for; models inherit it, and some programs count up to it.
_ENOUGH = 1 << 16


def raise_limit() -> None:
    """Let this process have more files open, as far as the system lets it, see setrlimit(2).

    What a shell gives is for programs without clients.
    """
    before, most = resource.getrlimit(_FILES)
    wanted = _ENOUGH if most == resource.RLIM_INFINITY else min(most, _ENOUGH)
    if before != resource.RLIM_INFINITY and before < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(_FILES, (wanted, most))


def most_connections(wanted: int) -> int:
    """So many connections, or as many as leave half of the descriptors: without one, no model is started again."""
    limit, _ = resource.getrlimit(_FILES)
    return wanted if limit == resource.RLIM_INFINITY else min(wanted, limit // 2)
