"""One call of a model while it is open, and the times at which calls end."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from moonpool.runtime.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moonpool.runtime.request import InferenceRequest, Outcome
    from moonpool.runtime.scheduler import Scheduler


class Call(Waiter):
    """A request that a model made. `answer` gets each outcome, and whether it is the last."""

    __slots__ = ("_answer", "batch", "model", "number", "request", "scheduler", "takes_many")

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

    def leave(self) -> None:
        """Nobody waits for the responses any more."""
        if self.scheduler is not None and self.request is not None:
            self.scheduler.leave(self.request)


class Deadlines:
    """When calls are to end. Most end earlier, so those that did are thrown out from time to time.

    For one thread.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call]] = []

    def add(self, when_s: float, call: Call) -> None:
        """A call that is to end then."""
        # Two calls with one number are never open at a time, but both may stand here.
        heapq.heappush(self._heap, (when_s, id(call), call))

    def shrink(self, is_open: Callable[[Call], bool], open_calls: int) -> None:
        """Forget calls that are over, where they are the most."""
        if len(self._heap) > 2 * open_calls + 64:
            self._heap = [entry for entry in self._heap if is_open(entry[2])]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> Iterator[Call]:
        """Take out the calls whose time has come."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[2]

    @property
    def next_s(self) -> float | None:
        """When to look again."""
        return self._heap[0][0] if self._heap else None
