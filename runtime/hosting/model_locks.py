"""The locks of models while they are loaded or unloaded, and the attempts that hold them.

Theory of operation. A thread that loads or unloads a model holds its model lock, for as long as that takes
(`ModelLocks`). Model locks are entries in a set, guarded by the registry's `_lock`, and not threading locks: one
thread may acquire a model lock for another thread that does the work, and `find` can tell that a model is just
loading. A model can ask for the load of another one and waits for it in its stub. If the second one is about to be
unloaded, or replaced, and that waits for the first, both would wait for ever. So each wait of a model is noted, and a
wait that closes a circle is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from moonpool.runtime.errors import LoadFailed, ModelUnavailable


class LoadAttempt:
    """One load, or a change of instances, for a caller who may be interrupted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_given_up = False
        # True once it has the model lock: what is loading under the name from then on is its own.
        self.has_lock = False
        self.ended = threading.Event()

    def check(self) -> None:
        """Raise `LoadFailed` if it was given up."""
        if self.is_given_up:
            raise LoadFailed(f"the load of '{self.name}' was interrupted")


class ModelLocks:
    """The model locks of a registry: `names` has the models that are being loaded or unloaded.

    `names`, `acquire` and `release` need the lock of `changed`, which is notified when a model lock is free.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.names: set[str] = set()
        # (model that waits in its stub, model that it waits for)
        self._asks: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def try_hold(self, name: str) -> Iterator[bool]:
        """Hold the lock of a model if it is free. The context is False, and nothing is held, if it is not."""
        with self._changed:
            is_free = name not in self.names
            if is_free:
                self.acquire(name)
        try:
            yield is_free
        finally:
            if is_free:
                with self._changed:
                    self.release(name)

    @contextlib.contextmanager
    def hold(self, name: str, asker: str | None = None, attempt: LoadAttempt | None = None) -> Iterator[None]:
        """Hold the lock of a model; waits until it is free, or `attempt` is given up.

        `asker` is the model that waits for this. Raises `ModelUnavailable` if it would wait for itself, and
        `LoadFailed`.
        """
        attempt = attempt or LoadAttempt(name)
        with self._changed:
            if asker is not None:
                self._check_no_circle(name, asker)
                self._asks.append((asker, name))
            self._changed.wait_for(lambda: name not in self.names or attempt.is_given_up)
            attempt.check()
            self.acquire(name)
            attempt.has_lock = True
        try:
            yield
        finally:
            with self._changed:
                if asker is not None:
                    self._asks.remove((asker, name))
                self.release(name)

    def acquire(self, name: str) -> None:
        """Acquire the lock of a model, which must be free."""
        self.names.add(name)

    def release(self, name: str) -> None:
        """Release the lock of a model."""
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
                f"model '{name}' is loading or unloading, and that waits for model '{asker}', which asked for this"
            )
