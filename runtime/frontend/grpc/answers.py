"""Who waits for the answers of stubs to requests that came over gRPC.

The polling thread itself, where the model is quick: it has nothing else to do when its queue is empty, and an answer
that it reads needs no other thread. Where a model takes longer, a thread of its own waits on the sockets of the stubs.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING

from moonpool.runtime.watched_sockets import WatchedSockets

if TYPE_CHECKING:
    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.execution import Execution


_log = logging.getLogger("moonpool")
# How long the polling thread waits for an answer before it looks after its clients again: the least that
# `poll` can wait.
_PATIENCE_MS = 1
# A model that takes longer is not waited for there, but tried again after so many executions.
_QUICK_NS = 600_000
_SKIPS = 64


class Answers:
    """Drives executions. `drive` is for any thread."""

    def __init__(self, turn: threading.Lock) -> None:
        """`turn` is held by whoever works off an event: see `grpc.core`."""
        self._turn = turn
        self._lock = threading.Lock()
        self._sockets = WatchedSockets()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.epoll.register(self._wake_fd, select.EPOLLIN)
        self._is_closed = False
        self._round = 0
        # Of the polling thread: what it sent and nobody waits for yet, and how often slow models are passed over.
        self.poller: int | None = None
        self._fresh: list[Execution] = []
        self._skips: weakref.WeakKeyDictionary[ModelInstance, int] = weakref.WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run, name="moonpool-grpc-answers", daemon=True)
        self._thread.start()

    def drive(self, execution: Execution) -> bool:
        """Wait for the answer of an execution that is offered, and claim it when it is there.

        False where nobody waits here any more.
        """
        if threading.get_ident() == self.poller:
            skips = self._skips.get(execution.instance, 0)
            if not skips:
                self._fresh.append(execution)
                return True
            self._skips[execution.instance] = skips - 1
        return self._watch(execution)

    # On the polling thread

    @property
    def has_fresh(self) -> bool:
        """Whether something was sent that is to be waited for here."""
        return bool(self._fresh)

    def attend(self, patience_ms: int = _PATIENCE_MS) -> None:
        """Wait a moment for the answers to what was sent; what takes longer is left to the other thread."""
        fresh, self._fresh = self._fresh, []
        waiting: dict[int, Execution] = {}
        poll = select.poll()
        for execution in fresh:
            if execution.claim(poll):
                fd = execution.pending.fileno()
                if fd < 0:  # the stub has ended, and was cleared away
                    self._finish(execution)
                    continue
                waiting[fd] = execution
                poll.register(fd, select.POLLIN)
        begun_ns = time.monotonic_ns()
        ready = poll.poll(patience_ms) if waiting else ()
        # An answer that is there by the time that all clients have been read was quick enough.
        is_slow = time.monotonic_ns() - begun_ns > _QUICK_NS
        if is_slow:
            for execution in waiting.values():
                self._skips[execution.instance] = _SKIPS
        for fd, _ in ready:
            self._finish(waiting.pop(fd))
        for execution in waiting.values():
            execution.offer()
            if patience_ms and not is_slow:
                self._fresh.append(execution)
            elif not self._watch(execution) and execution.claim(self):
                execution.drive_in_reactor()

    def _watch(self, execution: Execution) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            if not execution.is_offered:
                return True
            try:
                watched = self._sockets.of(execution.pending)
            except OSError:  # the stub has ended, and was cleared away
                return False
            watched.execution = execution
            watched.round = self._round
        return True

    def _run(self) -> None:
        while True:
            ready = self._sockets.epoll.poll()
            with self._lock:
                self._round += 1
            for fd, _ in ready:
                if fd == self._wake_fd:
                    return
                execution = self._take(fd)
                if execution is not None and execution.claim(self):
                    self._finish(execution)

    def _finish(self, execution: Execution) -> None:
        try:
            with self._turn:
                execution.finish()
        except BaseException:  # all clients depend on this thread
            _log.exception("an answer could not be handed out")

    def _take(self, fd: int) -> Execution | None:
        with self._lock:
            watched = self._sockets.find(fd)
            if watched is None:
                return None
            execution = watched.execution
            if execution is not None and watched.round == self._round:
                # It came after the look: what was seen may have been the answer to somebody else, who has read it.
                return None
            watched.execution = None
            if execution is None or not execution.is_offered:
                # Somebody else's answer, or the end of the stub. Whoever comes next adds it again.
                self._sockets.forget(watched)
            return execution

    def close(self) -> None:
        """Wait no more; what is executing is left to the reactors of its models."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for execution in self._sockets.close():
            if execution.claim(self):
                execution.drive_in_reactor()
        os.close(self._wake_fd)
