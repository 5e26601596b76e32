"""Gives the quick forms objects that they do not know, or that are half made: python strangers.py COUNT [SEED]

Each form raises or declines, and the process lives. Without a class that was taught (COUNT is negative), as well.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from moonpool.runtime import quick

# The number of the arguments of each form.
FORMS = {
    "submit": 2, "finish": 3, "outcome": 2, "known_call": 3, "serve_call": 1, "answer_call": 2, "chain_step": 2,
}  # fmt: skip
# What the attributes of these names mostly are.
LIKELY = {
    "_lock": "lock", "_bell": "lock", "borrowed_blocks": "BorrowedBlocks", "conversation": "Conversation", "channel": "Channel",
    "_channel": "Channel", "replies": "Replies", "_reader": "AnswerReader", "region": "SharedRegion", "_arena": "Arena",
    "scheduler": "Scheduler", "_scheduler": "Scheduler", "instance": "ModelInstance", "backend": "PythonBackend", "state": "StubHandle",
    "link": "Link", "_link": "Link", "pending": "Link", "statistics": "Statistics", "_changed": "CountingCondition",
    "_departures": "Departures", "reactor": "Reactor", "_epoll": "Poller", "waiter": "ThreadWaiter", "shapes": "Shapes",
    "request": "InferenceRequest", "_request": "InferenceRequest", "_limiter": "RateLimiter", "_pool": "ResourcePool",
    "_usual": "UsualCalls", "_asks": "KnownCalls", "_replies": "KnownCalls", "_send_queue": "StubSendQueue",
    "_requests_budget": "CopyBudget", "caller": "EnsembleCaller", "_owner": "EnsembleScheduler", "_only": "Level",
}  # fmt: skip
FLAGS = {"is_quick", "_is_open", "accepts", "is_alone", "is_greedy", "is_shared"}
LISTS = {
    "_idle",
    "requests",
    "arrays",
    "_drivers",
    "_given_back",
    "_lent",
    "_spares",
    "tensors",
    "_chain",
    "_known",
}
TABLES = {
    "_busy",
    "_kept",
    "_extents",
    "live",
    "response_regions",
    "_layouts",
    "_runs",
    "plans",
    "_calls",
    "_taken",
}


class Slotless:
    """Has no attributes at all."""

    __slots__ = ()


class Strangers:
    """Makes objects of all kinds."""

    def __init__(self, kinds: dict[str, Any], seed: int) -> None:
        self.kinds = kinds
        self.random = random.Random(seed)
        # Nothing here has a descriptor: a form must not come to the files of the process.
        self.plain: list[Callable[[], Any]] = [
            lambda: None, lambda: True, lambda: False, lambda: 0, lambda: -1, lambda: 7, lambda: 1 << 80, lambda: "text", lambda: b"\x93\x01",
            tuple, list, dict, set, object, Slotless, deque, OrderedDict, lambda: 1.5, threading.Lock, lambda: np.ones(3, np.float32),
            lambda: [()], lambda: [(1, 2, 3, 4)], lambda: {0: 0}, lambda: (1, 2), lambda: [None] * 6, lambda: memoryview(bytearray(64)),
        ]  # fmt: skip

    def any(self, depth: int = 0) -> Any:
        if self.kinds and depth < 3 and self.random.random() < 0.4:
            return self.of(self.random.choice(sorted(self.kinds)), depth)
        return self.random.choice(self.plain)()

    def of(self, name: str, depth: int = 0) -> Any:
        """Return an instance of a class that the forms know, with some attributes set, or nearly all of them."""
        made = self.kinds[name]()
        rate = self.random.choice((0.5, 0.97, 1.0))
        for kind in type(made).__mro__:
            for attribute in getattr(kind, "__slots__", ()):
                if not attribute.startswith("__") and self.random.random() < rate:
                    try:
                        setattr(made, attribute, self.value_for(attribute, depth))
                    except (AttributeError, TypeError):
                        continue
        return made

    def value_for(self, attribute: str, depth: int) -> Any:
        if self.random.random() < 0.15:
            return self.any(depth + 2)
        if attribute in FLAGS:
            return True
        if attribute in LISTS:
            return [self.any(depth + 2) for _ in range(self.random.choice((0, 1, 2)))]
        if attribute in TABLES:
            return (
                {self.random.choice((0, 7)): self.any(depth + 2)}
                if self.random.random() < 0.5
                else {}
            )
        likely = LIKELY.get(attribute)
        if likely == "lock":
            return threading.Lock()
        if likely in self.kinds and depth < 4:
            return self.of(likely, depth + 1)
        return self.random.choice((None, False, 0, 7, self.any(depth + 3)))


class UnknownScheduler:
    """Takes a request in, and returns anything."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def enter(self, _: object) -> Any:
        return self._result


def main() -> None:
    faulthandler.enable()
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    kinds: dict[str, Any] = {}

    def learn(kind: type, *arguments: object) -> None:
        kinds[kind.__name__] = partial(kind.__new__, kind, *arguments)
        quick.forms.learn(kind.__name__, kind.__new__(kind, *arguments))

    if count > 0:
        quick.learn = learn
        import moonpool.runtime.runtime  # noqa: F401  teaches all classes

        kinds.pop("Lease", None)  # its end would call what it should give back to
        assert len(kinds) > 20, kinds
    strangers = Strangers(kinds, seed)
    ends = {"raised": 0, "returned": 0}
    for number in range(abs(count)):
        name = sorted(FORMS)[number % len(FORMS)]
        arguments = [strangers.any() for _ in range(FORMS[name])]
        if kinds and strangers.random.random() < 0.8:
            first = {"submit": "Scheduler", "finish": "Scheduler", "serve_call": "CallDispatcher", "answer_call": "ModelCall",
                     "chain_step": "ChainRun", "wait": "Channel", "request": "Shapes", "prepared": "Shapes", "known_call": "Link"}  # fmt: skip
            arguments[0] = strangers.of(first.get(name, "Link"))
            if name in ("submit", "outcome"):
                arguments[1] = strangers.of("InferenceRequest")
            if name == "finish":
                arguments[1] = strangers.of("Execution")
            if name in ("execute", "answers"):
                arguments[1] = [strangers.of("InferenceRequest")]
        if name == "outcome" and strangers.random.random() < 0.8:
            arguments[0] = UnknownScheduler(strangers.any())
        given: queue.SimpleQueue[tuple[Any, list[Any]]] = queue.SimpleQueue()
        given.put((getattr(quick.forms, name), arguments))
        del arguments
        if name != "outcome":
            call(given, ends)
            continue
        # It may wait for an outcome that nobody brings.
        thread = threading.Thread(target=call, args=(given, ends), daemon=True)
        thread.start()
        thread.join(0.01)
    sys.stdout.write(f"{ends['raised']} {ends['returned']}\n")
    sys.stdout.flush()
    os._exit(0)


def call(given: queue.SimpleQueue[tuple[Any, list[Any]]], ends: dict[str, int]) -> None:
    form, arguments = given.get()
    try:
        form(*arguments)
    except Exception:
        ends["raised"] += 1
    else:
        ends["returned"] += 1


main()
