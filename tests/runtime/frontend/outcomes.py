"""What comes of a request, for tests that have made it themselves."""

from __future__ import annotations

from moonpool.runtime.frontend.submission import Hosted
from moonpool.runtime.request import InferenceRequest, Outcome
from moonpool.runtime.waiter import ThreadWaiter


def outcome_of(hosted: Hosted, request: InferenceRequest) -> Outcome:
    """Send it, and wait for it on this thread."""
    waiter = request.waiter = ThreadWaiter()
    return waiter.wait(None, hosted.scheduler.submit(request))
