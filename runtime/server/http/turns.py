"""Lets requests that hold the loop for long wait for each other, so that other clients do not wait for all of them.

Theory of operation. The loop needs seconds to parse a body of JSON as large as the limit, and does nothing else meanwhile. If
many such bodies come together, all of them are ready at once, and the loop would parse one after the other before it looks at
another client, or answers the main process, which would take it for hung. So it parses one of them in each turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.server.http.connection import HttpExchange

LONG_BYTES = 1 << 20
"""The size above which JSON takes longer than other clients should wait."""
_log = logging.getLogger("moonpool")


class Turns:
    """A queue of long requests. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[HttpExchange, Callable[[], object]]] = deque()

    def take(self, exchange: HttpExchange, act: Callable[[], object]) -> None:
        """Call `act` in a later turn of the loop, unless the client has gone by then."""
        self._waiting.append((exchange, act))
        if len(self._waiting) == 1:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        exchange, act = self._waiting[0]
        try:
            if not exchange.is_gone:
                act()
        except Exception as error:
            _log.exception(
                "answering %s %r failed", exchange.head.method, exchange.head.target[:200]
            )
            exchange.fail(500, public_text(error))
        finally:
            self._waiting.popleft()
            if self._waiting:
                self._loop.call_soon(self._next)
