"""A backend whose executions are answered when the test says so, through a descriptor, as a stub's are."""

from __future__ import annotations

import os
import re
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
from moonpool.runtime.model.request import InferenceRequest, Outcome


class HeldBatch:
    """A batch in an instance, which the test answers. A `Pending` for the scheduler."""

    def __init__(self, instance: ModelInstance) -> None:
        self.instance = instance
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.requests: Sequence[InferenceRequest] = ()
        self.breaks: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def values(self) -> list[float]:
        """Return the first value of each request of the batch."""
        return [float(request.inputs[0].data.flat[0]) for request in self.requests]

    def answer(self) -> None:
        """Answer the batch."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def break_down(self, error: BaseException) -> None:
        """Let the instance break."""
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

    def is_ready(self) -> bool:
        return True

    def is_received(self) -> bool:
        return False

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        os.eventfd_read(self.fd)  # BlockingIOError if the test has not answered
        self.requests = ()
        if self.breaks is not None:
            raise self.breaks
        return echo(self.instance, requests)


class HoldingBackend(Recorder):
    """A backend that holds its batches; `batches` has them in the order in which they came."""

    blocks = False

    def __init__(self) -> None:
        super().__init__("holding")
        self.batches: list[tuple[HeldBatch, list[float]]] = []
        self.held_batches: dict[str, HeldBatch] = {}
        self.aborted: list[BaseException] = []
        # If True, each batch is answered at once.
        self.is_quick = False

    def model_instance_initialize(self, instance: ModelInstance) -> None:
        super().model_instance_initialize(instance)
        instance.state = self.held_batches[instance.name] = HeldBatch(instance)

    def model_instance_finalize(self, instance: ModelInstance) -> None:
        super().model_instance_finalize(instance)
        instance.state.close()

    def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        held: HeldBatch = instance.state
        held.requests = requests
        self.batches.append((held, held.values))
        if self.is_quick:
            held.answer()
        return held

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

    def wait_for(self, count: int) -> HeldBatch:
        """Wait for the batch of a number, counted from 1, and return it."""
        wait_until(lambda: len(self.batches) >= count, what=f"{count} batches")
        return self.batches[count - 1][0]


@contextmanager
def holding(folder: Path, **changes: Any) -> Iterator[tuple[HoldingBackend, Runtime]]:
    """Make a runtime with the model `m`, which has one instance unless `changes` say otherwise."""
    backend = HoldingBackend()
    with Runtime(backends=[backend], drain_timeout_s=changes.pop("drain_timeout_s", 30.0)) as runtime:
        runtime.load("m", folder, config=config(backend="holding", **changes))
        try:
            yield backend, runtime
        finally:
            # A test that failed must not wait for answers that never come.
            backend.is_quick = True
            for held in backend.held_batches.values():
                held.answer()


class Caller(threading.Thread):
    """A thread that sends one request and keeps its outcome."""

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
        self.join(60.0)
        assert not self.is_alive()
        return self.outcome


def queued(runtime: Runtime, count: int, model: str = "m") -> None:
    """Wait until so many requests are queued."""
    wait_until(lambda: pending(runtime, model) == count, what=f"{count} queued requests")


def pending(runtime: Runtime, model: str = "m") -> int:
    """Return the number of queued requests, as the metrics show it."""
    return _shown(runtime, f'nv_inference_pending_request_count{{model="{model}",version="1"}}')


def rejected(runtime: Runtime) -> int:
    """Return the number of requests that the metrics count as rejected."""
    labels = 'model="m",reason="REJECTED",version="1"'
    return _shown(runtime, f"nv_inference_request_failure{{{labels}}}")


def _shown(runtime: Runtime, sample: str) -> int:
    (found,) = re.findall(f"^{re.escape(sample)} (\\d+)$", runtime.metrics(), re.MULTILINE)
    return int(found)
