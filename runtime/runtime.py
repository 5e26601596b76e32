"""The way in from Python: load models, send them requests, unload them."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import code_of
from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.exposition import expose
from moonpool.runtime.loading import HostingRules, Wanted
from moonpool.runtime.model_registry import ModelRegistry
from moonpool.runtime.parallel import in_parallel
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.python_based import BackendDirectory
from moonpool.runtime.readiness import wait_for_answer
from moonpool.runtime.repositories import ModelRepositories
from moonpool.runtime.request import Response
from moonpool.runtime.request_options import RequestOptions, make_request
from moonpool.runtime.responses import response_of, wait_for_response
from moonpool.runtime.stream import ResponseStream
from moonpool.runtime.waiter import FutureWaiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.runtime.audience import Audience
    from moonpool.runtime.backend import Backend
    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.metrics_options import MetricsOptions

# Not the runtimes: one that was forgotten has models that want to be finalized all the same.
_open_registries: set[ModelRegistry] = set()


class Runtime:
    """Hosts models in stub processes. Thread-safe; use it as a context manager, or call `close`.

        with moonpool.Runtime("models/") as runtime:
            sums = runtime.infer("add_sub", {"INPUT0": a, "INPUT1": b})["OUTPUT0"]

    A runtime does not survive a fork: use it in the process that made it.
    """

    def __init__(
        self,
        repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        models: Iterable[str] | None = None,
        backends: Iterable[Backend] = (),
        backend_directory: str | os.PathLike[str] | None = None,
        drain_timeout_s: float = 30.0,
        verbose: bool = False,
        listener: Callable[[str, str, str], object] | None = None,
        metrics: MetricsOptions | None = None,
        audience: Audience | None = None,
        config_limits: Iterable[str] = (),
    ) -> None:
        """Load all models of `repository`, which may be several, or those named in `models`.

        `backends` are found by their names beside the built-in `python`; `backend_directory` has
        Python-based ones, each as `<name>/model.py`. `listener` gets the name, state and reason of every
        model version and instance that changes its state, on whichever thread does that. `metrics` says
        what is counted beside what is counted anyway, `audience` is for servers of several processes.
        `config_limits`, such as `["instances=2000"]`, raise the most that a configuration may ask for. Raises
        `RepositoryError`, `ConfigError`, `LoadFailed`, and ValueError for a limit that does not exist; what was loaded
        is unloaded then.
        """
        found = None if repository is None else ModelRepositories(_paths(repository))
        directory = BackendDirectory(backend_directory)
        limits = ConfigLimits(option='Runtime(config_limits=["{}"])').raised(config_limits)
        self._models = ModelRegistry(
            found, backends, directory, drain_timeout_s, verbose, listener, metrics, audience
        )
        self._models.rules = HostingRules(limits=limits)
        _open_registries.add(self._models)
        self._forgotten = weakref.finalize(self, self._models.close_soon)
        self._forgotten.atexit = False
        if found is not None:
            try:
                names = found.models() if models is None else list(models)
                in_parallel(self.load, names, "moonpool-load", self._models.give_up_loading)
            except BaseException:
                self.close()
                raise

    # Models

    @property
    def registry(self) -> ModelRegistry:
        """For servers, which find the models that they are asked for themselves."""
        return self._models

    def load(
        self,
        name: str,
        source: str | os.PathLike[str] | type | None = None,
        *,
        instances: int | None = None,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load a model, and return when all its instances are ready.

        Without `source` it is the repository's model of that name, in the versions of its policy. `source` is
        a model's directory, one Python file, or a class. The class may be one of a notebook's cell: its source
        is taken, with what it uses. `files` are the contents of a directory by path, such as `1/model.py`, and are
        written into a private one. `instances` and `config` (in the JSON form of `config.pbtxt`) go before what the
        directory says.

        A loaded model is replaced: it serves until the new one is ready, and finishes the requests that it
        has. Where the load fails it stays. Nothing happens where nothing was changed since it was loaded.

        Raises `LoadFailed`, `ConfigError`, `RepositoryError`, `BadEnvironment`, `RuntimeClosed`.
        """
        self._models.load(Wanted(name, source, instances, config, files))

    def unload(self, name: str) -> None:
        """Finish the requests that are there, finalize all versions and end their processes.

        Raises `ModelNotFound`.
        """
        self._models.unload(name)

    def models(self) -> dict[str, list[int]]:
        """The names of the loaded models, each with its versions."""
        return self._models.names()

    def is_ready(self, name: str, version: int | None = None) -> bool:
        """Whether a request to this model could run now, and its `is_ready`, if it has one, says so.

        Takes as long as `is_ready`, at most some seconds. False for models that are not loaded.
        """
        return self.why_not_ready(name, version) is None

    def why_not_ready(self, name: str, version: int | None = None) -> str | None:
        """As `is_ready`, but the reason in a sentence; None if the model is ready."""
        try:
            hosted = self._models.find(name, version)
        except MoonpoolError as error:
            return str(error)
        return wait_for_answer(hosted.ask_ready)

    def config(self, name: str, version: int | None = None) -> ModelConfig:
        """The configuration after the model completed it."""
        return self._models.find(name, version).model.config

    def statistics(self, name: str, version: int | None = None) -> dict[str, Any]:
        """Counts and durations, as in Triton's statistics extension."""
        return dict(self._models.find(name, version).scheduler.statistics.snapshot())

    def log_settings(self, **changes: bool | int) -> dict[str, bool | int]:
        """Change which messages of models are logged, while they run; returns all settings.

        The names are those of Triton's logging extension: `log_info`, `log_warning`, `log_error` (true or
        false) and `log_verbose_level` (from 1 on, verbose messages are logged). They are for what models
        say with `Logger` and `logging`. Raises `InvalidRequest`.
        """
        return self._models.stubs.change_log(changes).as_dict()

    def metrics(self) -> str:
        """The metrics of all models, under Triton's names, and those that models made themselves.

        As text in the form that Prometheus reads. It has all that models counted before the responses
        that have arrived. Raises `RuntimeClosed`.
        """
        return expose(self._models.metric_families())

    def instances(self, name: str, version: int | None = None) -> list[dict[str, Any]]:
        """Name, state, reason, restarts, process and sandbox of each instance."""
        shown = []
        for seat in self._models.find(name, version).supervisor.seats:
            process = getattr(seat.instance.state, "process", None)
            confinement = seat.instance.confinement
            shown.append(
                {
                    "name": seat.instance.name,
                    "state": str(seat.machine.state),
                    "because": seat.machine.because,
                    "restarts": seat.restarts,
                    "pid": process.pid if process is not None and process.is_running else None,
                    "sandbox": confinement.as_dict() if confinement is not None else None,
                }
            )
        return shown

    # Requests

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, NDArray[Any]]:
        """Send a request and wait for the outputs, by name.

        `inputs` maps names to arrays of exactly the datatypes and shapes that the model's configuration says,
        with the batch dimension first where it batches. They must not change until the call returns.
        The outputs are views on shared memory, which they give back when they are collected.
        `timeout_s` covers everything; `options` are those of `request`.

        Raises `InvalidRequest`, `ModelNotFound`, `ModelUnavailable`, `RequestTimedOut`, `QueueFull`,
        `ModelError` with what the model said, `StubDied`.
        """
        if options:
            return self.request(
                model, inputs, version=version, timeout_s=timeout_s, **options
            ).outputs
        hosted = self._models.find(model, version)
        return wait_for_response(
            hosted.scheduler, hosted.signature.request(inputs), timeout_s
        ).outputs

    def request(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Response:
        """As `infer`, but returns the whole response, with its parameters.

        What the options mean is said at `RequestOptions`.
        """
        hosted = self._models.find(model, version)
        request = make_request(hosted.signature, inputs, **options)
        return wait_for_response(hosted.scheduler, request, timeout_s)

    async def ainfer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
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
        **options: Unpack[RequestOptions],
    ) -> Response:
        """As `request`, in an asyncio event loop. Cancelling the task cancels the request."""
        from moonpool.runtime.aio import wait_for_outcome

        hosted = self._models.find(model, version)
        request = make_request(hosted.signature, inputs, **options)
        return response_of(await wait_for_outcome(hosted.scheduler, request, timeout_s))

    def submit(
        self, model: str, inputs: Mapping[str, Any], *, version: int | None = None
    ) -> Future[Response]:
        """Send a request and return at once; the future has the response, or raises what `infer` raises.

        Cancelling the future cancels the request. Callbacks of the future must not block: all
        requests may depend on the thread that they run on.
        """
        hosted = self._models.find(model, version)
        request = hosted.signature.request(inputs)
        waiter = request.waiter = FutureWaiter(lambda: hosted.scheduler.leave(request))
        execution = hosted.scheduler.submit(request)
        if execution is not None:
            execution.drive_in_reactor()
        return waiter.future

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ResponseStream:
        """Send a request, and iterate over its responses: as many as a decoupled model gives, else one.

        `timeout_s` covers everything up to the last response. Ending the iteration early with `close`, by leaving a
        `with`, or by dropping the stream cancels the request. Raises and takes what `request` does.
        """
        hosted = self._models.find(model, version)
        request = make_request(hosted.signature, inputs, **options)
        return ResponseStream(hosted.scheduler, request, timeout_s)

    @overload
    def empty(
        self, model: str, name: str, shape: int | Sequence[int], version: int | None = None
    ) -> NDArray[Any]: ...

    @overload
    def empty(
        self,
        model: str,
        name: str,
        shape: int | Sequence[int],
        version: int | None = None,
        *,
        device: int,
    ) -> DeviceArray: ...

    def empty(
        self,
        model: str,
        name: str,
        shape: int | Sequence[int],
        version: int | None = None,
        *,
        device: int | None = None,
    ) -> NDArray[Any] | DeviceArray:
        """An array for input `name`, in shared memory: write into it, and `infer` copies nothing.

        Its contents are what was there before. It may be used for many requests, also at the same time as long as
        nobody writes to it meanwhile; the model may write to it, too. All instances of the model can
        read the region that it lies in. On a `device` it is an array for cupy, torch and others to take.
        Raises `InvalidRequest`, `OutOfMemory`, `CudaUnavailable`.
        """
        hosted = self._models.find(model, version)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype, size_bytes = hosted.signature.empty_dtype(name, dims)
        backend = self._models.backends.of(hosted.model.config)
        if not isinstance(backend, PythonBackend):
            if device is not None:
                raise InvalidRequest(f"the backend of model '{model}' takes no arrays on devices")
            return np.empty(dims, dtype)
        memory = backend.memory_of(hosted.model)
        if device is None:
            return memory.empty(dims, dtype, size_bytes)
        return memory.on_device(device).empty(dims, code_of(dtype), size_bytes)

    # End

    def close(self) -> None:
        """Unload all models and finalize the backends. May be called many times, by several threads.

        A runtime that nobody refers to any more, and one that is open when the program ends, is closed
        as well.
        """
        self._forgotten.detach()
        self._models.close()
        _open_registries.discard(self._models)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._models.is_closed:
            return "<moonpool.Runtime, closed>"
        return f"<moonpool.Runtime with models {sorted(self._models.names())}>"


@atexit.register
def _close_all() -> None:
    for models in list(_open_registries):
        models.close()


def _disown_all() -> None:
    """In a fork: the stubs are the parent's, and so are the threads that serve them."""
    for models in list(_open_registries):
        models.disown()


os.register_at_fork(after_in_child=_disown_all)


def _paths(
    repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Sequence[str | os.PathLike[str]]:
    return [repository] if isinstance(repository, str | os.PathLike) else repository
