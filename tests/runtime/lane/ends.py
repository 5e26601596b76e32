"""A program that ends while daemon threads are inside what is compiled. Nothing but its exit code says how that went.

CPython up to 3.13 ends a thread that asks for the interpreter's lock at that time, in the middle of what is compiled.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections import deque
from functools import partial
from itertools import repeat
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.port import RuntimePort
from moonpool.runtime.schedule.lane import ThreadWaiter

EACH = 8


class Ending:
    """Waits in its destructor, which runs in a compiled frame."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.is_ending = threading.Event()

    def __del__(self) -> None:
        self.is_ending.set()
        self.lock.acquire()


def wait_in_destructor(endings: list[Any]) -> None:
    waiter = ThreadWaiter()
    waiter.outcome = endings.pop()
    waiter.resolve(None)


def port_on(channel: Channel) -> RuntimePort:
    conversation = Conversation(channel, Side.RUNTIME, Overflow(), Kind.LOADED)
    return RuntimePort(conversation, None, None, deque(), deque(), {})


def main() -> None:
    waiters = [ThreadWaiter() for _ in range(EACH)]
    endings = [Ending() for _ in range(EACH)]
    locks = [each.lock for each in endings]
    begun = [each.is_ending for each in endings]
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(EACH)]
    channels = [Channel(ours) for ours, _ in pairs]
    threading.excepthook = lambda _: None
    for channel in channels:
        threading.Thread(target=port_on(channel).wait, daemon=True).start()
    for waiter in waiters:
        threading.Thread(target=waiter.wait, args=(None, None), daemon=True).start()
        threading.Thread(target=wait_in_destructor, args=(endings,), daemon=True).start()
    for each in begun:
        each.wait()
    # All of them wake right before the end. All of this is in C, so this thread keeps the interpreter's lock from here
    # on.
    bells = [waiter._bell for waiter in waiters]
    sends = [theirs.send for _, theirs in pairs]
    atexit.register(partial(deque, map(partial.__call__, map(partial, sends, repeat(b"packet"))), 0))
    atexit.register(partial(deque, map(type(bells[0]).release, bells + locks), 0))


main()
