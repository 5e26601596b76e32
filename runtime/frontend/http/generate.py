"""Triton's generate extension: a flat JSON object goes in, and one comes out for each response."""

from __future__ import annotations

import asyncio
from math import prod
from typing import TYPE_CHECKING, Any

from starlette.responses import Response as Answer

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import CODES
from moonpool.runtime.details import check_finite, details_of, with_parameters
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.http.exchange import error_body
from moonpool.runtime.frontend.http.json_text import (
    NotJson,
    check_values,
    dumps,
    loads,
    member,
    repeated_key,
)
from moonpool.runtime.frontend.http.tracing import begin_trace
from moonpool.runtime.frontend.requests import make_request
from moonpool.runtime.frontend.tensors import of_values, to_values
from moonpool.runtime.model_control import version_of
from moonpool.runtime.public_text import public_text
from moonpool.runtime.stream import ResponseStream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.config_types import TensorConfig
    from moonpool.runtime.frontend.http.exchange import Exchange
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.tensors import Input
    from moonpool.runtime.frontend.trace import Trace
    from moonpool.runtime.request import InferenceRequest, Parameter, Response, Wire

_EVENTS = ((b"Content-Type", b"text/event-stream; charset=utf-8"),)
_MOST_UNSENT_BYTES = 64 << 20
_JSON = "application/json"
# Whatever the model's error is.
_FAILED = 400
_NOT_ONE = (
    b'{"error":"generate expects model to produce exactly 1 response, use generate stream for model '
    b'that generates various number of responses"}'
)


async def generate(
    service: Service, exchange: Exchange, name: str, version: str, body: bytes
) -> Answer:
    """The only response. Raises `MoonpoolError` where there is no request."""
    hosted: Hosted = service.models.find(name, version_of(version))
    request = _request(hosted, body, exchange.head.forwarded)
    trace = begin_trace(service, exchange, hosted, request) if service.traces.is_on else None
    text, status, count = b"", 200, 0
    with ResponseStream(hosted.scheduler, request, None) as stream:
        exchange.cancel = stream.close
        try:
            async for response in stream:
                count += 1
                if count > 1:
                    break
                text = _shown(hosted, response, exchange.limits.json_bytes)
        except MoonpoolError as error:
            text, status, count = error_body(public_text(error)), _FAILED, 1
    if trace is not None:
        trace.mark("INFER_RESPONSE_COMPLETE")
        trace.mark("HTTP_SEND_START")
    return Answer(text if count == 1 else _NOT_ONE, status, media_type=_JSON)


async def generate_stream(
    service: Service, exchange: Exchange, name: str, version: str, body: bytes
) -> Answer:
    """All responses as events, the first of which decides about the status. Raises as `generate`."""
    hosted: Hosted = service.models.find(name, version_of(version))
    request = _request(hosted, body, exchange.head.forwarded)
    trace = begin_trace(service, exchange, hosted, request) if service.traces.is_on else None
    return Events(hosted, ResponseStream(hosted.scheduler, request, None), exchange, trace)


class Events(Answer):
    """Server-sent events, one for each response of a model, as they come.

    What the client does not take waits here, and no longer with the model; a client that leaves too much
    waiting is left. When it goes, the request is cancelled.
    """

    def __init__(
        self, hosted: Hosted, stream: ResponseStream, exchange: Exchange, trace: Trace | None
    ) -> None:
        super().__init__()
        self._hosted = hosted
        self._stream = stream
        self._exchange = exchange
        self._trace = trace

    async def __call__(self, *_: object) -> None:
        """Past ASGI, which waits for the client with every piece."""
        exchange = self._exchange
        with self._stream as stream:
            exchange.cancel = stream.close
            while not exchange.is_gone:
                status = 200
                try:
                    response = await anext(stream)
                    event = _event(_shown(self._hosted, response, exchange.limits.json_bytes))
                except StopAsyncIteration:
                    break
                except MoonpoolError as error:
                    status, event = _FAILED, _event(error_body(public_text(error)))
                if self._trace is not None:
                    self._trace.mark("HTTP_SEND_START")
                if not exchange.status:
                    exchange.begin(status, _EVENTS)
                exchange.send(event)
                if exchange.unsent_bytes > _MOST_UNSENT_BYTES:
                    exchange.abort()
                # Where responses come faster than they can be sent, others want to be served, too.
                await asyncio.sleep(0)
        if not exchange.status:
            exchange.begin(200, _EVENTS)
        exchange.finish()


def _event(text: bytes) -> bytes:
    return b"data: %b\n\n" % text


def _request(hosted: Hosted, body: bytes, forwarded: Mapping[str, str]) -> InferenceRequest:
    root = loads(body)
    if not isinstance(root, dict):
        raise NotJson("attempt to get members for non-object")
    config = hosted.model.config
    tensors = {tensor.name: tensor for tensor in config.inputs}
    repeated = repeated_key(body)
    if repeated in tensors:
        raise InvalidRequest(f"input '{repeated}' already exists in request")
    if repeated is not None:
        raise InvalidRequest(f"the key '{repeated}' stands twice in one object of the request")
    try:
        request_id = member(root, "id", str) or ""
    except NotJson as error:
        raise NotJson(f"Unable to parse 'id': {error}") from None
    inputs: dict[str, Input] = {}
    parameters: dict[str, Parameter] = {}
    for key, value in root.items():
        if key in tensors:
            inputs[key] = _input(tensors[key], value, config.max_batch_size > 0)
        elif key == "parameters":
            if not isinstance(value, dict):
                raise NotJson(
                    "Expected JSON object for keyword: 'parameters': attempt to access JSON "
                    "non-object as object"
                )
            try:
                parameters |= {inner: _parameter(inner, each) for inner, each in value.items()}
            except InvalidRequest as error:
                raise InvalidRequest(f"Converting keyword: 'parameters': {error}") from None
        else:
            parameters[key] = _parameter(key, value)
    details = details_of(request_id, 0, 0, 0, 0, parameters)
    return make_request(hosted, inputs, None, with_parameters(details, forwarded))


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


def _shown(hosted: Hosted, response: Response, most_bytes: int) -> bytes:
    """One object: outputs of one element as values, others as arrays; names in order."""
    outputs: Mapping[str, Wire] = response.outputs  # type: ignore[assignment]
    shown: dict[str, Any] = {
        "model_name": hosted.model.name,
        "model_version": str(hosted.model.version),
    }
    if response.request_id:
        shown["id"] = response.request_id
    check_finite(response.parameters)
    shown |= response.parameters
    check_values(sum(output.raw.nbytes for output in outputs.values()), most_bytes)
    for name, output in outputs.items():
        values = to_values(name, output)
        shown[name] = values[0] if len(values) == 1 else values
    return dumps(dict(sorted(shown.items())))
