"""How much a stub may say in a second before it has to wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moonpool.runtime.budgets import MESSAGE_BYTES, MESSAGES_PER_S, PAUSE_MS

if TYPE_CHECKING:
    from moonpool.runtime.reactor import Reactor


class Flow:
    """Of one channel. What is not read blocks the stub that wrote it, and nobody else. For the reactor's thread."""

    def __init__(self, reactor: Reactor, fd: int) -> None:
        """`fd` is watched by the reactor."""
        self._reactor = reactor
        self._fd = fd
        # The messages that may come at once: those of one second at most, negative while the stub is over budget.
        self._left = float(MESSAGES_PER_S)
        self._at_s = time.monotonic()
        self._unpaid = 0

    def took(self, size_bytes: int, messages: int = 1) -> None:
        """Something of that size was received, which costs as much as so many messages beside."""
        self._unpaid += messages + size_bytes // MESSAGE_BYTES

    def settle(self) -> None:
        """Charge for a round of receiving. Over budget, the channel is not read until the stub is back in it."""
        if not self._unpaid:
            return
        now_s = time.monotonic()
        saved = self._left + (now_s - self._at_s) * MESSAGES_PER_S
        self._left = min(MESSAGES_PER_S, saved) - self._unpaid
        self._at_s, self._unpaid = now_s, 0
        if self._left < 0:
            self._reactor.pause(self._fd, max(PAUSE_MS / 1000, -self._left / MESSAGES_PER_S))
