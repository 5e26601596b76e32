"""Keeps what a run prints, within bounds, and hands it on as it comes."""

from __future__ import annotations

import codecs
import os
from collections import deque
from collections.abc import Callable

from moonpool.runtime.process.terminal import harmless

# So much of each stream is kept: the first half, and the last one.
KEPT_BYTES = 1 << 20
_HALF_BYTES = KEPT_BYTES // 2
_READ_BYTES = 1 << 16
Tell = Callable[[str, str], object]


class Printed:
    """The read end of one stream of a run. Owns the descriptor until `close`."""

    def __init__(self, name: str, fd: int) -> None:
        """Read the stream `name`."""
        os.set_blocking(fd, False)
        self.fd = fd
        self._name = name
        # Gets each piece of text, and the name of the stream.
        self.tell: Tell | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._first = bytearray()
        self._last: deque[bytes] = deque()
        self._last_bytes = self._left_out = 0

    def read(self) -> bool:
        """Take what has come. Returns False if there is nothing at the moment, or nothing any more."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            return False
        self._keep(data)
        if self.tell is not None and (text := self._decoder.decode(data)):
            self.tell(shown(text), self._name)
        return True

    def drain(self) -> None:
        """Read what was printed until now. Ends even if the source prints without an end."""
        for _ in range(2 * KEPT_BYTES // _READ_BYTES):
            if not self.read():
                break

    def _keep(self, data: bytes) -> None:
        room = _HALF_BYTES - len(self._first)
        if room > 0:
            self._first += data[:room]
            data = data[room:]
        if data:
            self._last.append(data)
            self._last_bytes += len(data)
            while self._last_bytes - len(self._last[0]) >= _HALF_BYTES:
                gone = len(self._last.popleft())
                self._last_bytes -= gone
                self._left_out += gone

    def text(self) -> str:
        """Return what was printed since the last call, without what was too much, and with the count of that."""
        last = b"".join(self._last)
        over = max(0, len(last) - _HALF_BYTES)
        self._left_out += over
        parts = [bytes(self._first)]
        if self._left_out:
            parts.append(f"\n… ({self._left_out} bytes are left out) …\n".encode())
        parts.append(last[over:])
        self._first.clear()
        self._last.clear()
        self._last_bytes = self._left_out = 0
        return shown(b"".join(parts).decode("utf-8", "backslashreplace"))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def shown(text: str) -> str:
    """Return the text with its control characters as escapes, but for tabs and ends of lines.

    The same goes for halves of surrogate pairs, which no file takes.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    return "\n".join(harmless(line) for line in text.split("\n"))
