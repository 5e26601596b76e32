"""Ends the run of a caller that waits no longer, whatever the run is at: in a queue, at a start, or at work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class RunCancelled(Exception):
    """Nobody waits for this run any more."""


class RunCancellation:
    """Is set once, by any thread, and ends what the run's own thread waits for at that moment.

    Either thread sets its own attribute first, and looks at the other's then. So one of them calls what ends the wait,
    or both do.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._end: Callable[[], object] | None = None

    def set(self) -> None:
        """End the wait that there is, and all that come."""
        self.is_set = True
        end = self._end
        if end is not None:
            end()

    @contextlib.contextmanager
    def by(self, end: Callable[[], object]) -> Iterator[None]:
        """Have `end` called, from any thread, if this is set meanwhile or was before."""
        before, self._end = self._end, end
        try:
            if self.is_set:
                end()
            yield
        finally:
            self._end = before

    def check(self) -> None:
        """Raise `RunCancelled` if this is set."""
        if self.is_set:
            raise RunCancelled
