"""Asks models if they are ready: the model in one stub, and all instances of a model together.

Theory of operation. `StubReadiness` works on the reactor's thread and has no lock. It sends READY once for all who ask
until READINESS comes. Each of them gets an answer within `TIMEOUT_S`, even if the model never answers. One timer serves
all. A late READINESS still answers the question: until it comes, no other question is sent, so a slow model is not
asked again and again.

`_Together` has a lock, since instances of other backends may answer on any thread. It passes the first reason on, and
the lock decides which one is the first. The callback runs outside of the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.runtime.model.backend import ModelInstance
from moonpool.runtime.process.reactor import Reactor

# Gets None if the model is ready, else the reason.
Answer: TypeAlias = Callable[[str | None], object]

TIMEOUT_S = 5.0
# Seconds between two looks whether the reactor has ended, and until a backend counts as one that never answers.
_LOOK_S, _MOST_S = 1.0, 120.0
_TOO_LATE = "Timed out waiting for user-defined is_ready() response"
_STILL_TOO_LATE = "Timed out waiting for in-flight is_ready() response"


def not_healthy(instance: str) -> str:
    """Return Triton's text for an instance whose process has ended."""
    return f"Stub process '{instance}' is not healthy."


class StubReadiness:
    """Asks the model of one stub, once for all who ask at the same time."""

    def __init__(self, instance: str, reactor: Reactor, send: Callable[..., None]) -> None:
        """`send` sends a control message."""
        self._instance = instance
        self._reactor = reactor
        self._send = send
        # True if the model has a check. A model without one is always ready.
        self.has_check = False
        self._question = 0
        self._is_asked = False
        self._is_closed = False
        # The end of the time of each who waits, and the text that it then gets. The earliest comes first.
        self._waiting: dict[Answer, tuple[float, str]] = {}
        self._is_timed = False

    def ask(self, answer: Answer) -> None:
        """Call `answer` once: at once, or on the reactor's thread within five seconds. It must not block."""
        if self._is_closed:
            answer(self._gone())
        elif self.has_check:
            self._reactor.call_soon(lambda: self._ask(answer))
        else:
            answer(None)

    # On the reactor's thread

    def _ask(self, answer: Answer) -> None:
        if self._is_closed:
            answer(self._gone())
            return
        end_s = time.monotonic() + TIMEOUT_S
        self._waiting[answer] = end_s, _STILL_TOO_LATE if self._is_asked else _TOO_LATE
        if not self._is_timed:
            self._is_timed = True
            self._reactor.call_at(end_s, self._give_up)
        if not self._is_asked:
            self._is_asked = True
            self._question += 1
            self._send(Kind.READY, self._question)

    def _give_up(self) -> None:
        """Answer those whose time is over, and set the timer for the next."""
        now_s = time.monotonic()
        late = [(each, words) for each, (end_s, words) in self._waiting.items() if end_s <= now_s]
        for answer, _ in late:
            del self._waiting[answer]
        self._is_timed = bool(self._waiting)
        if self._waiting:
            next_s, _ = next(iter(self._waiting.values()))
            self._reactor.call_at(next_s, self._give_up)
        for answer, words in late:
            answer(words)

    def answered(self, question: int, reason: str | None) -> None:
        """Take in READINESS. Raises `RemoteProtocolError` if it was not asked for."""
        if not self._is_asked or question != self._question:
            raise RemoteProtocolError(f"READINESS answers {question}, which was not asked")
        self._is_asked = False
        self._answer_all(reason)

    def close(self) -> None:
        """Answer all who wait, because the stub is gone."""
        self._is_closed = True
        self._answer_all(self._gone())

    def _answer_all(self, reason: str | None) -> None:
        waiting, self._waiting = self._waiting, {}
        for answer in waiting:
            answer(reason)

    def _gone(self) -> str:
        return not_healthy(self._instance)


def ask_all(instances: Sequence[ModelInstance], answer: Answer) -> None:
    """Ask the instances of a model at the same time. The model is ready if all are. `answer` is as in
    `StubReadiness.ask`.
    """
    if not instances:
        answer(None)
        return
    together = _Together(len(instances), answer)
    for instance in instances:
        instance.backend.model_instance_ready(instance, together.add)


def wait_for_answer(ask: Callable[[Answer], object], reactor: Reactor) -> str | None:
    """Ask, and wait for the answer on this thread, which must not be the reactor's.

    On a busy machine the reactor may be late, and the members of an ensemble are asked one after the other. So no time
    tells that nobody answers any more, but the end of the reactor does.
    """
    answers: SimpleQueue[str | None] = SimpleQueue()
    ask(answers.put)
    end_s = time.monotonic() + _MOST_S
    while True:
        try:
            return answers.get(timeout=_LOOK_S)
        except Empty:
            if reactor.has_ended and answers.empty():
                return "the runtime is being closed"
            if time.monotonic() > end_s:
                return "its backend does not answer"


class _Together:
    """Passes the first reason on, or None when all have answered without one."""

    def __init__(self, count: int, answer: Answer) -> None:
        self._left = count
        self._answer = answer
        self._lock = threading.Lock()

    def add(self, reason: str | None) -> None:
        with self._lock:
            was_open = self._left > 0
            self._left = 0 if reason is not None else self._left - 1
            is_over = self._left <= 0
        if was_open and is_over:
            self._answer(reason)
