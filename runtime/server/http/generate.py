"""Triton's generate extension: a flat JSON object goes in, and one comes out for each response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import CODES
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.hosting.model_control import version_of
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.model.config.model import TensorConfig
from moonpool.runtime.model.details import check_finite, details_of, with_parameters
from moonpool.runtime.model.request import InferenceRequest, Parameter, Response, WireTensor
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.server.http.connection import HttpExchange, error_body
from moonpool.runtime.server.http.head import JSON, Body, Headers
from moonpool.runtime.server.http.inference import LOAD_FORM, begin_trace, with_load
from moonpool.runtime.server.http.json_pieces import is_long, values_of, write
from moonpool.runtime.server.http.json_text import NotJson, check_values, dumps, loads, member, repeated_key
from moonpool.runtime.server.http.routes import RouteReply, RouteRequest
from moonpool.runtime.server.inference.request import Hosted, make_request
from moonpool.runtime.server.inference.tensors import Input, LongArray, of_values
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.traces import Trace

_EVENTS: Headers = ((b"Content-Type", b"text/event-stream; charset=utf-8"),)
_MOST_UNSENT_BYTES = 64 << 20
# For every error of a model.
_FAILED = 400
_NOT_ONE = (
    b'{"error":"generate expects model to produce exactly 1 response, use generate stream for model '
    b'that generates various number of responses"}'
)


async def generate(service: Service, request: RouteRequest) -> RouteReply:
    """Return the only response of a model. Raises `MoonpoolError` for a bad request."""
    exchange = request.exchange
    hosted, trace, stream = await _begin(service, request)
    text, status, count = b"", 200, 0
    with stream:
        try:
            async for response in stream:
                count += 1
                if count > 1:
                    break
                text = await _shown(hosted, response, exchange)
        except MoonpoolError as error:
            text, status, count = error_body(public_text(error)), _FAILED, 1
    if trace is not None:
        trace.mark("INFER_RESPONSE_COMPLETE")
        trace.mark("HTTP_SEND_START")
    headers, form = JSON, exchange.head.headers.get(LOAD_FORM, b"").decode("latin-1")
    if form and status == 200:
        headers = with_load(service, headers, form)
    return RouteReply(status, headers, text if count == 1 else _NOT_ONE)


async def generate_stream(service: Service, request: RouteRequest) -> None:
    """Send each response of a model as a server-sent event, when it comes. Raises as `generate`.

    The first response decides about the status. Responses that the client does not read wait here and not in the model.
    If too many wait, the connection ends. If the client goes, the request is cancelled.
    """
    exchange = request.exchange
    hosted, trace, stream = await _begin(service, request)
    with stream:
        while not exchange.is_gone:
            status = 200
            try:
                response = await anext(stream)
                event = _event(await _shown(hosted, response, exchange))
            except StopAsyncIteration:
                break
            except MoonpoolError as error:
                exchange.has_failed = True
                status, event = _FAILED, _event(error_body(public_text(error)))
            if trace is not None:
                trace.mark("HTTP_SEND_START")
            if not exchange.status:
                exchange.begin(status, _EVENTS)
            exchange.send(event)
            if exchange.unsent_bytes > _MOST_UNSENT_BYTES:
                exchange.abort()
            # Responses may come faster than they can be sent: let other clients have their turn.
            await asyncio.sleep(0)
    if not exchange.status:
        exchange.begin(200, _EVENTS)
    exchange.finish()


async def _begin(service: Service, request: RouteRequest) -> tuple[Hosted, Trace | None, ResponseStream]:
    """Submit the request, which is cancelled if the client goes."""
    exchange = request.exchange
    exchange.received_ns = time.monotonic_ns()
    name, version = request.model
    hosted: Hosted = service.models.find(name, version_of(version))
    place = partial(service.placed, hosted.model)
    made = await request.read(partial(_request, hosted, exchange.head.forwarded, place))
    if service.capture is not None:
        service.capture.take(hosted.model, made)
    trace = begin_trace(service, exchange, hosted, made) if service.traces.is_on else None
    stream = ResponseStream(hosted.scheduler, made, None)
    exchange.cancel = stream.close
    return hosted, trace, stream


def _event(text: bytes) -> bytes:
    return b"data: %b\n\n" % text


def _request(
    hosted: Hosted, forwarded: Mapping[str, str], place: Callable[[Input], Input], body: Body
) -> InferenceRequest:
    """Make and check the request, on any thread. `place` puts tensors where stubs see them. Raises `MoonpoolError`."""
    root = loads(body)
    if not isinstance(root, dict):
        raise NotJson("attempt to get members for non-object")
    config = hosted.model.config
    tensors = {tensor.name: tensor for tensor in config.inputs}
    repeated = repeated_key(body)
    if repeated in tensors:
        raise InvalidRequest(f"input '{repeated}' already exists in request")
    if repeated is not None:
        raise InvalidRequest(f"the key '{repeated}' occurs twice in one object of the request")
    try:
        request_id = member(root, "id", str) or ""
    except NotJson as error:
        raise NotJson(f"Unable to parse 'id': {error}") from None
    members = _Members(tensors, config.max_batch_size > 0)
    members.read(root, nested="parameters")
    details = details_of(request_id, 0, 0, 0, 0, members.parameters)
    inputs = {name: place(values) for name, values in members.inputs.items()}
    return make_request(hosted, inputs, None, with_parameters(details, forwarded))


class _Members:
    """Inputs and parameters of one request.

    A member with the name of an input is that input, at the top and inside `"parameters"`, where the clients of vLLM
    and TensorRT-LLM put flags that their models declare as inputs. Every other member is a parameter.
    """

    def __init__(self, tensors: Mapping[str, TensorConfig], is_batch: bool) -> None:
        self.inputs: dict[str, Input] = {}
        self.parameters: dict[str, Parameter] = {}
        self._tensors = tensors
        self._is_batch = is_batch

    def read(self, members: Mapping[str, Any], *, nested: str = "") -> None:
        """Add the members of an object, and those of its member `nested`. Raises `InvalidRequest`, `NotJson`,
        `BadJson`.
        """
        for key, value in members.items():
            if key in self._tensors:
                if key in self.inputs:
                    raise InvalidRequest(f"input '{key}' already exists in request")
                self.inputs[key] = _input(self._tensors[key], value, self._is_batch)
            elif key == nested:
                self._read_nested(key, value)
            else:
                self.parameters[key] = _parameter(key, value)

    def _read_nested(self, key: str, value: object) -> None:
        if not isinstance(value, dict):
            raise NotJson(f"Expected JSON object for keyword: '{key}': attempt to access JSON non-object as object")
        try:
            self.read(value)
        except MoonpoolError as error:
            kind = InvalidRequest if isinstance(error, InvalidRequest) else NotJson
            raise kind(f"Converting keyword: '{key}': {error}") from None


def _parameter(key: str, value: object) -> Parameter:
    if type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]
    raise InvalidRequest(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _input(tensor: TensorConfig, value: Any, is_batch: bool) -> Input:
    """Make an input of a value or a flat array. The number of values decides about sizes that the configuration leaves
    open.
    """
    values = value if isinstance(value, list | LongArray) else [value]
    # Of arrays in it, each is one, however long it is.
    count = values.elements if isinstance(values, LongArray) else len(values)
    shape = list(tensor.dims)
    if shape.count(-1):
        # If several sizes are open, the last one gets all values.
        known = prod(dim for dim in shape if dim >= 0)
        last = len(shape) - 1 - shape[::-1].index(-1)
        shape = [1 if dim < 0 else dim for dim in shape]
        shape[last] = count // known if known else 0
    if prod(shape) != count:
        raise InvalidRequest(f"The schema can not convert input '{tensor.name}' to tensor with proper shape")
    if is_batch:
        shape.insert(0, 1)
    return of_values(tensor.name, CODES[tensor.datatype], shape, values)


async def _shown(hosted: Hosted, response: Response, exchange: HttpExchange) -> bytes:
    """Return one JSON object, its names sorted. Outputs of one element are values, others are arrays.

    It is empty if the client goes meanwhile. Raises `MoonpoolError` for outputs that cannot be sent as JSON.
    """
    outputs: Mapping[str, WireTensor] = response.outputs  # type: ignore[assignment]
    shown: dict[str, Any] = {"model_name": hosted.model.name, "model_version": str(hosted.model.version)}
    if response.request_id:
        shown["id"] = response.request_id
    check_finite(response.parameters)
    shown |= response.parameters
    most_bytes = exchange.limits.json_bytes
    check_values(sum(output.raw.nbytes for output in outputs.values()), most_bytes)
    for name, output in outputs.items():
        shown[name] = values_of(name, output, is_flat=True)
    document = dict(sorted(shown.items()))
    if is_long(document):
        return b"".join(await write(exchange, document, most_bytes))
    text = dumps(document)
    check_values(len(text), most_bytes)
    return text
