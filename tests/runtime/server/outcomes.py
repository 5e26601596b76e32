"""Outcomes of requests that tests have made themselves."""

from __future__ import annotations

from moonpool.runtime.model.request import InferenceRequest, Outcome
from moonpool.runtime.schedule.lane import ThreadWaiter
from moonpool.runtime.server.inference.request import Hosted


def outcome_of(hosted: Hosted, request: InferenceRequest) -> Outcome:
    """Send a request, and wait for its outcome on this thread."""
    waiter = request.waiter = ThreadWaiter()
    return waiter.wait(None, hosted.scheduler.submit(request))
