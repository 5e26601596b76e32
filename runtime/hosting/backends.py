"""The backends of one runtime, by name, and the files of Python-based ones.

A Python-based backend is one Python file that serves every model whose configuration names the backend.

Theory of operation. Loads run on several threads. One lock makes a backend and its state appear together, and is held
while a backend initializes: a backend initializes once, before its first model, and loads that need it wait.
`finalize_all` runs when no load is left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from moonpool.runtime.arguments import OF_RUNTIME
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.hosting.ensembles import EnsembleBackend
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend
from moonpool.runtime.model.config.ensembles import ENSEMBLE
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.states import BACKEND, BackendState, Machine

_log = RuntimeLog("moonpool")

# The backends that come with moonpool, laid out as any other directory of backends.
BUILT_IN = Path(__file__).parents[2] / "stub" / "backends"
FILENAME = "model.py"


class BackendDirectory:
    """Finds the files of Python-based backends: in a directory of the user's, then among those that come with moonpool.

    Each call reads the disk. A directory that is absent holds no backends, and may appear later.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Logs a warning if there is no such directory, as most models need none."""
        self.path = None
        if path is not None:
            self.path = Path(os.path.abspath(OF_RUNTIME.path("backend_directory", path)))
        if self._is_absent():
            _log.warning(
                "there is no backend directory %s: models whose backend should be in it will not load", self.path
            )

    def find(self, name: str, runtime: str, others: Iterable[str]) -> Path:
        """Return the file of a backend. `runtime` is the file's name in the configuration.

        Raises `LoadFailed`, which lists the backends that exist; `others` are those of another kind.
        """
        looked = []
        for folder in self._folders():
            file = folder / name / (runtime or FILENAME)
            if file.is_file():
                return file
            looked.append(str(file))
        known = ", ".join(sorted({*others, *self._names()}))
        absent = f"; there is no backend directory {self.path}" if self._is_absent() else ""
        raise LoadFailed(
            f"unable to find backend library for backend '{name}', try specifying runtime on the model "
            f"configuration. (There is no {' and no '.join(looked)}{absent}; there are: {known}.) "
            "Run such a model in a tritonserver that has the backend: with `moonpool triton overlay`, that server's "
            "Python models run in moonpool (docs/TRITON_BACKEND.md).",
            stage="backend",
        )

    def python_folder(self) -> str:
        """Return the folder from which all models of the `python` backend may import; "" for none."""
        return "" if self.path is None else str(self.path / "python")

    def _is_absent(self) -> bool:
        return self.path is not None and not self.path.is_dir()

    def _folders(self) -> list[Path]:
        return [BUILT_IN] if self.path is None else [self.path, BUILT_IN]

    def _names(self) -> list[str]:
        return [
            folder.name
            for parent in self._folders()
            if parent.is_dir()
            for folder in parent.iterdir()
            if (folder / FILENAME).is_file()
        ]


class Backends:
    """The backends of a runtime: those that it was given, and Python-based ones as models ask for them. Thread-safe."""

    def __init__(
        self, given: Iterable[Backend], directory: BackendDirectory, python: Callable[[str, str], Backend]
    ) -> None:
        """`python` makes a backend for Python models, from a name and a folder to import from."""
        self._directory = directory
        self._python = python
        self._lock = threading.Lock()
        self._backends = {backend.name: backend for backend in given}
        self._backends.setdefault("python", self._python_based("python"))
        # Backends without a file: the models bring their own.
        self._own = frozenset(self._backends)
        self._backends[ENSEMBLE] = EnsembleBackend()
        now = time.monotonic()
        self._machines = {name: Machine(name, BACKEND, now) for name in self._backends}

    def of(self, config: ModelConfig) -> Backend:
        """Return the backend that a configuration names. Raises `LoadFailed`."""
        name = config.backend
        if name not in self._backends:
            self.locate(config)
            with self._lock:
                if name not in self._backends:
                    self._machines[name] = Machine(name, BACKEND, time.monotonic())
                    self._backends[name] = self._python_based(name)
        return self._backends[name]

    def locate(self, config: ModelConfig) -> Path | None:
        """Return the file of the Python-based backend that a configuration names; None for other backends.

        Raises `LoadFailed` if there is no such backend.
        """
        if config.ensemble is not None or config.backend in self._own:
            return None
        return self._directory.find(config.backend, config.raw["runtime"], self._own)

    def _python_based(self, name: str) -> Backend:
        return self._python(name, self._directory.python_folder())

    def initialize(self, backend: Backend) -> None:
        """Initialize a backend before its first model. Raises `LoadFailed`, also if it failed earlier."""
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
                raise LoadFailed(f"backend '{backend.name}' is {machine.state}: {machine.because}", stage="backend")

    def finalize_all(self) -> None:
        """Finalize the backends that were initialized. Errors are logged."""
        for backend in self._backends.values():
            machine = self._machines[backend.name]
            if machine.state is BackendState.READY:
                machine.move(BackendState.FINALIZING, "closed", time.monotonic())
                try:
                    backend.finalize()
                except Exception:
                    _log.exception("finalizing backend '%s' failed", backend.name)
                machine.move(BackendState.STOPPED, "finalized", time.monotonic())
