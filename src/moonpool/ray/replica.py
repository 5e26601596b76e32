"""One replica of a deployment: a `Runtime` with its models, in an actor of Ray.

Theory of operation. Ray calls the methods in one event loop, `__init__` and `reconfigure` before all others. Loads
block, so they run on threads. Requests are submitted and answered in the loop, which waits for the stubs' sockets
itself. `_changing` is held while models load or change, so that they do so one after another. A replica that ends has
answered all its requests by the time that Ray calls `__del__`. If its process is killed, its stubs see the end of their
sockets and end, too.

Answers are values: arrays, or a `Failure`. An exception would be pickled, and lose its code.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ray import serve
from ray.serve import metrics

from moonpool import errors
from moonpool.ipc.errors import Closed, MoonpoolError
from moonpool.ray.autoscaling import LoadSampler
from moonpool.ray.local_server import HttpReply, HttpRequest, LocalServer, RpcReply, service_of
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.observe.exposition import ExposedFamily
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.server.grpc.call import Metadata

# Model, inputs, version, timeout in seconds and options of a request. One object, as Ray serializes each argument
# apart.
Asked = tuple[str, Mapping[str, Any], int | None, float | None, Mapping[str, Any]]
_log = logging.getLogger("moonpool")
_EXPORT_S = 5.0
# Quantiles and buckets have many lines each, and Ray keeps all of them for every replica.
_SIMPLE = ("counter", "gauge")


class Failure(NamedTuple):
    """An error on its way to another process."""

    kind: str
    text: str
    code: str
    public_text: str | None
    retry_after_s: float | None

    @classmethod
    def of(cls, error: MoonpoolError) -> Failure:
        """Make one of an error."""
        return cls(type(error).__name__, str(error), error.code, error.public_message, error.retry_after_s)

    def error(self) -> MoonpoolError:
        """Return the error, of the class that it had, or a `ModelError` if this program does not know the class."""
        kind = getattr(errors, self.kind, ModelError)
        error: MoonpoolError = kind.__new__(kind, self.text)
        error.code, error.public_message = self.code, self.public_text
        error.retry_after_s = self.retry_after_s
        return error


class ModelAnswer(NamedTuple):
    """A response on its way to another process."""

    outputs: dict[str, Any]
    parameters: dict[str, Any]
    request_id: str


class Replica:
    """Hosts the models of a deployment: the same ones from the start on, or, packed, those that were asked for last."""

    def __init__(
        self,
        repository: Any,
        names: Sequence[str],
        runtime_options: Mapping[str, Any],
        *,
        target_wait_ms: float,
        models_per_replica: int | None = None,
        revision: str = "",  # noqa: ARG002 - another one makes Ray replace the replica
    ) -> None:
        """Load nothing yet. `names` are the models, which `reconfigure` loads; packed, they are those that may be asked
        for.
        """
        self._runtime = Runtime(repository, models=[], **runtime_options)
        self._service = service_of(self._runtime)
        self._names = list(names)
        self._settings: Mapping[str, Any] = {}
        self._changing = asyncio.Lock()
        self._sampler = LoadSampler(target_wait_ms)
        self._export = _MetricsExport(self._runtime._models.metric_families)
        self._packed: Any = None
        if models_per_replica is not None:
            self._packed = _packed(self, models_per_replica)

    async def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Load the models, or change them while they serve. Called by Ray, at the start and for other settings."""
        self._export.start()
        async with self._changing:
            self._settings = settings
            if settings["log"]:
                self._runtime.log_settings(**settings["log"])
            for name in self._names:
                if self._packed is None or name in self._runtime.models():
                    try:
                        await self._load(name)
                    except MoonpoolError as error:
                        # An error of moonpool's may not survive the way to Ray's controller.
                        why = f"model '{name}' cannot be loaded: {error}"
                        raise RuntimeError(why) from None

    async def _load(self, name: str) -> None:
        chosen = self._settings["models"].get(name) or {}
        await asyncio.to_thread(self._runtime.load, name, **chosen)

    async def _have(self, name: str) -> None:
        """Load a model that is not there, if the replica is packed. Raises `MoonpoolError` if it cannot be loaded."""
        if self._packed is not None and name in self._names:
            await self._packed(name)

    async def load_packed(self, name: str) -> None:
        async with self._changing:
            await self._load(name)

    def unload_packed(self, name: str) -> None:
        """Unload a model of a packed replica when its requests have ended. Blocks."""
        self._runtime.unload(name)

    # Requests

    async def infer(
        self,
        asked: Asked,
        *,
        sequence: str = "",  # noqa: ARG002 - for the router
    ) -> ModelAnswer | Failure:
        name, inputs, version, timeout_s, options = asked
        try:
            await self._have(name)
            response = await self._runtime.arequest(name, inputs, version=version, timeout_s=timeout_s, **options)
        except MoonpoolError as error:
            return Failure.of(error)
        return ModelAnswer(response.outputs, dict(response.parameters), response.request_id)

    async def stream(
        self,
        asked: Asked,
        *,
        sequence: str = "",  # noqa: ARG002 - for the router
    ) -> AsyncIterator[ModelAnswer | Failure]:
        """Answer one request with each of its responses."""
        name, inputs, version, timeout_s, options = asked
        try:
            await self._have(name)
            stream = self._runtime.stream(name, inputs, version=version, timeout_s=timeout_s, **options)
        except MoonpoolError as error:
            yield Failure.of(error)
            return
        with stream:
            while True:
                try:
                    response = await anext(stream)
                except StopAsyncIteration:
                    return
                except MoonpoolError as error:
                    yield Failure.of(error)
                else:
                    yield ModelAnswer(response.outputs, dict(response.parameters), response.request_id)

    async def http(
        self,
        name: str,
        request: HttpRequest,
        *,
        sequence: str = "",  # noqa: ARG002 - for the router
    ) -> HttpReply | Failure:
        """Answer an HTTP request about a model."""
        try:
            await self._have(name)
            return await self._server.http(request)
        except MoonpoolError as error:
            return Failure.of(error)

    async def http_stream(self, name: str, request: HttpRequest) -> AsyncIterator[HttpReply | bytes | Failure]:
        """Answer an HTTP request whose response comes in pieces."""
        try:
            await self._have(name)
            async for piece in self._server.http_stream(request):
                yield piece
        except MoonpoolError as error:
            yield Failure.of(error)

    async def rpc(
        self,
        name: str,
        path: bytes,
        metadata: Metadata,
        message: bytes,
        *,
        sequence: str = "",  # noqa: ARG002 - for the router
    ) -> RpcReply | Failure:
        """Answer an RPC about a model."""
        try:
            await self._have(name)
        except MoonpoolError as error:
            return Failure.of(error)
        return await self._server.rpc(path, metadata, message)

    async def rpc_stream(
        self,
        name: str,
        path: bytes,
        metadata: Metadata,
        message: bytes,
        *,
        sequence: str = "",  # noqa: ARG002 - for the router
    ) -> AsyncIterator[RpcReply | Failure]:
        """Answer one request of ModelStreamInfer, with its status last."""
        try:
            await self._have(name)
        except MoonpoolError as error:
            yield Failure.of(error)
            return
        async for reply in self._server.rpc_stream(path, metadata, message):
            yield reply

    async def index(self) -> list[dict[str, str]]:
        """List the versions of the models with their states, as Triton's index does."""
        entries = await asyncio.to_thread(self._service.repository.index)
        return [each for each in entries if each["name"] in self._names and "state" in each]

    async def statistics(self) -> list[dict[str, Any]]:
        """Return the statistics of all models here."""
        found: list[dict[str, Any]] = self._service.metadata.statistics()["model_stats"]
        return found

    async def processes(self) -> dict[str, list[int]]:
        """Return the processes of each model here, for people who look for them."""
        return {
            name: [each["pid"] for each in self._runtime.instances(name) if each["pid"]]
            for name in self._runtime.models()
        }

    async def process(self) -> int:
        return os.getpid()

    @cached_property
    def _server(self) -> LocalServer:
        return LocalServer(self._service)

    # Called by Ray

    async def check_health(self) -> None:
        """Raise `RuntimeError` if models have given up, so that Ray replaces the replica.

        A stub that is being restarted is no reason: it is back in a fraction of a second, and a new replica would take
        seconds. A packed replica is replaced only if all its models have given up.
        """
        statuses = self._runtime._models.statuses()
        versions = [
            (name, version)
            for name, status in statuses.items()
            for version in status.versions
            if not version.is_unloaded
        ]
        failed = [
            f"model '{name}' version {version.version}: {version.reason}"
            for name, version in versions
            if version.state is ModelState.UNAVAILABLE
        ]
        if failed and (self._packed is None or len(failed) == len(versions)):
            raise RuntimeError("; ".join(failed))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for `queue_policy`."""
        return self._sampler.sample(self._runtime._models.served())

    def __del__(self) -> None:
        """Unload everything. Ray calls this after the last request."""
        # Neither is there if `__init__` failed.
        server, runtime = (vars(self).get(name) for name in ("_server", "_runtime"))
        if server is not None:
            server.close()
        if runtime is not None:
            self._export.stop()
            runtime.close()


class _PackedModel:
    """A model that Ray counts among those of a replica. Ray calls `__del__` when it chooses to drop it."""

    def __init__(self, replica: Replica, name: str) -> None:
        self._replica, self._name = replica, name

    def __del__(self) -> None:
        replica, self.__dict__["_replica"] = self.__dict__.get("_replica"), None
        if replica is not None:
            replica.unload_packed(self._name)


def _packed(replica: Replica, most: int) -> Any:
    """Return what makes a replica have a model, and unloads the one that was used the longest ago if there are more
    than `most`.
    """

    async def load(name: str) -> _PackedModel:
        await replica.load_packed(name)
        return _PackedModel(replica, name)

    return serve.multiplexed(load, max_num_models_per_replica=most)


class _MetricsExport:
    """Gives the metrics of moonpool to Ray, which adds application, deployment and replica to their labels. For the
    thread of the event loop.

    Ray's counters can only be added to, so what moonpool counts is a gauge there, too. `rate` works on it.
    """

    def __init__(self, families: Callable[[], Iterable[ExposedFamily]]) -> None:
        """`families` returns them as they are now."""
        self._families = families
        self._gauges: dict[str, tuple[metrics.Gauge, set[str]]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                self.export()
            except Closed:
                return
            except Exception:
                _log.exception("the metrics could not be given to Ray")
            await asyncio.sleep(_EXPORT_S)

    def export(self) -> None:
        """Set all gauges to the present values."""
        for family in self._families():
            for sample in family.samples if family.type in _SIMPLE else ():
                name, labels = family.name + sample.suffix, dict(sample.labels)
                if name not in self._gauges:
                    keys = {key for each in family.samples for key, _ in each.labels}
                    gauge = metrics.Gauge(name, family.description, tag_keys=tuple(sorted(keys)))
                    # Ray wants all labels in each sample.
                    gauge.set_default_tags(dict.fromkeys(keys, ""))
                    self._gauges[name] = gauge, keys
                gauge, keys = self._gauges[name]
                gauge.set(sample.value, tags={k: v for k, v in labels.items() if k in keys})
