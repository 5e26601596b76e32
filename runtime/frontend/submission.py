"""Requests of clients on their way from an event loop into a scheduler.

They can be cancelled, as a client may go away at any time. No answer is handed from one thread to another: the loop
waits on the stub's socket itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from moonpool.runtime.aio import LoopWaiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.backend import Model
    from moonpool.runtime.request import InferenceRequest, Outcome
    from moonpool.runtime.scheduler import Scheduler
    from moonpool.runtime.signature import Signature


class Hosted(Protocol):
    """A model version that takes requests."""

    model: Model
    signature: Signature
    scheduler: Scheduler


class LoopSubmission(LoopWaiter):
    """A request that was sent from an event loop. All methods are for the loop's thread."""

    __slots__ = ("_is_over", "_on_outcome", "_request", "_scheduler")

    def __init__(
        self,
        scheduler: Scheduler,
        request: InferenceRequest,
        on_outcome: Callable[[Outcome], object],
    ) -> None:
        """Send it. `on_outcome` is called once, in this loop, maybe before this returns.

        Raises what `Scheduler.submit` raises, and then `on_outcome` is not called.
        """
        super().__init__(asyncio.get_running_loop())
        self._scheduler = scheduler
        self._request = request
        self._on_outcome = on_outcome
        self._is_over = False
        self.submit(scheduler, request)

    def settle(self, outcome: Outcome | None) -> None:
        if not self._is_over:
            on_outcome = self._on_outcome
            self._let_go()
            on_outcome(outcome)  # type: ignore[arg-type]  # None is for those who take many

    def is_settled(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """The client is gone: drop the request, or tell its model. `on_outcome` is not called any more."""
        if not self._is_over:
            request = self._request
            self._let_go()
            self.leave(self._scheduler, request)

    def _let_go(self) -> None:
        """Both refer to this object: else tensors would stay in memory until a cycle is looked for."""
        self._is_over = True
        del self._on_outcome, self._request
