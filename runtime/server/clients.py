"""The clients of a process's ports: who gets a place, and what the log says of those who get none.

Theory of operation. All of it belongs to the thread of the event loop. A client's place is decided once, when it
connects: with TLS before the handshake (`begins`), else when its connection is made (`opened`). It has the place until
`closed` or `gave_up`. A port has a bound, and so have all ports together (`AllClients`), so that descriptors are left
for stubs whichever port is flooded. The port for metrics is `apart`: its few places are its own, as those who monitor
must see a flood. Some clients beyond a bound are accepted only to be told so; they have a bound of their own, and take
no place from others.

Clients can cause refusals without end, so they are counted, and the log has one line a second at most.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Generic, Protocol, TypeVar

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.usage import part_of_memory
from moonpool.runtime.server.meter import Meter

_log = RuntimeLog("moonpool")
_LOG_S = 1.0
# For all clients of a port together: what they do not read.
_UNSENT_BYTES = part_of_memory(8, 4 << 30)
C = TypeVar("C")


class Admission(Enum):
    """Says whether a client is served."""

    WELCOME = 0
    TOLD = 1
    """No, and it gets an answer that says so."""
    NONE = 2
    """No, and its connection is closed without an answer."""


class AllClients:
    """The clients of all ports of a process together. For the loop's thread."""

    def __init__(self, most: int | None = None) -> None:
        """`most` bounds all ports that are not apart; None leaves them to their own bounds."""
        self.most = most
        self.count = 0
        self._refused: Counter[str] = Counter()
        self._saying: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """If no port may take another client."""
        return self.most is not None and self.count >= self.most

    def refused(self, name: str, why: str) -> None:
        """Have the log say so, within a second."""
        self._refused[f"{name} has refused %d, as {why}"] += 1
        if self._saying is None:
            self._saying = asyncio.get_running_loop().call_later(_LOG_S, self._say)

    def _say(self) -> None:
        self._saying = None
        refused, self._refused = self._refused, Counter()
        what = "; ".join(text % count for text, count in refused.items())
        _log.warning("too many connections: %s", what)


class Clients(Generic[C]):
    """The clients of one port. For the loop's thread."""

    def __init__(
        self, name: str, most: int, together: AllClients, meter: Meter, *, most_told: int = 0, is_apart: bool = False
    ) -> None:
        """`name` is that of the port in the log."""
        self.open: set[C] = set()
        """The connections that were made."""
        self.is_closed = False
        """Nobody is welcome any more, as the server ends."""
        self._name = name
        self._most = most
        self._most_told = most_told
        self._together = together
        self._is_apart = is_apart
        self.meter = meter
        """Counts the connections, and for the port its answers."""
        # Those that have a place, and those that have one only to be told, from the moment that they connect.
        self._welcome: set[C] = set()
        self._told: set[C] = set()
        self._emptied: asyncio.Future[None] | None = None

    @property
    def count(self) -> int:
        """The number of clients that have a place, with those that do not speak TLS yet."""
        return len(self._welcome) + len(self._told)

    def begins(self, client: C) -> bool:
        """Count a client that has connected and has yet to speak TLS; False if it is to be closed."""
        return self._place(client) is not Admission.NONE

    def gave_up(self, client: C) -> None:
        """Count it no longer, unless its connection was made."""
        if client not in self.open:
            self._leave(client)

    def opened(self, client: C) -> Admission:
        """Count a connection. Returns its place."""
        if client in self._welcome:
            place = Admission.WELCOME
        elif client in self._told:
            place = Admission.TOLD
        else:
            place = self._place(client)
        self.open.add(client)
        self.meter.connected()
        return place

    def closed(self, client: C) -> None:
        """Count a connection no longer."""
        self.open.discard(client)
        self._leave(client)
        self.meter.disconnected()
        if not self.open and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    async def emptied(self, timeout_s: float) -> bool:
        """Return when all connections have ended; False if the time is over before."""
        if self.open:
            self._emptied = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._emptied, timeout_s)
            except TimeoutError:
                return False
        return True

    def _place(self, client: C) -> Admission:
        if self.is_closed:
            why = None
        elif len(self._welcome) >= self._most:
            why = f"it has its {self._most}"
        elif not self._is_apart and self._together.is_full:
            why = f"all ports together have their {self._together.most}"
        else:
            self._welcome.add(client)
            self._together.count += not self._is_apart
            return Admission.WELCOME
        if why is not None:
            self._together.refused(self._name, why)
        if len(self._told) >= self._most_told:
            return Admission.NONE
        self._told.add(client)
        return Admission.TOLD

    def _leave(self, client: C) -> None:
        if client in self._welcome:
            self._welcome.remove(client)
            self._together.count -= not self._is_apart
        self._told.discard(client)


class Reader(Protocol):
    """A connection whose client reads."""

    @property
    def unsent_bytes(self) -> int:
        """The bytes that wait for it."""

    def abort(self) -> None:
        """End the connection at once."""


def relieve(readers: Iterable[Reader]) -> None:
    """While too much waits for all clients of a port, cut off those for whom the most waits."""
    waiting = [(each.unsent_bytes, each) for each in readers]
    total_bytes = sum(unsent_bytes for unsent_bytes, _ in waiting)
    for unsent_bytes, reader in sorted(waiting, key=lambda each: each[0], reverse=True):
        if total_bytes <= _UNSENT_BYTES:
            break
        total_bytes -= unsent_bytes
        reader.abort()
