"""A program that ends while daemon threads are inside quick forms. Nothing but its exit code says how that went.

CPython up to 3.13 ends a thread that asks for the interpreter's lock at that time, in the middle of the frames of a form.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections import deque
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from moonpool.ipc.channel import Channel
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.port import RuntimePort
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.quick import forms, learn
from moonpool.runtime.schedule import callers  # noqa: F401 - teaches ThreadWaiter

EACH = 8


class Queued:
    """A scheduler that queues a request: the thread waits for the bell of its waiter."""

    def __init__(self) -> None:
        # What the last reference to this one takes along.
        self.held = [np.ones(1000) for _ in range(10)]

    def enter(self, request: InferenceRequest) -> None:
        """Answer as a scheduler whose instances are all busy."""


class Ending:
    """Waits in its destructor, which runs in a destructor of the form."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.is_ending = threading.Event()

    def __del__(self) -> None:
        self.is_ending.set()
        self.lock.acquire()


class Refused:
    """A scheduler that returns what is no execution, which the form drops."""

    def __init__(self, ending: list[Any]) -> None:
        self.ending = ending

    def enter(self, _: InferenceRequest) -> Any:
        return self.ending.pop()


def wait_for_bell(requests: list[InferenceRequest]) -> None:
    request = InferenceRequest.__new__(InferenceRequest)
    requests.append(request)
    forms.outcome(Queued(), request)


def wait_in_destructor(endings: list[Any]) -> None:
    forms.outcome(Refused(endings), InferenceRequest.__new__(InferenceRequest))


def port_on(channel: Channel) -> RuntimePort:
    conversation = Conversation(channel, Side.RUNTIME, Overflow(), Kind.LOADED)
    return RuntimePort(conversation, None, None, deque(), {})


def main() -> None:
    learn(Channel)
    requests: list[InferenceRequest] = []
    endings = [Ending() for _ in range(EACH)]
    locks = [each.lock for each in endings]
    begun = [each.is_ending for each in endings]
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(EACH)]
    channels = [Channel(ours) for ours, _ in pairs]
    threading.excepthook = lambda _: None
    for channel in channels:
        threading.Thread(target=port_on(channel).wait, daemon=True).start()
    for _ in range(EACH):
        threading.Thread(target=wait_for_bell, args=(requests,), daemon=True).start()
        threading.Thread(target=wait_in_destructor, args=(endings,), daemon=True).start()
    for each in begun:
        each.wait()
    while len(requests) < EACH or not all(getattr(each, "waiter", None) for each in requests):
        os.sched_yield()
    # All of them wake right before the end. All of this is in C, so this thread keeps the interpreter's lock from here on.
    bells = [request.waiter._bell for request in requests]  # type: ignore[attr-defined]
    requests.clear()
    sends = [theirs.send for _, theirs in pairs]
    atexit.register(
        partial(deque, map(partial.__call__, map(partial, sends, repeat(b"packet"))), 0)
    )
    atexit.register(partial(deque, map(type(bells[0]).release, bells + locks), 0))


main()
