"""The models and backends of one runtime, by name."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from moonpool.runtime.errors import (
    AlreadyLoaded,
    LoadFailed,
    ModelNotFound,
    ModelUnavailable,
    RuntimeClosed,
)
from moonpool.runtime.exposition import expose
from moonpool.runtime.hosted_model import HostedModel
from moonpool.runtime.model_metrics import model_families
from moonpool.runtime.parallel import in_parallel
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.reactor import Reactor
from moonpool.runtime.states import BACKEND, BackendState, Machine
from moonpool.runtime.stubs import Stubs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moonpool.runtime.backend import Backend, Model
    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.python_based import BackendDirectory

_log = logging.getLogger("moonpool")


class ModelRegistry:
    """Loads and unloads; initializes each backend before its first model. Thread-safe."""

    def __init__(
        self,
        backends: Iterable[Backend],
        python_based: BackendDirectory,
        drain_timeout_s: float,
        verbose: bool,
        listener: Callable[[str, str, str], object] | None,
    ) -> None:
        self._python_based = python_based
        self._drain_timeout_s = drain_timeout_s
        self._verbose = verbose
        self._listener = listener
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._models: dict[str, dict[int, HostedModel]] = {}
        self._latest: dict[str, HostedModel] = {}
        # Being loaded or unloaded: the name is taken.
        self._moving: set[str] = set()
        self._loading: list[HostedModel] = []
        self._closed = False
        self._ended = threading.Event()
        self._disowned = False
        self._reactor = Reactor()
        self._executor = ThreadPoolExecutor(32, "moonpool-execute")
        self._backends: dict[str, Backend] = {backend.name: backend for backend in backends}
        self._stubs = Stubs(self._reactor)
        self._backends.setdefault("python", self._python_backend("python"))
        # Whose models bring their own files.
        self._own = frozenset(self._backends)
        now = time.monotonic()
        self._machines = {name: Machine(name, BACKEND, now) for name in self._backends}
        self._backend_lock = threading.Lock()

    def load(self, name: str, prepare: Callable[[], Sequence[Model]]) -> None:
        """Load what `prepare` finds under this name.

        Raises what that raises, `LoadFailed` and its like, `AlreadyLoaded`, `RuntimeClosed`.
        """
        with self._lock:
            self._check_open()
            if name in self._models or name in self._moving:
                raise AlreadyLoaded(f"model '{name}' is loaded already; unload it first")
            self._moving.add(name)
        loaded: list[HostedModel] = []
        try:
            loaded = self._load_versions(prepare())
        finally:
            with self._lock:
                self._moving.discard(name)
                if loaded:
                    self._models[name] = {hosted.model.version: hosted for hosted in loaded}
                    self._latest[name] = loaded[-1]
                self._changed.notify_all()

    def _load_versions(self, models: Sequence[Model]) -> list[HostedModel]:
        loaded: list[HostedModel] = []
        try:
            for model in models:
                backend = self.backend_of(model)
                self._initialize(backend)
                hosted = HostedModel(backend, model, self._reactor, self._executor, self._tell)
                self._loading.append(hosted)
                try:
                    hosted.load()
                finally:
                    self._loading.remove(hosted)
                loaded.append(hosted)
        except BaseException:
            for hosted in loaded:
                hosted.unload(0.0)
            raise
        return loaded

    def give_up_loading(self) -> None:
        """Somebody who waits for loads on other threads has had enough: let them fail soon."""
        for hosted in list(self._loading):
            hosted.give_up_loading()

    def backend_of(self, model: Model) -> Backend:
        """The backend that the model's configuration names. Raises `LoadFailed`."""
        name = model.config.backend
        if name not in self._backends:
            self.locate(model.config)
            with self._backend_lock:
                if name not in self._backends:
                    self._machines[name] = Machine(name, BACKEND, time.monotonic())
                    self._backends[name] = self._python_backend(name)
        return self._backends[name]

    def locate(self, config: ModelConfig) -> Path | None:
        """The file of the Python-based backend that a configuration names; None for other backends.

        Raises `LoadFailed` where there is no such backend.
        """
        if config.backend in self._own:
            return None
        return self._python_based.find(config.backend, config.raw["runtime"], self._own)

    def _python_backend(self, name: str) -> PythonBackend:
        folder = self._python_based.python_folder()
        return PythonBackend(self._stubs, name, folder, verbose=self._verbose)

    def _initialize(self, backend: Backend) -> None:
        """Once, before its first model. Raises `LoadFailed`, also when it failed earlier."""
        machine = self._machines[backend.name]
        with self._backend_lock:
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

    def _finalize(self, backend: Backend) -> None:
        machine = self._machines[backend.name]
        if machine.state is BackendState.READY:
            machine.move(BackendState.FINALIZING, "closed", time.monotonic())
            try:
                backend.finalize()
            except Exception:
                _log.exception("finalizing backend '%s' failed", backend.name)
            machine.move(BackendState.STOPPED, "finalized", time.monotonic())

    def _tell(self, subject: str, state: str, because: str) -> None:
        _log.debug("%s is %s: %s", subject, state, because)
        if self._listener is not None:
            try:
                self._listener(subject, state, because)
            except Exception:
                _log.exception("the listener failed")

    def unload(self, name: str) -> None:
        """Drain and finalize all versions. Raises `ModelNotFound`."""
        with self._lock:
            versions = self._models.pop(name, None)
            self._latest.pop(name, None)
            if versions is None:
                raise ModelNotFound(f"model '{name}' is not loaded")
            self._moving.add(name)
        try:
            for hosted in versions.values():
                hosted.unload(self._drain_timeout_s)
        finally:
            with self._lock:
                self._moving.discard(name)
                self._changed.notify_all()

    def names(self) -> dict[str, list[int]]:
        """The names of the loaded models, each with its versions."""
        with self._lock:
            return {name: sorted(versions) for name, versions in self._models.items()}

    def find(self, name: str, version: int | None = None) -> HostedModel:
        """A model version, the latest by default. Raises `ModelNotFound`, `ModelUnavailable`."""
        hosted = self._latest.get(name)
        if hosted is not None and (version is None or hosted.model.version == version):
            return hosted
        hosted = self._models.get(name, {}).get(-1 if version is None else version)
        if hosted is not None:
            return hosted
        self._check_open()
        if name in self._models:
            raise ModelNotFound(
                f"Request for unknown model: '{name}' version {version} is not at ready state"
            )
        if name in self._moving:
            raise ModelUnavailable(f"Request for model '{name}' which is loading or unloading")
        raise ModelNotFound(f"Request for unknown model: '{name}' is not found")

    def metrics(self) -> str:
        """The metrics of all models and those that the models made, as text for Prometheus."""
        self._check_open()
        self._stubs.catch_up()
        with self._lock:
            served = [each for versions in self._models.values() for each in versions.values()]
        families = model_families(each.scheduler for each in served)
        return expose([*families, *self._stubs.metrics.families()])

    def close(self) -> None:
        """Unload everything, also what is being loaded, and finalize the backends.

        A second call returns when the first has done so.
        """
        if self._disowned:
            return
        with self._lock:
            first = not self._closed
            self._closed = True
        if not first:
            self._ended.wait()
            return
        try:
            with self._lock:
                self._changed.wait_for(lambda: not self._moving)
                names = list(self._models)
            try:
                in_parallel(self._unload_if_there, names, "moonpool-unload")
            finally:
                self._finalize_all()
        finally:
            # Also where a signal handler raised: those who wait are not to wait for ever.
            self._ended.set()

    def close_soon(self) -> None:
        """Close on a thread of its own. For a finalizer, which must not wait and not take a lock."""
        if not self._closed:
            self._reactor.call_soon(self._close_apart)

    def _close_apart(self) -> None:
        with contextlib.suppress(RuntimeError):  # no more threads: the program ends, and closes all
            threading.Thread(target=self.close, name="moonpool-close").start()

    def _finalize_all(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: not self._moving)
        for backend in self._backends.values():
            self._finalize(backend)
        self._executor.shutdown()
        self._reactor.close()

    def _unload_if_there(self, name: str) -> None:
        with contextlib.suppress(ModelNotFound):  # somebody else unloads it
            self.unload(name)

    def disown(self) -> None:
        """This is a fork of the process that the models belong to: forget them."""
        # They may have been held in the moment of the fork, by threads that are not here.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = True
        self._models, self._latest, self._moving = {}, {}, set()
        self._disowned = True

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            if self._disowned:
                raise RuntimeClosed(
                    "the runtime belongs to the process that made it, not its forks"
                )
            raise RuntimeClosed("the runtime was closed; make another")
