"""Lets requests that hold the loop for long wait for each other, so that other clients do not wait for all of them.

Theory of operation. Reading a body of JSON as large as the limit takes seconds, in pieces that each hold the
interpreter. If many such bodies come together, all of them are ready at once, and one after the other would be parsed
before the loop looks at another client, or answers the main process, which would take it for hung. So one of them is
read at a time: in the loop, with a turn for others behind it, or on a thread that the loop waits for. The latter also
bounds the memory for their values.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.server.http.connection import HttpExchange

LONG_BYTES = 256 << 10
"""The size above which JSON takes longer than other clients should wait."""
_log = RuntimeLog("moonpool")


class Turns:
    """A queue of long requests. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: OrderedDict[int, tuple[HttpExchange, Callable[[], asyncio.Future[Any] | object]]] = OrderedDict()
        self._numbers = count()
        # If one is under way, or about to be.
        self._is_taken = False

    def take(self, exchange: HttpExchange, act: Callable[[], asyncio.Future[Any] | object]) -> None:
        """Call `act` in a later turn of the loop, unless the client has gone by then. If it returns a future, the next
        one waits for that.
        """
        number = next(self._numbers)
        self._waiting[number] = exchange, act
        # The bodies of clients that come and go would fill the memory while one is read.
        exchange.cancel = partial(self._drop, number)
        if not self._is_taken:
            self._is_taken = True
            self._loop.call_soon(self._next)

    def _drop(self, number: int) -> None:
        self._waiting.pop(number, None)

    def _next(self) -> None:
        if not self._waiting:
            self._is_taken = False
            return
        _, (exchange, act) = self._waiting.popitem(last=False)
        exchange.cancel = None
        under_way: object = None
        try:
            if not exchange.is_gone:
                under_way = act()
        except Exception as error:
            _log.exception("answering %s %r failed", exchange.head.method, exchange.head.target[:200])
            exchange.fail(500, public_text(error))
        if isinstance(under_way, asyncio.Future):
            under_way.add_done_callback(self._ended)
        else:
            self._ended(None)

    def _ended(self, _: object) -> None:
        self._loop.call_soon(self._next)
