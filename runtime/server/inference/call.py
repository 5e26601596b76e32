"""One request for one response, from the making of the request until its client has the answer, over either protocol.

Theory of operation. A call belongs to the thread of the server's event loop, which submits the request, waits for the
stub's socket itself (`schedule.event_loop`), and writes the response when it has the answer: no task, future or other
thread takes part. Work that would hold the loop for longer than a hand-over to a thread takes is done by a thread of
`executor`, on what nothing else uses at that time, and then the loop goes on.

A client that goes cancels the call, after which the scheduler calls nobody. What a thread still does then ends by
itself, and the protocol, for which the client has gone, drops the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from moonpool.ipc.errors import Closed
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, WireTensor
from moonpool.runtime.schedule import event_loop
from moonpool.runtime.server.inference.request import Hosted, RequestPlan
from moonpool.runtime.server.inference.response import copied_bytes
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.traces import Trace

R = TypeVar("R")
LONG_COPY_BYTES = 1 << 20
"""A larger copy from or to memory of clients takes longer than a hand-over to a thread."""


class Inference:
    """Has what all calls of a protocol need. For the loop's thread."""

    # If long work may take seconds, for which other clients must not wait.
    refuses_without_thread = False

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, executor: Executor) -> None:
        self.service = service
        self.loop = loop
        self.executor = executor
        # The loop watches for answers from now on, and not from the first request.
        self.driver = event_loop.driver_of(loop)

    def work(
        self,
        work: Callable[[], R],
        go_on: Callable[[R], object],
        fail: Callable[[BaseException], object],
        *,
        is_long: bool = True,
    ) -> asyncio.Future[R] | None:
        """Work, and then `go_on` in the loop with the result, or `fail`. Long work is done by a thread.

        Returns what is done when the thread is; None if everything is done.
        """
        if is_long:
            try:
                begun = self.loop.run_in_executor(self.executor, work)
            except (Closed, OutOfThreads) as error:
                # The last calls end while the server closes. Without a thread, other clients wait, which is better than
                # to refuse this one.
                if self.refuses_without_thread:
                    fail(error)
                    return None
            else:
                begun.add_done_callback(partial(_done, go_on, fail))
                return begun
        try:
            result = work()
        except Exception as error:
            fail(error)
        else:
            go_on(result)
        return None


def _done(go_on: Callable[[R], object], fail: Callable[[BaseException], object], future: asyncio.Future[R]) -> None:
    if future.cancelled():  # the server ends, and the client with it
        return
    error = future.exception()
    if error is None:
        go_on(future.result())
    else:
        fail(error)


class InferCall(event_loop.LoopWaiter):
    """A client that waits for the response to its request. A protocol says how it reads one and writes the other."""

    __slots__ = ("_inference", "_is_over", "_request", "hosted", "plan", "trace")

    def __init__(self, inference: Inference) -> None:
        self.belong(inference)

    def belong(self, inference: Inference) -> None:
        """Set all attributes."""
        self._loop, self.driver = inference.loop, inference.driver
        self._inference = inference
        # The protocol sets the model, and everything of the request but the bytes of its tensors, before `send`.
        self.hosted: Hosted = None  # type: ignore[assignment]
        self.plan: RequestPlan = None  # type: ignore[assignment]
        self.trace: Trace | None = None
        self._request: InferenceRequest | None = None
        self._is_over = False

    # The protocol's

    def begin_trace(self, request: InferenceRequest) -> Trace | None:
        """Return the trace of a request that is about to be submitted, or None if it is not traced."""
        raise NotImplementedError

    def watch(self) -> None:
        """Have `cancel` called when the client goes; at once if it has gone."""
        raise NotImplementedError

    def render(self, response: Response) -> Any:
        """Return a response as it travels. On any thread. Raises `MoonpoolError`."""
        raise NotImplementedError

    def reply(self, rendered: Any) -> None:
        """Send what `render` returned."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Send an error in place of a response."""
        raise NotImplementedError

    def refuse(self, error: BaseException) -> None:
        """Send an error in place of a response, of a request that no model gets."""
        self.fail(error)

    # All protocols'

    def send(self, request: InferenceRequest) -> None:
        """Submit the request. The answer may come before this returns."""
        self._request = request
        try:
            service = self._inference.service
            if service.capture is not None:
                service.capture.take(self.hosted.model, request)
            if service.traces.is_on:
                self.trace = self.begin_trace(request)
            event_loop.LoopWaiter.submit(self, self.hosted.scheduler, request)
        except Exception as error:
            if not self._is_over:
                InferCall._release(self)
                self.refuse(error)
            return
        self.watch()

    def settle(self, outcome: Outcome | None) -> None:
        if self._is_over:
            return
        InferCall._release(self)
        rendered: Any = None
        error: BaseException | None = None
        try:
            if self.trace is not None:
                self.trace.mark("INFER_RESPONSE_COMPLETE")
            if not isinstance(outcome, Response):
                error = outcome
            elif InferCall._takes_long(self, outcome):
                self._inference.work(partial(self.render, outcome), self.reply, self.fail)
                return
            else:
                rendered = self.render(outcome)
        except Exception as unwritable:
            error = unwritable
        if error is None:
            self.reply(rendered)
        else:
            self.fail(error)

    def _takes_long(self, response: Response) -> bool:
        plan = self.plan
        if not plan.places and not plan.has_classes:
            return False
        outputs: Mapping[str, WireTensor] = response.outputs  # type: ignore[assignment]
        if sum([output.raw.nbytes for output in outputs.values()]) <= LONG_COPY_BYTES:
            return False
        return copied_bytes(outputs.values()) > LONG_COPY_BYTES

    def is_settled(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """Drop the request, or tell its model, as the client has gone. Nothing is sent any more."""
        if not self._is_over:
            request = self._request
            InferCall._release(self)
            self.leave(self.hosted.scheduler, request)  # type: ignore[arg-type]

    def _release(self) -> None:
        # The request refers to this object. Unless this reference goes, tensors stay in memory until the collector
        # looks for cycles.
        self._is_over = True
        self._request = None
