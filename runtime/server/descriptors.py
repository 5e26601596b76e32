"""How many files the server's process may have open, and how many of them are for clients."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from moonpool.runtime.server.options import ServerOptions

_FILES = resource.RLIMIT_NOFILE
# Enough for all that options ask for; models inherit it, and some programs count up to it.
_ENOUGH = 1 << 16
# The descriptors for each connection of the limit for HTTP, with those that get a refusal and those for the metrics.
_PER_HTTP = 1.25
# A front end passes requests of HTTP on over another connection.
_PER_RELAY = 1.125


class Connections(NamedTuple):
    """How many connections each protocol may have in one process."""

    http: int
    grpc: int


def raise_limit() -> None:
    """Let this process have more files open, as far as the system lets it, see setrlimit(2).

    What a shell gives is for programs without clients.
    """
    before, most = resource.getrlimit(_FILES)
    wanted = _ENOUGH if most == resource.RLIM_INFINITY else min(most, _ENOUGH)
    if before != resource.RLIM_INFINITY and before < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(_FILES, (wanted, most))


def connections(options: ServerOptions) -> Connections:
    """Return the limits of the options, reduced in proportion if they would leave less than half of the descriptors.

    Stubs need that half to be started again. Each protocol has its own part, so clients of one cannot take the
    connections of the other.
    """
    http = options.http_max_connections
    grpc = options.grpc_max_connections if options.allow_grpc else 0
    wanted = http * (_PER_HTTP + (_PER_RELAY if options.frontends > 1 else 0)) + grpc
    limit, _ = resource.getrlimit(_FILES)
    part = 1.0 if limit == resource.RLIM_INFINITY else min(1.0, limit / 2 / max(1, wanted))
    return Connections(max(1, int(http * part)), max(1, int(grpc * part)))
