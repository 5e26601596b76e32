"""The host of a model in the process of a test: it answers from models that the test provides, and records every
call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import is_contained
from moonpool.ipc.tensors import BF16, code_of
from moonpool.runtime.errors import InvalidRequest, ModelError, ModelNotFound, QueueTimeout
from moonpool.runtime.hosting.model_control import version_of, wanted_of
from moonpool.runtime.model.backend import Model as Description
from moonpool.runtime.model.config.source import ConfigError
from moonpool.runtime.observe.metrics import BadMetric
from moonpool.runtime.process.files import RepositoryError
from moonpool.stub.pb_utils.errors import ErrorCode, TritonError, TritonModelException
from moonpool.stub.pb_utils.host import ONLY_IN_EXECUTE, Host
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import Answer, InferenceResponse, ResponseIterator
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.report import describe
from moonpool.testing.metrics import Metrics
from moonpool.testing.model import LoadedModel
from moonpool.testing.outputs import copied
from moonpool.testing.request import Request
from moonpool.testing.response import Response

Target = Callable[..., object] | LoadedModel


class Load(NamedTuple):
    """One call of `load_model`."""

    model: str
    config: str
    files: dict[str, bytes]


class RecordingHost(Host):
    """Answers from what the test has provided under the names of other models.

    A function gets the inputs by name, and returns its outputs by name or an `InferenceResponse`. A generator function
    is a decoupled model. An exception becomes an error response. All models are loaded and ready until the model
    unloads them.
    """

    def __init__(self, targets: Mapping[str, Target], names: Iterable[str], metrics: Metrics) -> None:
        """Take `targets`, which may be filled later, and the `names` of all models that it will have."""
        self._targets = targets
        self.metrics = metrics
        # The model that asks, and the name of its instance.
        self.asker: Description
        self.instance = ""
        # False while the model initializes and finalizes, when it may not send requests.
        self.is_serving = False
        # The names of the models that are loaded.
        self.ready = set(names)
        # The model's calls, in order.
        self.requests: list[InferenceRequest] = []
        self.loads: list[Load] = []
        self.unloads: list[str] = []

    # Requests to other models

    def infer(self, request: InferenceRequest, decoupled: bool) -> Answer:
        self._record(request)
        asked = _as_request(request)
        if decoupled:
            return self._iterator(request, asked, self._begun(request, asked))
        try:
            return next(_as_responses(self._called(request, asked), request))
        except Exception as error:
            return _failed(request, error)

    async def _ainfer(self, request: InferenceRequest) -> Answer:
        try:
            returned = self._called(request, _as_request(request))
            if inspect.isawaitable(returned):
                returned = await returned
            return next(_as_responses(returned, request))
        except Exception as error:
            return _failed(request, error)

    async def _astream(self, request: InferenceRequest) -> Answer:
        asked = _as_request(request)
        returned = self._begun(request, asked)
        if inspect.isawaitable(returned):
            try:
                returned = await returned
            except Exception as error:
                returned = _failed(request, error)
        iterator = self._iterator(request, asked, returned)
        # As in a stub, the event loop goes on until the first response is there.
        return await asyncio.get_running_loop().run_in_executor(None, iterator._wait)

    def ainfer(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Answer]:
        """Await a coroutine function; run any other function at once."""
        self._record(request)
        return self._astream(request) if decoupled else self._ainfer(request)

    def _record(self, request: InferenceRequest) -> None:
        if not self.is_serving:
            raise TritonModelException(ONLY_IN_EXECUTE)
        self.requests.append(request)

    def _begun(self, request: InferenceRequest, asked: Request) -> object:
        """Call the target like `_called`, but turn an error into a response."""
        try:
            return self._called(request, asked, decoupled=True)
        except Exception as error:
            return _failed(request, error)

    def _iterator(self, request: InferenceRequest, asked: Request, returned: object) -> ResponseIterator:
        responses = _each(request, returned)
        target = self._targets.get(request._model_name)

        def cancel() -> None:
            if isinstance(target, LoadedModel):
                target._tell_cancelled(asked)

        def abandon() -> None:
            responses.close()
            asked.cancel()

        return ResponseIterator.over(lambda seen: seen.extend(islice(responses, 1)), cancel, abandon)

    def _called(self, request: InferenceRequest, asked: Request, *, decoupled: bool = False) -> object:
        """Call the target: return what a function returns, or the responses of a model."""
        name, version = request._model_name, request._model_version
        target = self._targets.get(name)
        if target is None or not self._is_loaded(name, None if version == -1 else version):
            raise ModelNotFound(self._not_found(name, version))
        if not decoupled and _is_decoupled(target):
            raise ModelError(
                f"Model {name} is using the decoupled. The current BLS request call doesn't support "
                "models using the decoupled transaction policy. Please use 'decoupled=True' argument "
                "to the 'exec' or 'async_exec' calls for decoupled models.'",
                "UNSUPPORTED",
            )
        if isinstance(target, LoadedModel):
            return target._send(asked)
        try:
            return target(**asked.inputs)
        except Exception as error:
            return _raised(request, error)

    def _is_loaded(self, name: str, version: int | None) -> bool:
        target = self._targets.get(name)
        served = target.version if isinstance(target, LoadedModel) else 1
        return name in self.ready and version in (None, served)

    def _not_found(self, name: str, version: int) -> str:
        """Return a runtime's text for a model that nobody provides, that was unloaded, or that has no such version."""
        what = "is not found" if name not in self._targets else "has no available versions"
        if name in self.ready and name in self._targets:
            what = f"version {version} is not found"
        return f"Request for unknown model: '{name}' {what}"

    # Model control

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """Raises `TritonModelException`, also for a model that the test has not provided."""
        self.loads.append(Load(name, config, dict(files or {})))
        try:
            wanted_of(name, config, files, self.asker.options)
            if name not in self._targets:
                raise RepositoryError(f"name '{name}' in the `models` of the test")
        except (ConfigError, RepositoryError) as error:
            why = f"failed to load '{name}', failed to poll from model repository: {error}"
            raise TritonModelException(f"Failed to load model: {self.failure(why)}") from None
        self.ready.add(name)

    def unload_model(self, name: str, unload_dependents: bool) -> None:  # noqa: ARG002
        self.unloads.append(name)
        self.ready.discard(name)

    def is_model_ready(self, name: str, version: str) -> bool:
        """A function is version 1, and ready as soon as it is loaded."""
        try:
            is_loaded = self._is_loaded(name, version_of(version))
        except InvalidRequest as error:
            raise TritonModelException(f"Failed to check model readiness: {self.failure(str(error))}") from None
        target = self._targets.get(name)
        return is_loaded and not (isinstance(target, LoadedModel) and target.why_not_ready())

    # Metrics

    def new_metric(
        self, name: str, description: str, kind: int, labels: Mapping[str, str] | None, buckets: Sequence[float] | None
    ) -> int:
        contained = is_contained(self.asker.options.sandbox)
        try:
            return self.metrics.new(name, description, kind, labels, buckets, is_contained=contained)
        except BadMetric as error:
            raise TritonModelException(self.failure(str(error))) from None

    def failure(self, why: str) -> str:
        return f"Failed to process the request for model '{self.instance}', message: {why}"

    def change_metric(self, metric: int, operation: int, value: float) -> None:
        self.metrics.change(metric, operation, value)

    def metric_value(self, metric: int) -> float:
        return self.metrics.value(metric)

    def drop_metric(self, metric: int) -> None:
        self.metrics.drop(metric)


def _is_decoupled(target: Target) -> bool:
    if isinstance(target, LoadedModel):
        return target.config.decoupled
    return inspect.isgeneratorfunction(target)


def _as_request(request: InferenceRequest) -> Request:
    return Request(
        {tensor._name: copied(tensor) for tensor in request._inputs},
        outputs=list(request._requested_output_names) or None,
        request_id=request._details.request_id,
        correlation_id=request._details.correlation_id,
        flags=request._details.flags,
        timeout_us=request._details.timeout_us,
        parameters=request._details.parameters,
        trace_context=request._trace.get_context(),
    )


def _each(request: InferenceRequest, returned: object) -> Generator[InferenceResponse, None, None]:
    try:
        ends_alone = yield from _as_responses(returned, request)
        if ends_alone:
            # The flag that there are no more came without a response.
            yield InferenceResponse([])
    except Exception as error:
        yield _failed(request, error)


def _as_responses(returned: object, request: InferenceRequest) -> Generator[InferenceResponse, None, bool]:
    """Yield what a function returned, or the responses of a model; return True if the end came apart from the last
    one.
    """
    if not isinstance(returned, Iterator):
        yield _as_response(returned, request)
        return False
    while True:
        try:
            each = next(returned)
        except StopIteration as end:
            return end.value is not False
        except MoonpoolError:
            raise
        except Exception as error:  # of a generator that the test wrote
            yield _raised(request, error)
            return False
        yield _as_response(each, request)


def _as_response(returned: Any, request: InferenceRequest) -> InferenceResponse:
    if isinstance(returned, InferenceResponse):
        return returned
    if not isinstance(returned, Mapping):
        response: Response = returned
        if response.error is not None:
            return InferenceResponse(error=response.error)
        tensors = [_tensor(name, array) for name, array in response.outputs.items()]
        return InferenceResponse(tensors, parameters=response.parameters or None)
    for name in request._requested_output_names:
        if name not in returned:
            raise InvalidRequest(f"unexpected inference output '{name}' for model '{request._model_name}'")
    wanted = request._requested_output_names or list(returned)
    return InferenceResponse([_tensor(name, returned[name]) for name in wanted])


def _tensor(name: str, value: object) -> Tensor:
    array = np.asarray(value)
    if code_of(array.dtype, name) == BF16:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return Tensor.from_wire(name, BF16, array.shape, raw)
    return Tensor(name, array)


def _raised(request: InferenceRequest, error: Exception) -> InferenceResponse:
    """Make the error response of a model that raised, since the function stands for a model."""
    model = request._model_name
    text = f"Failed to process the request(s) for model '{model}_0', message: {describe(error)}"
    return InferenceResponse(error=TritonError(text))


def _failed(request: InferenceRequest, error: Exception) -> InferenceResponse:
    """Make the error response for a request that its model could not get, or did not answer in time."""
    code = error.code if isinstance(error, MoonpoolError) else "INTERNAL"
    text = f"Model {request._model_name} - Error when running inference: {error}"
    if isinstance(error, QueueTimeout):  # an error of the queue, not of running the model
        text = str(error)
    return InferenceResponse(error=TritonError(text, ErrorCode[code]))
