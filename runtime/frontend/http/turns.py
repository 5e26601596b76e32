"""Has requests that hold the loop for long wait for each other, so that everybody else does not wait for all of them.

Theory of operation. A body of JSON as large as the limit takes seconds to be read, in which the loop does nothing else. Where
many of them come in together, the loop has all of them ready at once, and would read one after the other before it looks at
another client, or answers the main process, which would take it for hung. So one of them is read in each turn of the loop.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from moonpool.runtime.public_text import public_text

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from moonpool.runtime.frontend.http.exchange import Exchange

LONG_BYTES = 1 << 20
"""JSON of more than this takes longer than others should wait for."""
_log = logging.getLogger("moonpool")


class Turns:
    """For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Exchange, Callable[[], object]]] = deque()

    def take(self, exchange: Exchange, act: Callable[[], object]) -> None:
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
