"""A caller's thread waits for the response to its request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moonpool.runtime.errors import own
from moonpool.runtime.request import Response
from moonpool.runtime.waiter import PunctualWaiter, ThreadWaiter

if TYPE_CHECKING:
    from moonpool.runtime.request import InferenceRequest, Outcome
    from moonpool.runtime.scheduler import Scheduler


def wait_for_response(
    scheduler: Scheduler, request: InferenceRequest, timeout_s: float | None
) -> Response:
    """Submit a request and wait for its outcome on this thread."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiter = request.waiter = ThreadWaiter() if deadline is None else PunctualWaiter()
    try:
        outcome = waiter.wait(deadline, scheduler.submit(request))
    except BaseException:
        waiter.leave()
        scheduler.leave(request)
        raise
    return response_of(outcome)


def response_of(outcome: Outcome | None) -> Response:
    """The response; raises what came in its place."""
    if isinstance(outcome, Response):
        return outcome
    raise own(outcome)  # type: ignore[arg-type]
