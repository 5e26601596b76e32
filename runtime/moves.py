"""Loading and unloading happen one at a time for each name; this says whose turn it is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from moonpool.runtime.errors import ModelUnavailable

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator


class Moves:
    """The names of the models that are being loaded or unloaded. `changed` is notified when one is no more.

    `names`, `begin` and `end` are for whoever holds the lock of `changed`.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.names: set[str] = set()
        # Whose stubs wait for a move of which models.
        self._asks: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def of(self, name: str, asker: str | None = None) -> Iterator[None]:
        """Inside, nobody else loads or unloads this model. Waits for whoever does.

        `asker` is the model that waits. Raises `ModelUnavailable` where it would wait for itself.
        """
        with self._changed:
            if asker is not None:
                self._check_no_circle(name, asker)
                self._asks.append((asker, name))
            self._changed.wait_for(lambda: name not in self.names)
            self.begin(name)
        try:
            yield
        finally:
            with self._changed:
                if asker is not None:
                    self._asks.remove((asker, name))
                self.end(name)

    def begin(self, name: str) -> None:
        """It moves from now on, which it did not."""
        self.names.add(name)

    def end(self, name: str) -> None:
        """Let the next one."""
        self.names.discard(name)
        self._changed.notify_all()

    def _check_no_circle(self, name: str, asker: str) -> None:
        reached, found = {name}, True
        while found:
            more = {to for waiting, to in self._asks if waiting in reached} - reached
            reached |= more
            found = bool(more)
        if name in self.names and asker in reached:
            raise ModelUnavailable(
                f"model '{name}' is loading or unloading, and that waits for model '{asker}', "
                "which asked for this"
            )
