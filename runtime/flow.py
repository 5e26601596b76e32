"""How much a stub may say in a second before it has to wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.budgets import MESSAGE_BYTES, MESSAGES_PER_S, PAUSE_MS
from moonpool.runtime.output import Budget

if TYPE_CHECKING:
    from moonpool.runtime.reactor import Reactor


class Flow:
    """Of one channel. What is not read blocks the stub that wrote it, and nobody else. For the reactor's thread."""

    def __init__(self, reactor: Reactor, fd: int) -> None:
        """`fd` is watched by the reactor."""
        self._reactor = reactor
        self._fd = fd
        self._budget = Budget(MESSAGES_PER_S)
        self._unpaid = 0

    def took(self, size_bytes: int, messages: int = 1) -> None:
        """Something of that size was received, which costs as much as so many messages beside."""
        self._unpaid += messages + size_bytes // MESSAGE_BYTES

    def settle(self) -> None:
        """After a round of receiving: the next one is later where this was too much."""
        unpaid, self._unpaid = self._unpaid, 0
        if unpaid and not self._budget.spend(unpaid):
            self._reactor.pause(self._fd, PAUSE_MS / 1000)
