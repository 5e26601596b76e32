"""The front ends of a server: as many as were asked for, started again when one ends."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from moonpool.runtime.frontend.pool.member import Member
from moonpool.runtime.frontend.pool.messages import Word

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.frontend.pool.directory import Directory
    from moonpool.runtime.reactor import Reactor

_log = logging.getLogger("moonpool")
_START_S = 30.0
# The pause before a front end is started again that has ended: from the first to the last of several.
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_HEALTHY_S = 30.0


class Fleet:
    """Any thread may call any method, but for the reactor's."""

    def __init__(
        self,
        directory: Directory,
        reactor: Reactor,
        settings: Mapping[str, Any],
        count: int,
    ) -> None:
        """`settings` are what a front end is to listen on, and where this process does: see `front_end`."""
        self._directory = directory
        self._reactor = reactor
        self._settings = settings
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_stopping = False
        # Whether one ended, or could not be started, before it listened.
        self._has_failed = False
        self._seats: list[Member | None] = [None] * count
        self._keepers = [
            threading.Thread(
                target=self._keep, args=(number,), name=f"moonpool-front-end-{number}", daemon=True
            )
            for number in range(count)
        ]
        self._gone: set[Member] = set()

    def start(self) -> None:
        """Start all; returns when all of them listen. Raises `OSError` where one does not."""
        for keeper in self._keepers:
            keeper.start()
        end_s = time.monotonic() + _START_S
        with self._lock:
            self._changed.wait_for(
                lambda: self._has_failed or self._all_listen(), max(0.0, end_s - time.monotonic())
            )
            is_well = self._all_listen() and not self._has_failed
        if not is_well:
            self.close()
            raise OSError("a front end does not listen; the log says why")

    def _all_listen(self) -> bool:
        return all(member is not None and member.is_listening.is_set() for member in self._seats)

    def _keep(self, number: int) -> None:
        """See that there is a front end of this number, until the end."""
        pause_s = _PAUSE_S
        while True:
            began_s = time.monotonic()
            member = self._start_one(number)
            with self._lock:
                while not (self._is_stopping or member is None or member in self._gone):
                    self._changed.wait()
                if self._is_stopping:
                    return
                self._seats[number] = None
            if member is None or not member.is_listening.is_set():
                with self._lock:
                    self._has_failed = True
                    self._changed.notify_all()
            if member is not None:
                self._gone.discard(member)
                _log.error("[%s] has ended and is started again", member.name)
                self._directory.remove(member)
                member.end()
            pause_s = _PAUSE_S if time.monotonic() - began_s > _HEALTHY_S else pause_s * 2
            with self._lock:
                if self._changed.wait_for(
                    lambda: self._is_stopping, min(pause_s, _LONGEST_PAUSE_S)
                ):
                    return

    def _start_one(self, number: int) -> Member | None:
        try:
            member = Member(f"front_end_{number}", self._reactor, self._hear, self._lose)
        except (OSError, RuntimeError) as error:  # the machine has no thread to spare
            _log.error("a front end cannot be started: %s", error)
            return None
        with self._lock:
            self._seats[number] = member
        member.begin(self._settings)
        self._directory.add(member)
        return member

    def _hear(self, member: Member, fields: list[Any]) -> None:
        self._directory.hear(member, fields)
        if fields[0] == Word.LISTENING:
            with self._lock:
                self._changed.notify_all()

    def _lose(self, member: Member) -> None:
        with self._lock:
            self._gone.add(member)
            self._changed.notify_all()

    # The end

    def drain(self, timeout_s: float) -> bool:
        """Take no more connections, finish the requests that are there; False where some were cut off."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
            members = [member for member in self._seats if member is not None]
        for member in members:
            member.tell(Word.STOP, int(timeout_s * 1000))
        end_s = time.monotonic() + timeout_s
        codes = [member.process.wait(max(0.0, end_s - time.monotonic())) for member in members]
        self.close()
        return all(code == 0 for code in codes)

    def close(self) -> None:
        """End all of them at once. May be called many times."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        for keeper in self._keepers:
            if keeper.ident is not None:
                keeper.join()
        with self._lock:
            members = [member for member in self._seats if member is not None]
            self._seats = [None] * len(self._seats)
        for member in members:
            self._directory.remove(member)
            member.end()
