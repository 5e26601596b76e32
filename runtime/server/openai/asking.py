"""Finds the models that requests of OpenAI's API name, and asks them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from moonpool.runtime.errors import ModelError, ModelNotFound
from moonpool.runtime.model.details import details_of, with_parameters
from moonpool.runtime.model.request import InferenceRequest, Response, WireTensor
from moonpool.runtime.openai.conventions import endpoints_of
from moonpool.runtime.openai.endpoints import Inputs, ModelEndpoints, TextEndpoint
from moonpool.runtime.schedule.backlog import held_bytes
from moonpool.runtime.schedule.callers import response_of
from moonpool.runtime.schedule.event_loop import wait_for_outcome
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.server.http.inference import begin_trace
from moonpool.runtime.server.http.routes import RouteRequest
from moonpool.runtime.server.inference.request import Hosted, make_request
from moonpool.runtime.server.openai.errors import NoSuchModel
from moonpool.runtime.server.openai.meter import CountingReader
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.traces import Trace

Fields = Mapping[str, Any]
# As many digits as any version may have.
_VERSION = re.compile("[0-9]{1,18}")
TURN = 64
"""Responses that are handled at once if they are there at once. More would hold the loop."""


class ModelAsker:
    """Asks the models of a service. For the loop's thread."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def find(self, name: str) -> tuple[Hosted, ModelEndpoints]:
        """Return a model, whose name may have a version behind a colon. Raises `MoonpoolError`."""
        try:
            hosted: Hosted = self._service.models.find(name)
        except ModelNotFound:
            base, _, version = name.rpartition(":")
            if _VERSION.fullmatch(version) is None or not base:
                raise NoSuchModel(name) from None
            hosted = self._service.models.find(base, int(version))
        return hosted, endpoints_of(hosted.model)

    def find_text(self, name: str, method: str) -> tuple[Hosted, TextEndpoint]:
        """Return a model and its endpoint for a method that answers with pieces. Raises `MoonpoolError`."""
        hosted, endpoints = self.find(name)
        endpoint = endpoints.text(name, method)
        if endpoint is None:
            raise NoSuchModel(name, why=lacks(name, method))
        return hosted, endpoint

    def ask(
        self, request: RouteRequest, hosted: Hosted, outputs: Sequence[str], inputs: Inputs, operation: str
    ) -> ResponseStream:
        """Submit a request. The caller closes its stream. `operation` names it in a trace."""
        return self._ask(request, hosted, outputs, inputs, operation)[0]

    def ask_for_pieces(
        self,
        closing: ExitStack,
        request: RouteRequest,
        hosted: Hosted,
        endpoint: TextEndpoint,
        inputs: Inputs,
        fields: Fields,
        operation: str,
    ) -> tuple[ResponseStream, CountingReader]:
        """Submit a request, and return its stream, which `closing` closes, with a reader of its pieces."""
        stream, trace = self._ask(request, hosted, endpoint.outputs, inputs, operation)
        closing.enter_context(stream)
        counts = self._service.metrics.openai.of(hosted.model.name)
        return stream, CountingReader(endpoint.reader(fields), counts, request.exchange.received_ns, trace)

    async def answer(
        self, request: RouteRequest, hosted: Hosted, outputs: Sequence[str], inputs: Inputs, operation: str
    ) -> Response:
        """Submit a request to a model that gives one response, and await that. Cancelling the task cancels the request.

        Raises what the model answered instead.
        """
        if hosted.model.config.decoupled:
            with self.ask(request, hosted, outputs, inputs, operation) as stream:
                return await _only(stream)
        made, _ = self._made(request, hosted, outputs, inputs, operation)
        return response_of(await wait_for_outcome(hosted.scheduler, made, None))

    def _ask(
        self, request: RouteRequest, hosted: Hosted, outputs: Sequence[str], inputs: Inputs, operation: str
    ) -> tuple[ResponseStream, Trace | None]:
        made, trace = self._made(request, hosted, outputs, inputs, operation)
        return ResponseStream(hosted.scheduler, made, None), trace

    def _made(
        self, request: RouteRequest, hosted: Hosted, outputs: Sequence[str], inputs: Inputs, operation: str
    ) -> tuple[InferenceRequest, Trace | None]:
        exchange, service, trace = request.exchange, self._service, None
        details = with_parameters(details_of(request.id, 0, 0, 0, 0, {}), exchange.head.forwarded)
        made = make_request(hosted, inputs, outputs, details)
        if service.capture is not None:
            service.capture.take(hosted.model, made)
        if service.traces.is_on:
            trace = begin_trace(service, exchange, hosted, made)
            if trace is not None:
                trace.attributes = {"gen_ai.operation.name": operation, "gen_ai.request.model": hosted.model.name}
        return made, trace


async def _only(stream: ResponseStream) -> Response:
    """Return the first response, of a model that gives one. Raises what the model answered instead."""
    async for response in stream:
        return response
    raise ModelError("the model gave no answer")


async def together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await the answers to several prompts at once. If one fails, cancels the others and raises its error."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


class AnswerAccount:
    """Counts the memory that an answer takes until it is whole. For the task that reads it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._count = 0

    async def take(self, response: Response, extra_bytes: int = 0) -> None:
        """Count a response. Now and then, let other clients have their turn. Raises `ModelError` for too much."""
        self._held_bytes += held_bytes(response) + extra_bytes
        self._held_bytes += sum(WireTensor.of(each).raw.nbytes for each in response.outputs.values())
        if self._held_bytes > self._most_bytes:
            raise ModelError(f"the model's answer takes more than {self._most_bytes} bytes; a stream may be longer")
        self._count += 1
        if self._count % TURN == 0:
            await asyncio.sleep(0)


def lacks(name: str, method: str) -> str:
    """Say that a model has no such endpoint."""
    return f"model '{name}' has no endpoint '{method}': see docs/OPENAI.md for what gives it one"
