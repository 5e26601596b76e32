"""The way in from Python: load models, send them requests, unload them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.backend import Backend, Model
from moonpool.runtime.config import ModelConfig, minimal
from moonpool.runtime.config_options import ModelOptions
from moonpool.runtime.errors import (
    AlreadyLoaded,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    ModelUnavailable,
    RuntimeClosed,
)
from moonpool.runtime.hosted_model import HostedModel
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.reactor import Reactor
from moonpool.runtime.repository import ModelDirectory, ModelRepository
from moonpool.runtime.request import NO_DETAILS, Details, Response
from moonpool.runtime.source import ModelSource, of_class, of_file
from moonpool.runtime.waiter import FutureWaiter, ThreadWaiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType, TracebackType

    from numpy.typing import NDArray

    from moonpool.runtime.allocator import ResponseAllocator
    from moonpool.runtime.request import InferenceRequest, Outcome, Parameter

_log = logging.getLogger("moonpool")
_open_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """Hosts models in stub processes. Thread-safe; use it as a context manager, or call `close`.

        with moonpool.Runtime("models/") as runtime:
            sums = runtime.infer("add_sub", {"INPUT0": a, "INPUT1": b})["OUTPUT0"]

    A runtime does not survive a fork: use it in the process that made it.
    """

    def __init__(
        self,
        repository: str | os.PathLike[str] | None = None,
        *,
        models: Iterable[str] | None = None,
        backends: Iterable[Backend] = (),
        drain_timeout_s: float = 30.0,
        verbose: bool = False,
        listener: Callable[[str, str, str], object] | None = None,
    ) -> None:
        """Load all models of `repository`, or those named in `models`.

        `backends` are found by their names beside the built-in `python`. `listener` gets the name,
        state and reason of every model version and instance that changes its state, on whichever thread does
        that. Raises `RepositoryError`, `ConfigError`, `LoadFailed`; what was loaded is unloaded then.
        """
        self._repository = None if repository is None else ModelRepository(repository)
        self._drain_timeout_s = drain_timeout_s
        self._listener = listener
        self._lock = threading.Lock()
        self._models: dict[str, dict[int, HostedModel]] = {}
        self._latest: dict[str, HostedModel] = {}
        self._loading: set[str] = set()
        self._closed = False
        self._pid = os.getpid()
        self._reactor = Reactor()
        self._executor = ThreadPoolExecutor(32, "moonpool-execute")
        self._backends: dict[str, Backend] = {b.name: b for b in backends}
        self._backends.setdefault("python", PythonBackend(self._reactor, verbose=verbose))
        self._initialized: set[str] = set()
        self._backend_lock = threading.Lock()
        _open_runtimes.add(self)
        if self._repository is not None:
            try:
                self._load_all(self._repository.models() if models is None else list(models))
            except BaseException:
                self.close()
                raise

    # Models

    def _load_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.load(name)

    def load(
        self,
        name: str,
        source: str | os.PathLike[str] | type | None = None,
        *,
        instances: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a model, and return when all its instances are ready.

        Without `source` it is the repository's model of that name, in the versions of its policy. `source` is
        a model's directory, one Python file, or a class in a file. `instances` and `config` (in the
        JSON form of `config.pbtxt`) go before what the directory says.

        Raises `LoadFailed`, `ConfigError`, `RepositoryError`, `AlreadyLoaded`, `RuntimeClosed`.
        """
        with self._lock:
            self._check_open()
            if name in self._models or name in self._loading:
                raise AlreadyLoaded(f"model '{name}' is loaded already; unload it first")
            self._loading.add(name)
        try:
            loaded = self._load_versions(self._prepare(name, source, instances, config))
            with self._lock:
                self._models[name] = {hosted.model.version: hosted for hosted in loaded}
                self._latest[name] = max(loaded, key=lambda hosted: hosted.model.version)
        finally:
            with self._lock:
                self._loading.discard(name)

    def _prepare(
        self,
        name: str,
        source: str | os.PathLike[str] | type | None,
        instances: int | None,
        override: Mapping[str, Any] | None,
    ) -> list[Model]:
        if isinstance(source, type):
            return [_model(name, of_class(source), minimal(name), None, 1, instances, override)]
        if source is not None and not Path(source).is_dir():
            return [_model(name, of_file(source), minimal(name), None, 1, instances, override)]
        if source is not None:
            directory = ModelDirectory(source)
        elif self._repository is not None:
            directory = self._repository.find(name)
        else:
            raise ModelNotFound(
                f"model '{name}': the runtime has no repository; give a directory, file or class"
            )
        return _models_of(name, directory, instances, override)

    def _load_versions(self, models: Sequence[Model]) -> list[HostedModel]:
        loaded: list[HostedModel] = []
        try:
            for model in models:
                backend = self._backend(model.config.backend, model.name)
                hosted = HostedModel(backend, model, self._reactor, self._executor, self._tell)
                hosted.load()
                loaded.append(hosted)
        except BaseException:
            for hosted in loaded:
                hosted.unload(0.0)
            raise
        return loaded

    def _backend(self, name: str, model: str) -> Backend:
        backend = self._backends.get(name or "python")
        if backend is None:
            known = ", ".join(sorted(self._backends))
            raise LoadFailed(
                f"model '{model}' asks for the backend '{name}', which there is not; there are: {known}",
                stage="backend",
            )
        with self._backend_lock:
            if backend.name not in self._initialized:
                try:
                    backend.initialize()
                except MoonpoolError:
                    raise
                except Exception as error:
                    raise LoadFailed(
                        f"backend '{name}' cannot be initialized: {error}", stage="backend"
                    ) from error
                self._initialized.add(backend.name)
        return backend

    def _tell(self, subject: str, state: str, because: str) -> None:
        _log.debug("%s is %s: %s", subject, state, because)
        if self._listener is not None:
            try:
                self._listener(subject, state, because)
            except Exception:
                _log.exception("the listener failed")

    def unload(self, name: str) -> None:
        """Finish the requests that are there, finalize all versions and end their processes.

        Raises `ModelNotFound`.
        """
        with self._lock:
            versions = self._models.pop(name, None)
            self._latest.pop(name, None)
        if versions is None:
            raise ModelNotFound(f"model '{name}' is not loaded")
        for hosted in versions.values():
            hosted.unload(self._drain_timeout_s)

    def models(self) -> dict[str, list[int]]:
        """The names of the loaded models, each with its versions."""
        with self._lock:
            return {name: sorted(versions) for name, versions in self._models.items()}

    def is_ready(self, name: str, version: int | None = None) -> bool:
        """Whether a request to this model could run now. False for models that are not loaded."""
        try:
            return self._find(name, version).why_not_ready() is None
        except MoonpoolError:
            return False

    def config(self, name: str, version: int | None = None) -> ModelConfig:
        """The configuration after the model completed it."""
        return self._find(name, version).model.config

    def statistics(self, name: str, version: int | None = None) -> dict[str, Any]:
        """Counts and durations, as in Triton's statistics extension."""
        return dict(self._find(name, version).scheduler.statistics.snapshot())

    def instances(self, name: str, version: int | None = None) -> list[dict[str, Any]]:
        """Name, state, reason, restarts and process of each instance."""
        shown = []
        for seat in self._find(name, version).supervisor.seats:
            process = getattr(seat.instance.state, "process", None)
            shown.append(
                {
                    "name": seat.instance.name,
                    "state": str(seat.machine.state),
                    "because": seat.machine.because,
                    "restarts": seat.restarts,
                    "pid": getattr(process, "pid", None),
                }
            )
        return shown

    def _find(self, name: str, version: int | None) -> HostedModel:
        hosted = self._latest.get(name)
        if hosted is not None and version is not None and hosted.model.version != version:
            hosted = self._models.get(name, {}).get(version)
        if hosted is None:
            self._check_open()
            what = f"Request for unknown model: '{name}'"
            if version is not None and name in self._models:
                raise ModelNotFound(f"{what} version {version} is not at ready state")
            if name in self._loading:
                raise ModelUnavailable(f"Request for model '{name}' which is loading")
            raise ModelNotFound(f"{what} is not found")
        return hosted

    # Requests

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> dict[str, NDArray[Any]]:
        """Send a request and wait for the outputs, by name.

        `inputs` maps names to arrays of exactly the datatypes and shapes that the model's configuration says,
        with the batch dimension first where it batches. They must not change until the call returns.
        The outputs are views on shared memory, which they give back when they are collected.
        `timeout_s` covers everything; `options` are those of `request`.

        Raises `InvalidRequest`, `ModelNotFound`, `ModelUnavailable`, `RequestTimedOut`, `QueueFull`,
        `ModelError` with what the model said, `StubDied`.
        """
        return self.request(model, inputs, version=version, timeout_s=timeout_s, **options).outputs

    def request(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: int = 0,
        priority: int = 0,
        queue_timeout_us: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        allocator: ResponseAllocator | None = None,
        userp: object = None,
    ) -> Response:
        """As `infer`, but returns the whole response, with its parameters.

        `outputs` names the outputs that are wanted, all by default. `priority` and `queue_timeout_us` are for
        the model's queue policy. `allocator` says where the outputs go; it gets `userp`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        hosted = self._find(model, version)
        details = _details(
            request_id, correlation_id, flags, queue_timeout_us, priority, parameters
        )
        request = hosted.signature.request(inputs, outputs, details)
        _use_allocator(request, allocator, userp)
        waiter = request.waiter = ThreadWaiter()
        execution = hosted.scheduler.submit(request)
        try:
            if execution is not None:
                execution.drive(deadline)
            outcome = waiter.wait(deadline)
        except BaseException:
            hosted.scheduler.leave(request)
            raise
        return _result(outcome)

    async def ainfer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> dict[str, NDArray[Any]]:
        """As `infer`, in an asyncio event loop. Cancelling the task cancels the request."""
        response = await self.arequest(
            model, inputs, version=version, timeout_s=timeout_s, **options
        )
        return response.outputs

    async def arequest(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: int = 0,
        priority: int = 0,
        queue_timeout_us: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        allocator: ResponseAllocator | None = None,
        userp: object = None,
    ) -> Response:
        """As `request`, in an asyncio event loop. Cancelling the task cancels the request."""
        from moonpool.runtime.aio import wait_for_outcome

        hosted = self._find(model, version)
        details = _details(
            request_id, correlation_id, flags, queue_timeout_us, priority, parameters
        )
        request = hosted.signature.request(inputs, outputs, details)
        _use_allocator(request, allocator, userp)
        return _result(await wait_for_outcome(hosted.scheduler, request, timeout_s))

    def submit(
        self, model: str, inputs: Mapping[str, Any], *, version: int | None = None
    ) -> Future[Response]:
        """Send a request and return at once; the future has the response, or raises what `infer` raises."""
        hosted = self._find(model, version)
        request = hosted.signature.request(inputs)
        waiter = FutureWaiter()
        request.waiter = waiter
        execution = hosted.scheduler.submit(request)
        if execution is not None:
            execution.drive_in_reactor()
        return waiter.future

    def empty(
        self, model: str, name: str, shape: int | Sequence[int], version: int | None = None
    ) -> NDArray[Any]:
        """An array for input `name`, in shared memory: write into it, and `infer` copies nothing.

        Its contents are what was there before. It may be used for many requests, also at the same time as long as
        nobody writes to it meanwhile; the model may write to it, too. All instances of the model can
        read the region that it lies in. Raises `InvalidRequest`, `OutOfMemory`.
        """
        hosted = self._find(model, version)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype, size_bytes = hosted.signature.empty_dtype(name, dims)
        backend = self._backends[hosted.model.config.backend or "python"]
        if not isinstance(backend, PythonBackend):
            return np.empty(dims, dtype)
        return backend.memory_of(hosted.model).empty(dims, dtype, size_bytes)

    # End

    def close(self) -> None:
        """Unload all models and finalize the backends. May be called many times, also by several threads."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            models, self._models = self._models, {}
            self._latest = {}
        stoppers = [
            threading.Thread(target=hosted.unload, args=(self._drain_timeout_s,))
            for versions in models.values()
            for hosted in versions.values()
        ]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join()
        for name in self._initialized:
            try:
                self._backends[name].finalize()
            except Exception:
                _log.exception("finalizing backend '%s' failed", name)
        self._executor.shutdown()
        self._reactor.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeClosed("the runtime was closed; make another")
        if self._pid != os.getpid():
            raise RuntimeClosed("the runtime belongs to the process that made it, not to its fork")

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"models {', '.join(sorted(self._models)) or 'none'}"
        return f"<moonpool.Runtime: {state}>"


@contextlib.contextmanager
def exit_on_sigterm() -> Any:
    """Inside, SIGTERM raises SystemExit in the main thread, so that `with Runtime` drains and finalizes.

    SIGINT does that anyway, as KeyboardInterrupt. For programs of their own; main thread only.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@atexit.register
def _close_all() -> None:
    for runtime in list(_open_runtimes):
        runtime.close()


def _models_of(
    name: str,
    directory: ModelDirectory,
    instances: int | None,
    override: Mapping[str, Any] | None,
) -> list[Model]:
    raw, source = directory.read_config()
    config = ModelConfig.from_dict({**raw, "name": name}, source=source, partial=True)
    filename = config.default_model_filename or "model.py"
    models = []
    for version in directory.chosen_versions(config):
        file = directory.model_file(version, filename)
        kind = of_file(file).kind
        where = ModelSource(kind, file, None, directory.path, directory.version_directory(version))
        models.append(_model(name, where, raw, source, version, instances, override))
    return models


def _model(
    name: str,
    where: ModelSource,
    raw: Mapping[str, Any],
    source: Any,
    version: int,
    instances: int | None,
    override: Mapping[str, Any] | None,
) -> Model:
    merged = {**raw, **(override or {}), "name": name}
    if instances is not None:
        merged["instance_group"] = [{"kind": "KIND_AUTO", "count": instances}]
    config = ModelConfig.from_dict(merged, source=source, partial=True).placed(())
    return Model(config, ModelOptions.from_parameters(config), version, where)


def _details(
    request_id: str,
    correlation_id: int | str,
    flags: int,
    timeout_us: int,
    priority: int,
    parameters: Mapping[str, Parameter] | None,
) -> Details:
    if not (request_id or correlation_id or flags or timeout_us or priority or parameters):
        return NO_DETAILS
    checked: dict[str, Parameter] = {}
    for key, value in (parameters or {}).items():
        if type(key) is not str or type(value) not in (bool, int, float, str):
            raise InvalidRequest(
                f"parameter {key!r} must be a string with a bool, int, float or str, "
                f"not {type(value).__name__}"
            )
        checked[key] = value
    return Details(request_id, correlation_id, flags, timeout_us, priority, checked or None, None)


def _use_allocator(
    request: InferenceRequest, allocator: ResponseAllocator | None, userp: object
) -> None:
    if allocator is not None:
        request.allocator = allocator
        request.userp = userp


def _result(outcome: Outcome) -> Response:
    if isinstance(outcome, Response):
        return outcome
    # Each caller raises an object of its own: one error may belong to a whole batch.
    raise outcome.with_traceback(None)
