"""The order in which outcomes leave, for models that ask to preserve it (preserve_ordering).

Theory of operation. Requests get numbers when they are given to an instance, and their outcomes leave in the order of
these numbers. The scheduler's lock is held while numbers are given and outcomes come in. Outcomes leave without it, as
callers run code of their own then. So two threads could hand out at the same time and overtake each other. The right to
hand out is therefore one token in a list (`_turn`): the thread that pops it hands out all that may leave, in order. A
thread that does not get it can go, because the other one looks once more after giving it back. A pop is atomic, so
there is no lock that a signal handler could leave taken, and a callback may come back in here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from moonpool.runtime.errors import all_of

T = TypeVar("T")
R = TypeVar("R")


class Ordering(Generic[T]):
    """Lets results leave in the order in which their numbers were opened.

    Not thread-safe. Every number that was opened must be done once, with an error if need be: the
    results behind it wait for it.
    """

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._done: dict[int, T] = {}
        self._last = -1

    def __len__(self) -> int:
        """Return the number of results that have not left: not handed in yet, or behind one that is not."""
        return len(self._order)

    def opened(self, number: int) -> None:
        """Reserve the next place. Numbers rise, and may have gaps."""
        if number <= self._last:
            raise ValueError(f"number {number} comes after {self._last}; numbers must rise")
        self._last = number
        self._order.append(number)
        self._open.add(number)

    def done(self, number: int, result: T) -> list[T]:
        """Hand in a result. Returns all that may leave now, in order."""
        if number not in self._open:
            raise ValueError(f"number {number} is not open")
        self._open.remove(number)
        order, done = self._order, self._done
        if number != order[0]:
            done[number] = result
            return []
        order.popleft()
        released = [result]
        while order and order[0] in done:
            released.append(done.pop(order.popleft()))
        return released


class Departures(Generic[R, T]):
    """Pairs requests with their outcomes, in the order in which they may leave.

    Not thread-safe, except `leave`.
    """

    def __init__(self, *, in_order: bool) -> None:
        """`in_order` says that the requests of earlier batches leave before those of later ones."""
        self.in_order = in_order
        self._ordering: Ordering[tuple[R, T]] = Ordering()
        self._numbers: dict[int, int] = {}
        self._started = 0
        # Only used with `in_order`: outcomes that may leave, in order, and the token of the thread that hands them out.
        self._leaving: deque[tuple[R, T]] = deque()
        self._turn = [self]

    def started(self, batch: Iterable[R]) -> None:
        """Number the requests of a batch that is given to an instance."""
        if not self.in_order:
            return
        for request in batch:
            if id(request) not in self._numbers:  # a request that is tried again keeps its number
                self._started += 1
                self._numbers[id(request)] = self._started
                self._ordering.opened(self._started)

    def done(self, requests: Sequence[R], outcomes: Sequence[T]) -> list[tuple[R, T]]:
        """Take in the outcomes of requests. Returns outcomes for `leave`."""
        pairs = list(zip(requests, outcomes, strict=True))
        if not self.in_order:
            return pairs
        released: list[tuple[R, T]] = []
        for pair in pairs:
            number = self._numbers.pop(id(pair[0]), None)
            if number is None:  # it was in no batch, so no outcome waits behind it
                released.append(pair)
            else:
                released += self._ordering.done(number, pair)
        self._leaving += released
        return []

    def leave(self, pairs: Iterable[tuple[R, T]], resolve: Callable[[R, T], object]) -> None:
        """Resolve what `done` returned, in order where that is asked for. From any thread. Raises the first error after
        the last one.
        """
        all_of(lambda pair: resolve(*pair), pairs)
        while self._leaving:
            try:
                turn = self._turn.pop()
            except IndexError:  # the thread that has the token looks again after giving it back
                return
            try:
                all_of(lambda pair: resolve(*pair), self._taken())
            finally:
                self._turn.append(turn)

    def _taken(self) -> Iterator[tuple[R, T]]:
        """Take out what may leave, one after the other, also what comes meanwhile."""
        while self._leaving:
            yield self._leaving.popleft()
