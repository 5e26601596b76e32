"""One call of a model while it is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.request import InferenceRequest, Outcome
    from moonpool.runtime.scheduler import Scheduler


class Call(Waiter):
    """A request that a model made. `answer` gets each outcome, and whether it is the last."""

    __slots__ = (
        "_answer",
        "batch",
        "is_cancelled",
        "model",
        "number",
        "request",
        "scheduler",
        "takes_many",
    )

    def __init__(
        self,
        number: int,
        model: str,
        answer: Callable[[Call, Outcome | None, bool], None],
        *,
        takes_many: bool,
        batch: int,
    ) -> None:
        """`batch` is the one that the model executes, 0 for none."""
        self.batch = batch
        self.number = number
        self.model = model
        self.takes_many = takes_many
        self._answer = answer
        self.is_cancelled = False
        self.request: InferenceRequest | None = None
        self.scheduler: Scheduler | None = None

    def respond(self, outcome: Outcome) -> None:
        """A response that is not the last."""
        self._answer(self, outcome, False)

    def resolve(self, outcome: Outcome | None) -> None:
        """The last response; None where the last came before."""
        if self.request is not None:
            # The stub's own memory, which rides home on the reply.
            self.request.arrays = []
            if self.request.trace is not None:
                self.request.trace.end()
        self._answer(self, outcome, True)

    def cancel(self) -> None:
        """Tell the other model, once, that it may stop. Its responses are still wanted."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        if self.scheduler is not None and self.request is not None:
            self.scheduler.tell_cancelled(self.request)

    def leave(self) -> None:
        """Nobody waits for the responses any more."""
        if self.scheduler is not None and self.request is not None:
            self.scheduler.leave(self.request)
