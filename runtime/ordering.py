"""The order in which responses leave, for models that ask to preserve it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")
R = TypeVar("R")


class Ordering(Generic[T]):
    """Lets results leave in the order in which their numbers were opened, for preserve_ordering.

    Not thread-safe, as the queue.  Every number that was opened must be done once, with an error if
    need be: the results behind it wait for it.
    """

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._done: dict[int, T] = {}
        self._last = -1

    def __len__(self) -> int:
        """Results that have not left: not handed in yet, or behind one that is not."""
        return len(self._order)

    def opened(self, number: int) -> None:
        """Reserve the next place; numbers rise, gaps are allowed."""
        if number <= self._last:
            raise ValueError(f"number {number} comes after {self._last}; numbers must rise")
        self._last = number
        self._order.append(number)
        self._open.add(number)

    def done(self, number: int, result: T) -> list[T]:
        """Hand in a result; return all that may leave now, in order (often none, or several)."""
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

    Not thread-safe, as the queue, but for `leave`.
    """

    def __init__(self, *, in_order: bool) -> None:
        """`in_order` says that the requests of earlier batches leave before those of later ones."""
        self.in_order = in_order
        self._ordering: Ordering[tuple[R, T]] = Ordering()
        self._numbers: dict[int, int] = {}
        self._started = 0
        # Where order is asked for: what may leave, in order, and the right to let it leave.
        self._leaving: deque[tuple[R, T]] = deque()
        self._turn = [self]

    def started(self, batch: Iterable[R]) -> None:
        """These are given to an instance."""
        if not self.in_order:
            return
        for request in batch:
            if id(request) not in self._numbers:  # it is, when it is tried once more
                self._started += 1
                self._numbers[id(request)] = self._started
                self._ordering.opened(self._started)

    def done(self, requests: Sequence[R], outcomes: Sequence[T]) -> list[tuple[R, T]]:
        """What may leave now that these have outcomes; it is for `leave`."""
        pairs = list(zip(requests, outcomes, strict=True))
        if not self.in_order:
            return pairs
        released: list[tuple[R, T]] = []
        for pair in pairs:
            number = self._numbers.pop(id(pair[0]), None)
            if number is None:  # never in a batch, so nobody waits behind it
                released.append(pair)
            else:
                released += self._ordering.done(number, pair)
        self._leaving += released
        return []

    def leave(self, pairs: Iterable[tuple[R, T]], resolve: Callable[[R, T], object]) -> None:
        """Resolve what `done` returned, in order where that is asked for. From any thread."""
        for request, outcome in pairs:
            resolve(request, outcome)
        while self._leaving:
            try:
                turn = self._turn.pop()
            except (
                IndexError
            ):  # whoever has the turn sees what there is before giving it up, or after
                return
            try:
                while self._leaving:
                    resolve(*self._leaving.popleft())
            finally:
                self._turn.append(turn)
