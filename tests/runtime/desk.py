"""A backend whose executions are answered when the test says so, as a stub's would be: by a descriptor."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.runtime.recorder import Recorder, config, echo
from tests.waiting import wait_until

from moonpool import ModelInstance, Runtime
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.request import InferenceRequest, Outcome


class Desk:
    """An instance and the batch that lies on it. A `Pending` for the scheduler."""

    def __init__(self, instance: ModelInstance) -> None:
        self.instance = instance
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.requests: Sequence[InferenceRequest] = ()
        self.breaks: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def values(self) -> list[float]:
        """The first value of each request of the batch."""
        return [float(request.inputs[0].data.flat[0]) for request in self.requests]

    def answer(self) -> None:
        """The batch is done."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def break_down(self, error: BaseException) -> None:
        """The instance is gone."""
        self.breaks = error
        self.answer()

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1

    def fileno(self) -> int:
        return self.fd

    def wait(self) -> None:
        select.select([self.fd], [], [])

    def is_received(self) -> bool:
        return False

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        os.eventfd_read(self.fd)  # BlockingIOError where nobody answered
        self.requests = ()
        if self.breaks is not None:
            raise self.breaks
        return echo(self.instance, requests)


class Office(Recorder):
    """`batches` has the desks in the order in which they were given a batch."""

    blocks = False

    def __init__(self) -> None:
        super().__init__("office")
        self.batches: list[tuple[Desk, list[float]]] = []
        self.desks: dict[str, Desk] = {}
        self.aborted: list[BaseException] = []
        # Answers each batch at once instead of when the test says so.
        self.is_quick = False

    def model_instance_initialize(self, instance: ModelInstance) -> None:
        super().model_instance_initialize(instance)
        instance.state = self.desks[instance.name] = Desk(instance)

    def model_instance_finalize(self, instance: ModelInstance) -> None:
        super().model_instance_finalize(instance)
        instance.state.close()

    def model_instance_execute(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest]
    ) -> Any:
        desk: Desk = instance.state
        desk.requests = requests
        self.batches.append((desk, desk.values))
        if self.is_quick:
            desk.answer()
        return desk

    def abort(self, instance: ModelInstance, reason: BaseException) -> None:
        if reason not in self.aborted:
            self.aborted.append(reason)
            instance.state.break_down(PeerGone("aborted"))

    def explain(self, _: ModelInstance, error: BaseException) -> BaseException:
        return self.aborted[-1] if self.aborted else error

    @property
    def sent(self) -> list[list[float]]:
        """The values of each batch so far."""
        return [values for _, values in self.batches]

    def wait_for(self, count: int) -> Desk:
        """The desk of the batch of that number, from 1, once it was sent."""
        wait_until(lambda: len(self.batches) >= count, what=f"{count} batches")
        return self.batches[count - 1][0]


@contextmanager
def office(folder: Path, **changes: Any) -> Iterator[tuple[Office, Runtime]]:
    """A runtime with the model `m`, of one instance if `changes` do not say otherwise."""
    backend = Office()
    with Runtime(
        backends=[backend], drain_timeout_s=changes.pop("drain_timeout_s", 30.0)
    ) as runtime:
        runtime.load("m", folder, config=config(backend="office", **changes))
        try:
            yield backend, runtime
        finally:
            # A test that failed must not wait for answers that nobody gives.
            backend.is_quick = True
            for desk in backend.desks.values():
                desk.answer()


class Caller(threading.Thread):
    """A thread that sends one request; `outcome` is what came of it."""

    def __init__(self, runtime: Runtime, inputs: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self._runtime, self._inputs, self._options = runtime, inputs, options
        self.outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._runtime.infer("m", self._inputs, **self._options)["Y"].flat[0]
        except BaseException as error:
            self.outcome = error

    def result(self) -> Any:
        self.join(30.0)
        assert not self.is_alive()
        return self.outcome


def queued(runtime: Runtime, count: int) -> None:
    """Waits until so many requests are queued."""
    scheduler = runtime._models.find("m").scheduler
    wait_until(lambda: scheduler.queued == count, what=f"{count} queued requests")
