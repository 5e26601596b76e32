"""Front ends of a runtime, played by the test's own process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.e2e.hosting import MODELS, Config, tensor
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.model.backend import Model
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.schedule.callers import wait_for_response
from moonpool.runtime.server.pool.attached import AttachedModel
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.handle import StubHandle, StubSharing

SHARED = MODELS / "shared.py"
SHARED_CONFIG: Config = {
    "input": [tensor("HOW", "STRING", 1), tensor("X", "FP32", -1)],
    "output": [tensor("Y", "FP32", -1)],
}


class Hall(StubSharing):
    """Shares the stubs of a runtime with every visitor."""

    is_there = True

    def __init__(self) -> None:
        self.stubs: dict[str, StubHandle] = {}
        self.models: dict[str, Model] = {}
        self.reasons: list[BaseException] = []

    def model_ready(self, model: Model) -> None:
        self.models[model.name] = model

    def stub_ready(self, model: Model, stub: StubHandle) -> None:  # noqa: ARG002
        self.stubs[stub.name] = stub

    def stub_gone(self, stub: StubHandle, reason: BaseException) -> None:
        if self.stubs.pop(stub.name, None) is not None:
            self.reasons.append(reason)

    def let_in(self, stub: str) -> list[socket.socket]:
        """Return the work channel and the control channel of another process."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self.stubs[stub].control.send_peer(*(theirs.fileno() for _, theirs in pairs))
        for _, theirs in pairs:
            theirs.close()
        return [ours for ours, _ in pairs]


class Visitor:
    """Stands for another process, as the stubs of one model see it."""

    def __init__(self, hall: Hall, model: str, stubs: Sequence[str]) -> None:
        self.reactor = Reactor("visitor")
        self.executor = ThreadPoolExecutor(1)
        self.lost: list[tuple[int, str]] = []
        self.served: list[tuple[int, int]] = []
        self.model = AttachedModel(
            hall.models[model],
            self.reactor,
            self.executor,
            lambda _, __: Allotment(None, is_contained=False),
            lambda *what: self.lost.append(what),
            lambda *what: self.served.append(what),
        )
        for number, stub in enumerate(stubs):
            work, control = hall.let_in(stub)
            self.model.attach(number, stub, work, control)

    def infer(self, how: str, *values: float) -> NDArray[Any]:
        """Return the model's answer to these values."""
        inputs = {"HOW": [how], "X": np.array(values, np.float32)}
        request = self.model.signature.request(inputs)
        return wait_for_response(self.model.scheduler, request, 20.0).outputs["Y"]

    def has_sent(self) -> bool:
        """Return whether a stub has a batch of this visitor."""
        return any(each.is_sent for each in self.model.scheduler.executing_since(1 << 63))

    def has_begun(self) -> bool:
        """Return whether a stub, whose batches have a limit, executes one of this visitor's."""
        connections = [attached.connection for attached in self.model._attached.values()]
        begun = [connection.link.began_ns(0) is not None for connection in connections]
        return self.has_sent() and any(begun)

    def on_reactor(self, act: Callable[[], object]) -> None:
        """Call a function on the reactor's thread, and wait for it."""
        done = threading.Event()
        self.reactor.call_soon(act)
        self.reactor.call_soon(done.set)
        done.wait()

    def close(self) -> None:
        self.on_reactor(self.model.close)
        # The threads that wait for answers of a stub let go of it first, then the reactor does.
        wait_until(lambda: not self.model._attached)
        self.on_reactor(lambda: None)
        self.reactor.close()
        self.executor.shutdown()


@contextlib.contextmanager
def visiting(hall: Hall, model: str, *stubs: str) -> Iterator[Visitor]:
    visitor = Visitor(hall, model, stubs or tuple(hall.stubs))
    try:
        yield visitor
    finally:
        visitor.close()


def infer(runtime: moonpool.Runtime, how: str, *values: float) -> NDArray[Any]:
    """Do as `Visitor.infer`, from the process that has started the stub."""
    inputs = {"HOW": [how], "X": np.array(values, np.float32)}
    return runtime.infer("shared", inputs, timeout_s=60.0)["Y"]
