"""The backends of one runtime, by name, each initialized before its first model."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.states import BACKEND, BackendState, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from moonpool.runtime.backend import Backend
    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.python_based import BackendDirectory

_log = logging.getLogger("moonpool")


class Backends:
    """Those that were given, and Python-based ones as models ask for them. Thread-safe."""

    def __init__(
        self,
        given: Iterable[Backend],
        directory: BackendDirectory,
        python: Callable[[str, str], Backend],
    ) -> None:
        """`python` makes the backend of a name for Python models, with a folder to import from."""
        self._directory = directory
        self._python = python
        self._lock = threading.Lock()
        self._backends = {backend.name: backend for backend in given}
        self._backends.setdefault("python", self._python_based("python"))
        # Whose models bring their own files.
        self._own = frozenset(self._backends)
        now = time.monotonic()
        self._machines = {name: Machine(name, BACKEND, now) for name in self._backends}

    def of(self, config: ModelConfig) -> Backend:
        """The backend that a configuration names. Raises `LoadFailed`."""
        name = config.backend
        if name not in self._backends:
            self.locate(config)
            with self._lock:
                if name not in self._backends:
                    self._machines[name] = Machine(name, BACKEND, time.monotonic())
                    self._backends[name] = self._python_based(name)
        return self._backends[name]

    def locate(self, config: ModelConfig) -> Path | None:
        """The file of the Python-based backend that a configuration names; None for other backends.

        Raises `LoadFailed` where there is no such backend.
        """
        if config.backend in self._own:
            return None
        return self._directory.find(config.backend, config.raw["runtime"], self._own)

    def _python_based(self, name: str) -> Backend:
        return self._python(name, self._directory.python_folder())

    def initialize(self, backend: Backend) -> None:
        """Once, before its first model. Raises `LoadFailed`, also when it failed earlier."""
        machine = self._machines[backend.name]
        with self._lock:
            if machine.state is BackendState.CREATED:
                machine.move(BackendState.INITIALIZING, "first model", time.monotonic())
                try:
                    backend.initialize()
                except Exception as error:
                    machine.move(BackendState.FAILED, str(error), time.monotonic())
                    raise LoadFailed(
                        f"backend '{backend.name}' cannot be initialized: {error}", stage="backend"
                    ) from error
                machine.move(BackendState.READY, "initialized", time.monotonic())
            elif machine.state is not BackendState.READY:
                raise LoadFailed(
                    f"backend '{backend.name}' is {machine.state}: {machine.because}",
                    stage="backend",
                )

    def finalize_all(self) -> None:
        """Those that were initialized; what one raises is logged."""
        for backend in self._backends.values():
            machine = self._machines[backend.name]
            if machine.state is BackendState.READY:
                machine.move(BackendState.FINALIZING, "closed", time.monotonic())
                try:
                    backend.finalize()
                except Exception:
                    _log.exception("finalizing backend '%s' failed", backend.name)
                machine.move(BackendState.STOPPED, "finalized", time.monotonic())
