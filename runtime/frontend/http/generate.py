"""Triton's generate extension: a flat JSON object goes in, and one comes out for each response."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import CODES
from moonpool.runtime.details import details_of
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.http.exchange import error_body
from moonpool.runtime.frontend.http.json_text import NotJson, dumps, loads, member
from moonpool.runtime.frontend.requests import make_request
from moonpool.runtime.frontend.statuses import http_status
from moonpool.runtime.frontend.tensors import of_values, to_values
from moonpool.runtime.model_control import version_of
from moonpool.runtime.stream import ResponseStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from moonpool.runtime.config_types import TensorConfig
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.tensors import Input
    from moonpool.runtime.request import InferenceRequest, Parameter, Response, Wire

_EVENTS = "text/event-stream; charset=utf-8"
_JSON = "application/json"
_NOT_ONE = (
    b'{"error":"generate expects model to produce exactly 1 response, use generate stream for model '
    b'that generates various number of responses"}'
)


async def generate(service: Service, name: str, version: str, body: bytes) -> HttpResponse:
    """The only response. Raises `MoonpoolError` where there is no request."""
    hosted: Hosted = service.models.find(name, version_of(version))
    request = _request(hosted, body)
    text, status, count = b"", 200, 0
    with ResponseStream(hosted.scheduler, request, None) as stream:
        try:
            async for response in stream:
                count += 1
                if count > 1:
                    break
                text = _shown(hosted, response)
        except MoonpoolError as error:
            text, status, count = error_body(str(error)), http_status(error), 1
    return HttpResponse(text if count == 1 else _NOT_ONE, status, media_type=_JSON)


async def generate_stream(service: Service, name: str, version: str, body: bytes) -> HttpResponse:
    """All responses as events, the first of which decides about the status. Raises as `generate`."""
    hosted: Hosted = service.models.find(name, version_of(version))
    stream = ResponseStream(hosted.scheduler, _request(hosted, body), None)
    status, first = 200, b""
    try:
        first = _event(_shown(hosted, await anext(stream)))
    except StopAsyncIteration:
        stream.close()
    except MoonpoolError as error:
        status, first = http_status(error), _event(error_body(str(error)))
    except BaseException:
        stream.close()
        raise
    return StreamingResponse(_events(hosted, stream, first), status, media_type=_EVENTS)


async def _events(hosted: Hosted, stream: ResponseStream, first: bytes) -> AsyncIterator[bytes]:
    """Ends early, and cancels the request, when the client goes."""
    with stream:
        if first:
            yield first
        while True:
            try:
                response = await anext(stream)
            except StopAsyncIteration:
                return
            except MoonpoolError as error:
                yield _event(error_body(str(error)))
            else:
                try:
                    event = _event(_shown(hosted, response))
                except MoonpoolError as error:
                    event = _event(error_body(str(error)))
                yield event


def _event(text: bytes) -> bytes:
    return b"data: %b\n\n" % text


def _request(hosted: Hosted, body: bytes) -> InferenceRequest:
    root = loads(body)
    if not isinstance(root, dict):
        raise NotJson("attempt to get members for non-object")
    try:
        request_id = member(root, "id", str) or ""
    except NotJson as error:
        raise NotJson(f"Unable to parse 'id': {error}") from None
    config = hosted.model.config
    tensors = {tensor.name: tensor for tensor in config.inputs}
    inputs: dict[str, Input] = {}
    parameters: dict[str, Parameter] = {}
    for key, value in root.items():
        if key in tensors:
            inputs[key] = _input(tensors[key], value, config.max_batch_size > 0)
        elif key == "parameters" and isinstance(value, dict):
            for inner, parameter in value.items():
                parameters[inner] = _parameter(inner, parameter)
        else:
            parameters[key] = _parameter(key, value)
    details = details_of(request_id, 0, 0, 0, 0, parameters)
    return make_request(hosted, inputs, None, details)


def _parameter(key: str, value: object) -> Parameter:
    if type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]
    raise InvalidRequest(
        f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


def _input(tensor: TensorConfig, value: Any, is_batch: bool) -> Input:
    """A value, or a flat array, as an input; what the configuration leaves open follows from the number of values."""
    values = value if isinstance(value, list) else [value]
    shape = list(tensor.dims)
    if shape.count(-1):
        # Of several sizes that are open the last takes all.
        known = prod(dim for dim in shape if dim >= 0)
        last = len(shape) - 1 - shape[::-1].index(-1)
        shape = [1 if dim < 0 else dim for dim in shape]
        shape[last] = len(values) // known if known else 0
    if prod(shape) != len(values):
        raise InvalidRequest(
            f"The schema can not convert input '{tensor.name}' to tensor with proper shape"
        )
    if is_batch:
        shape.insert(0, 1)
    try:
        return of_values(tensor.name, CODES[tensor.datatype], shape, values)
    except NotJson as error:
        raise NotJson(str(error)) from None


def _shown(hosted: Hosted, response: Response) -> bytes:
    """One object: outputs of one element as values, others as arrays; names in order."""
    outputs: Mapping[str, Wire] = response.outputs  # type: ignore[assignment]
    shown: dict[str, Any] = {
        "model_name": hosted.model.name,
        "model_version": str(hosted.model.version),
    }
    if response.request_id:
        shown["id"] = response.request_id
    shown |= response.parameters
    for name, output in outputs.items():
        values = to_values(name, output)
        shown[name] = values[0] if len(values) == 1 else values
    return dumps(dict(sorted(shown.items())))
