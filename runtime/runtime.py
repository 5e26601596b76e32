"""The way in from Python: load models, send them requests, unload them.

A runtime that nobody has any more is closed by a finalizer, and one that is open when the program ends by `atexit`. In
a fork of the process, its models are disowned.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import code_of
from moonpool.runtime.arguments import OF_REQUEST, OF_RUNTIME, shape_of
from moonpool.runtime.errors import InvalidRequest, ModelNotFound
from moonpool.runtime.hosting.backends import BackendDirectory
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.python_backend import PythonBackend
from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.isolation.spares import count_of
from moonpool.runtime.log import RuntimeLog, flush
from moonpool.runtime.model.backend import Backend
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.config.options import OF_LOAD, OperatorOptions, check_level, said_in_a_load
from moonpool.runtime.model.config.schema import suggestion
from moonpool.runtime.model.request import Response
from moonpool.runtime.model.signature import RequestOptions, request_with
from moonpool.runtime.observe.exposition import expose
from moonpool.runtime.observe.metrics_options import MetricsOptions
from moonpool.runtime.openai.answers import CHAT
from moonpool.runtime.openai.calls import AnswerStream, ModelCalls
from moonpool.runtime.process.parallel import awaited, in_parallel
from moonpool.runtime.process.spawner import fill_standard_descriptors
from moonpool.runtime.process.threads import apart, check_unpatched
from moonpool.runtime.repository.grants import Grants, as_argument
from moonpool.runtime.repository.loading import HostingRules, Wanted
from moonpool.runtime.repository.repository import ModelRepositories, suggesting
from moonpool.runtime.residency.policy import Resident
from moonpool.runtime.schedule.callers import response_of, submit_for_future, wait_for_response
from moonpool.runtime.schedule.rate_limiter import RateLimiter, limiter_of
from moonpool.runtime.schedule.response_cache import cache_of
from moonpool.runtime.schedule.scheduler import ABANDONED_S
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.stubs.output import PRINTER
from moonpool.runtime.stubs.readiness import wait_for_answer

if TYPE_CHECKING:
    from moonpool.ipc.cuda.array import DeviceArray

_log = RuntimeLog("moonpool")
T = TypeVar("T")
# Registries and not runtimes: the models of a runtime that nobody has any more must still be finalized.
_open_registries: set[ModelRegistry] = set()
_ONE_OF_MANY = (
    "One of {} models could not be loaded, so none is loaded. Runtime(repository, models=[...]) loads only the models "
    "that it names. With models=[] it loads none, and load() loads them one by one."
)


class LoadOptions(TypedDict, total=False):
    """The options of a load, as `Runtime.load` has them."""

    instances: int | None
    config: Mapping[str, Any] | None
    files: Mapping[str, bytes] | None
    sandbox: str | None
    options: Mapping[str, str | float] | None
    parameters: Mapping[str, str | float] | None


class Runtime:
    """Hosts models in stub processes. Thread-safe; use it as a context manager, or call `close`.

        with moonpool.Runtime("models/") as runtime:
            sums = runtime.infer("add_sub", {"INPUT0": a, "INPUT1": b})["OUTPUT0"]

    In an event loop, use `async with`, `aload`, `ainfer`, and `stream` with `async for`. Making a runtime loads the
    models of its repository and so takes time: `await asyncio.to_thread(moonpool.Runtime, "models/")`. A runtime does
    not survive a fork: use it in the process that made it.
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
        config_limits: Iterable[str] = (),
        sandbox: str | None = None,
        sandbox_grants: Iterable[str] = (),
        model_options: Mapping[str, Mapping[str, str | float]] | None = None,
        response_cache_bytes: int | None = None,
        rate_limit: Iterable[str] | None = None,
        resident: Resident | None = None,
        spares: int | None = None,
    ) -> None:
        """Load all models of `repository`, which may be several, or those named in `models`.

        `backends` are found by their names, beside the built-in `python`. `backend_directory` has Python-based
        backends, each as `<name>/model.py`. `listener` gets the name, state and reason of every model version and
        instance that changes its state, on the thread that changes it. `metrics` asks for metrics that cost something.
        `config_limits`, such as `["instances=2000"]`, raise the most that a configuration may ask for. Responses of
        models with `response_cache { enable: true }` are kept for equal requests, in `response_cache_bytes` together.
        With `rate_limit`, such as `["NAME:COUNT"]` or `[]`, instances execute only while the resources of their
        `rate_limiter` are free. With `resident`, such as `Resident(models=20)`, a model has processes only from its
        first request on, and sleeps when others need the room (docs/RESIDENCY.md). `spares` processes are kept ready
        for the next models at `best-effort` or `strict` (docs/SANDBOX.md#spares): 1, unless the variable
        MOONPOOL_SPARES has another number.

        `sandbox` is the least level of all models: `off`, `standard`, `best-effort` or `strict`. A model may ask for
        more, never for less. From `best-effort` on, a model's configuration gives it nothing beyond its level except
        what `sandbox_grants` has: `"MODEL:MOONPOOL_SANDBOX_PATHS=/data,EXECUTION_ENV_PATH=/envs/one"` grants these
        values and no others, `"MODEL"` everything that its configuration asks for. `moonpool check REPO --sandbox
        strict` prints what models ask for in this form. `model_options` are options of models by name (`*` stands for
        any characters, and a name takes precedence over a pattern), such as `{"*": {"MOONPOOL_MEMORY_LIMIT_BYTES":
        "1G"}}`. They take precedence over configurations and count as granted. docs/OPTIONS.md has all options.

        Raises `RepositoryError`, `ConfigError`, `LoadFailed`, and ValueError for a limit, a level or a grant that does
        not exist. Models that were loaded by then are unloaded.
        """
        _prepare_program()
        found = ModelRepositories(() if repository is None else _paths(repository))
        cache, limiter, spare_count = cache_of(response_cache_bytes), _limiter(rate_limit), count_of(spares)
        rules = _rules(sandbox, sandbox_grants, model_options or {}, config_limits)
        others = _others(drain_timeout_s, verbose, listener, metrics, resident)
        models = None if models is None else OF_RUNTIME.texts("models", models, "a list of names")
        self._models = ModelRegistry(found, _checked(backends), BackendDirectory(backend_directory), *others)
        self._models.rules = replace(rules, limits_rate=limiter is not None)
        self._models.cache, self._models.limiter = cache, limiter
        self._models.stubs.spares.count = spare_count
        _close_at_the_end(self._models)
        PRINTER.follow_cells(_read_output)
        self._forgotten = weakref.finalize(self, self._models.close_soon)
        self._forgotten.atexit = False
        if repository is not None:
            self._load_all(found, models)

    def _load_all(self, found: ModelRepositories, models: Iterable[str] | None) -> None:
        """Load these models, or all of the repositories. If one fails, close the runtime and raise its error."""
        for text in self._models.rules.about_none_of(found.listing().names):
            _log.warning("%s", text)
        names: list[str] = []
        try:
            names.extend(found.models() if models is None else models)
            in_parallel(self.load, names, "moonpool-load", self._models.give_up_loading)
        except BaseException as error:
            if isinstance(error, MoonpoolError) and len(names) > 1:
                error.add_note(_ONE_OF_MANY.format(len(names)))
            self.close()
            raise

    # Models

    def load(
        self,
        name: str,
        source: str | os.PathLike[str] | type | FunctionType | None = None,
        *,
        instances: int | None = None,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        sandbox: str | None = None,
        options: Mapping[str, str | float] | None = None,
        parameters: Mapping[str, str | float] | None = None,
    ) -> None:
        """Load a model, and return when all its instances are ready.

        Without `source`, this loads the repository's model of that name, in the versions of its policy. `source` is a
        model's directory, its address in the cloud (`s3://bucket/models/m`), one Python file, a class or function in it
        (`"two.py:A"`), or a class or function itself. It may come from a cell of a notebook: its source is copied, with
        everything that it uses. `files` are the contents of a directory by path, such as `1/model.py`, and are written
        into a private one. `instances` and `config` (in the JSON form of `config.pbtxt`) take precedence over the
        directory's configuration, field by field, and over its `parameters` key by key.

        `options` are options of moonpool by key, such as `{"MOONPOOL_MEMORY_LIMIT_BYTES": "1G"}`, and `parameters` are
        the model's own. Both take precedence over those of its configuration, key by key. `sandbox` is the least level
        of this model, in place of the runtime's. With `best-effort` or `strict` the configuration gives the model
        nothing beyond that level; `options` count as granted. These three hold until another call of `load` gives any
        of them, also if this load fails or the model was unloaded, and when a model or a client of a server loads it
        again, with whatever configuration. They are for you to choose: do not take them from the model's author.

        A loaded model is replaced: it serves until the new one is ready, and finishes the requests that it
        has. If the load fails, it stays. Nothing happens if nothing has changed since it was loaded. If only
        instance groups, the version policy, delays, queue policies or deadlines have changed, its processes go on.

        Raises `LoadFailed`, `ConfigError`, `RepositoryError`, `BadEnvironment`, `RuntimeClosed`.
        """
        OF_LOAD.one("name", name, str, "a text")
        if instances is not None:
            OF_LOAD.whole("instances", instances, 1)
        if config is not None:
            OF_LOAD.map("config", config, "a map with the fields of config.pbtxt")
        if files is not None:
            _check_files(files)
        said = said_in_a_load(sandbox, options, parameters)
        with suggesting(name, lambda: self._models.repositories.listing().names):
            self._models.load_patiently(Wanted(name, source, instances, config, files, said=said))

    async def aload(
        self,
        name: str,
        source: str | os.PathLike[str] | type | FunctionType | None = None,
        **arguments: Unpack[LoadOptions],
    ) -> None:
        """Load a model as `load` does, from an asyncio event loop. Cancelling the task gives the load up, as soon as
        possible.
        """
        load = partial(self.load, name, source, **arguments)
        await awaited(load, "moonpool-aload", partial(self._models.give_up_loading, name))

    def scale(self, name: str, instances: int) -> None:
        """Change the number of instances of a loaded model while it serves.

        Returns when new instances are ready and those that are too many have finished what they had, sequences
        too, and ended. `instances` is the `count` of the model's instance group: for GPUs, that on each of them.
        It holds until the model is loaded again. If an instance does not start, nothing has changed.

        Raises `ModelNotFound`, `InvalidRequest` for a model with several instance groups, `ConfigError` and
        `LoadFailed`.
        """
        with self._naming(name):
            self._models.scale_patiently(name, instances)

    def unload(self, name: str) -> None:
        """Finish the present requests, finalize all versions and end their processes.

        Waits as `close` does. Raises `ModelNotFound`.
        """
        with self._naming(name):
            self._models.unload_patiently(name)

    async def ascale(self, name: str, instances: int) -> None:
        """Change the number of instances as `scale` does, from an event loop. It cannot be cancelled half-way."""
        await awaited(partial(self.scale, name, instances), "moonpool-ascale", _go_on)

    async def aunload(self, name: str) -> None:
        """Unload a model as `unload` does, from an event loop. Cancelling the task ends the wait, as Ctrl-C does."""
        end = partial(self._models.end_at_once, name)
        await awaited(partial(self.unload, name), "moonpool-aunload", end)

    def models(self) -> dict[str, list[int]]:
        """Return the names of the loaded models, each with its versions."""
        return self._models.names()

    def is_ready(self, name: str, version: int | None = None) -> bool:
        """Return True if a request to this model could run now, and the model's `is_ready`, if it has one, agrees.

        Takes as long as `is_ready`, at most some seconds: await `asyncio.to_thread(runtime.is_ready, name)` in an event
        loop. Returns False for models that are not loaded.
        """
        return self.why_not_ready(name, version) is None

    def why_not_ready(self, name: str, version: int | None = None) -> str | None:
        """Return the reason why a model is not ready, as a sentence; None if `is_ready` is True."""
        try:
            hosted = self._find(name, version)
        except MoonpoolError as error:
            return str(error)
        return wait_for_answer(hosted.ask_ready, hosted.scheduler.reactor)

    def config(self, name: str, version: int | None = None) -> ModelConfig:
        """Return the configuration after the model completed it."""
        return self._find(name, version).model.config

    def statistics(self, name: str, version: int | None = None) -> dict[str, Any]:
        """Return counts and durations, as in Triton's statistics extension."""
        return dict(self._find(name, version).scheduler.statistics.snapshot())

    def log_settings(self, **changes: bool | int) -> dict[str, bool | int]:
        """Change which messages of models are logged, while they run. Returns all settings.

        The names are those of Triton's logging extension: `log_info`, `log_warning`, `log_error` (true or
        false) and `log_verbose_level` (from 1 on, verbose messages are logged). They apply to messages that
        models log with `Logger` and `logging`. Raises `InvalidRequest`.
        """
        return self._models.stubs.change_log(changes).as_dict()

    def metrics(self) -> str:
        """Return the metrics of all models, under Triton's names, and those that models made themselves.

        The text has the form that Prometheus reads. It contains everything that models counted before the
        responses that have arrived. Raises `RuntimeClosed`.
        """
        return expose(self._models.metric_families())

    def instances(self, name: str, version: int | None = None) -> list[dict[str, Any]]:
        """Return name, state, reason, restarts, process and sandbox of each instance."""
        shown = []
        for record in self._find(name, version).supervisor.records:
            process = getattr(record.instance.state, "process", None)
            confinement = record.instance.confinement
            shown.append(
                {
                    "name": record.instance.name,
                    "state": str(record.machine.state),
                    "because": record.machine.because,
                    "restarts": record.restarts,
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

        `inputs` maps names to arrays of exactly the datatypes and shapes of the model's configuration, with the
        batch dimension first if the model batches. They must not change until the call returns. Outputs are
        zero-copy views of shared memory. The memory is reused once you drop them. `timeout_s` covers everything;
        `options` are those of `request`.

        Raises `InvalidRequest`, `ModelNotFound`, `ModelUnavailable`, `RequestTimedOut`, `QueueFull`,
        `ModelError` with the model's error, `StubDied`.
        """
        hosted = self._find(model, version)
        request = request_with(hosted.signature, inputs, options)
        return wait_for_response(hosted.scheduler, request, timeout_s).outputs

    def request(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Response:
        """Send a request as `infer` does, and return the whole response, with its parameters.

        `RequestOptions` describes the options.
        """
        hosted = self._find(model, version)
        request = request_with(hosted.signature, inputs, options)
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
        """Send a request as `infer` does, from an asyncio event loop. Cancelling the task cancels the request."""
        from moonpool.runtime.schedule.event_loop import wait_for_outcome

        hosted = self._find(model, version)
        request = request_with(hosted.signature, inputs, options)
        return response_of(await wait_for_outcome(hosted.scheduler, request, timeout_s)).outputs

    async def arequest(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Response:
        """Send a request as `request` does, from an asyncio event loop. Cancelling the task cancels the request."""
        from moonpool.runtime.schedule.event_loop import wait_for_outcome

        hosted = self._find(model, version)
        request = request_with(hosted.signature, inputs, options)
        return response_of(await wait_for_outcome(hosted.scheduler, request, timeout_s))

    def submit(self, model: str, inputs: Mapping[str, Any], *, version: int | None = None) -> Future[Response]:
        """Send a request and return at once. The future has the response, or raises what `infer` raises.

        Cancelling the future cancels the request. Callbacks of the future run on a thread of the runtime for such
        callbacks, one after the other. If one blocks, those of other futures come late.
        """
        hosted = self._find(model, version)
        request = hosted.signature.request(inputs)
        return submit_for_future(hosted.scheduler, request, self._models.deliveries)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ResponseStream:
        """Send a request, and iterate over its responses: any number from a decoupled model, one from others.

        `timeout_s` covers everything up to the last response. Ending the iteration early with `close`, by leaving a
        `with`, or by dropping the stream cancels the request. Takes the options of `request`, and raises its errors.
        """
        hosted = self._find(model, version)
        request = request_with(hosted.signature, inputs, options)
        return ResponseStream(hosted.scheduler, request, timeout_s)

    @overload
    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[False] = ...,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> dict[str, Any]: ...

    @overload
    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[True],
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AnswerStream: ...

    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> dict[str, Any] | AnswerStream:
        """Ask a model with a method `chat` for the next message, with OpenAI's `fields`, such as `temperature=0`.

        Returns the answer in OpenAI's form, or with `stream` an iterator over its chunks, for threads and for tasks.
        Raises `InvalidRequest` for wrong fields, and what `infer` raises.
        """
        asked = {**fields, "model": model, "messages": list(messages), "stream": stream}
        found = ModelCalls.of(self._find(model), timeout_s)
        return found.begin(CHAT, asked) if stream else found.whole(CHAT, asked)

    async def achat(
        self, model: str, messages: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask as `chat` does, from an asyncio event loop. Cancelling the task ends the model's iterator."""
        asked = {**fields, "model": model, "messages": list(messages), "stream": False}
        return await ModelCalls.of(self._find(model), timeout_s).awhole(CHAT, asked)

    def embed(self, model: str, texts: Sequence[str], *, timeout_s: float | None = None) -> NDArray[np.float32]:
        """Return a row of numbers for each text, from a model with a method `embed`. Raises what `infer` raises."""
        return ModelCalls.of(self._find(model), timeout_s).embed(texts)

    @overload
    def empty(self, model: str, name: str, shape: int | Sequence[int], version: int | None = None) -> NDArray[Any]: ...

    @overload
    def empty(
        self, model: str, name: str, shape: int | Sequence[int], version: int | None = None, *, device: int
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
        """Return an array for input `name`, in shared memory: write into it, and `infer` copies nothing.

        Its contents are undefined at first. It may be used for many requests, also at the same time as long as
        nobody writes to it meanwhile; the model may write to it, too. All instances of the model can
        read the region that it lies in. On a `device` it is an array for cupy, torch and other libraries.
        Raises `InvalidRequest`, `OutOfMemory`, `CudaUnavailable`.
        """
        hosted = self._find(model, version)
        dims = shape_of(shape)
        if device is not None:
            OF_REQUEST.whole("device", device, 0)
        dtype, size_bytes = hosted.signature.empty_dtype(name, dims)
        backend = self._models.backends.of(hosted.model.config)
        if not isinstance(backend, PythonBackend):
            if device is not None:
                raise InvalidRequest(f"the backend of model '{model}' takes no arrays on devices")
            return np.empty(dims, dtype)
        memory = backend.memory_of(hosted.model)
        if device is None:
            return apart(lambda: memory.empty(dims, dtype, size_bytes))
        return apart(lambda: memory.on_device(device).empty(dims, code_of(dtype), size_bytes))

    def _find(self, name: str, version: int | None = None) -> HostedModel:
        """Find a model for the program, and say which name it may have meant.

        Raises `ModelNotFound` and `InvalidRequest`.
        """
        try:
            return self._models.find(name, version)
        except (ModelNotFound, TypeError):
            with self._naming(name):
                if version is not None:
                    OF_REQUEST.whole("version", version, 0, also=", or None for the latest")
                raise

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Add the name that was meant to the error for a model that is not loaded."""
        try:
            yield
        except (ModelNotFound, TypeError) as error:
            if not isinstance(name, str):
                OF_REQUEST.refuse("model", "the name of a loaded model", name)
            loaded = self._models.names()
            if isinstance(error, ModelNotFound) and name not in loaded:
                error.hint = suggestion(name, loaded)
            raise

    # End

    def close(self) -> None:
        """Unload all models and finalize the backends. May be called many times, by several threads.

        Requests that somebody waits for have `drain_timeout_s` to end, all others a second. If it takes longer than a
        second, the log says what it waits for. Ctrl-C ends it at once, without `finalize`. A runtime that nobody refers
        to any more is closed as well, and one that is open when the program ends. Leaving `with` by an exception other
        than SystemExit gives all requests a second only.
        """
        self._close()

    def _close(self, drain_timeout_s: float | None = None) -> None:
        self._models.close(drain_timeout_s)
        # Not before: if a signal handler raises, nobody may call this again.
        self._forgotten.detach()
        PRINTER.wait()
        flush()

    async def aclose(self) -> None:
        """Close the runtime as `close` does, from an event loop. Cancelling the task ends the wait, as Ctrl-C does."""
        await self._aclose()

    async def _aclose(self, drain_timeout_s: float | None = None) -> None:
        close = partial(self._close, drain_timeout_s)
        await awaited(close, "moonpool-aclose", self._models.end_at_once)

    def __enter__(self) -> Runtime:
        return self

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._aclose(_drain_after(kind))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(_drain_after(kind))

    def __repr__(self) -> str:
        if self._models.is_closed:
            return "<moonpool.Runtime, closed>"
        return f"<moonpool.Runtime with models {sorted(self._models.names())}>"


def _drain_after(kind: type[BaseException] | None) -> float | None:
    """Return the most seconds that requests have when `with` is left; None for as many as the runtime gives them.

    After an exception, the program goes on elsewhere. SystemExit is an orderly end, also of `exit_on_sigterm`.
    """
    return None if kind is None or issubclass(kind, SystemExit) else ABANDONED_S


def _check_files(files: Mapping[str, bytes]) -> None:
    for path, content in OF_LOAD.map("files", files, "a map of paths to bytes").items():
        if not isinstance(content, bytes | bytearray | memoryview):
            OF_LOAD.refuse(f"files[{path}]", "bytes", content)


def _go_on() -> None:
    """Take note of an interruption that cannot be obeyed."""


@atexit.register
def _close_all() -> None:
    # Whatever one of them raises, all are closed.
    with contextlib.ExitStack() as stack:
        for models in list(_open_registries):
            stack.callback(models.close)


def _close_at_the_end(models: ModelRegistry) -> None:
    """Have a registry closed when the program ends, unless it is closed before."""
    _open_registries.add(models)
    models.on_end = _open_registries.discard


def _read_output() -> None:
    for models in list(_open_registries):
        if not models.is_closed:
            models.stubs.read_output()


def _disown_all() -> None:
    """Forget all models in a fork: the stubs belong to the parent, and the threads that serve them are not here."""
    for models in list(_open_registries):
        models.disown()
    _open_registries.clear()


os.register_at_fork(after_in_child=_disown_all)


def _rules(
    sandbox: str | None, grants: Iterable[str], options: Mapping[str, Mapping[str, str | float]], limits: Iterable[str]
) -> HostingRules:
    usual = ConfigLimits(option='Runtime(config_limits=["{}"])')
    return HostingRules(
        check_level(sandbox),
        grants=_read("sandbox_grants", Grants, grants),
        grant_form=as_argument,
        cache_advice="make the runtime with Runtime(response_cache_bytes=BYTES)",
        options=OperatorOptions.by_model(options),
        limits=_read("config_limits", usual.raised, limits),
    )


def _read(name: str, read: Callable[[list[str]], T], texts: Iterable[str]) -> T:
    """Read an argument that is a list of texts. Raises ValueError, which names it."""
    checked = OF_RUNTIME.texts(name, texts)
    try:
        return read(checked)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _checked(backends: Iterable[Backend]) -> list[Backend]:
    wanted = "a list of moonpool.Backend objects"
    found = OF_RUNTIME.items("backends", backends, wanted)
    if not all(isinstance(each, Backend) for each in found):
        OF_RUNTIME.refuse("backends", wanted, found)
    return found


def _limiter(rate_limit: Iterable[str] | None) -> RateLimiter | None:
    return None if rate_limit is None else _read("rate_limit", limiter_of, rate_limit)


def _others(
    drain_timeout_s: float,
    verbose: bool,
    listener: Callable[[str, str, str], object] | None,
    metrics: MetricsOptions | None,
    resident: Resident | None,
) -> tuple[Any, ...]:
    """Check the arguments that the registry of models takes as they are, and return them."""
    OF_RUNTIME.seconds("drain_timeout_s", drain_timeout_s)
    OF_RUNTIME.boolean("verbose", verbose)
    OF_RUNTIME.one("listener", listener, Callable, "a function")  # type: ignore[arg-type]
    OF_RUNTIME.one("metrics", metrics, MetricsOptions, "MetricsOptions")
    OF_RUNTIME.one("resident", resident, Resident, "a moonpool.Resident")
    return drain_timeout_s, verbose, listener, metrics, resident


def _prepare_program() -> None:
    """Make this program fit to host models. Raises `MoonpoolError` if nothing can."""
    check_unpatched()
    fill_standard_descriptors()


def _paths(repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Sequence[str | os.PathLike[str]]:
    if isinstance(repository, str | os.PathLike):
        return [repository]
    given = OF_RUNTIME.items("repository", repository, "a path, or a list of paths")
    return [OF_RUNTIME.path("repository", each) for each in given]
