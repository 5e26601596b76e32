"""The endpoints of OpenAI's API: each reads a request, asks the model, and writes the answer.

Theory of operation. Everything runs in tasks of the server's loop, one for each request; long bodies are read on a
thread (`LongBodies`). A request becomes one request to the scheduler for each of its prompts, or for as many texts as
the model takes in a batch. Their responses are streams. If the client leaves, the streams close, and that cancels the
requests.

The first piece decides about the status: an error before it has a status of its own. An error after it ends the stream
with an event, and without `[DONE]`. Pieces that the client does not read wait here, up to a bound.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
import orjson
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import ModelError, ModelNotFound
from moonpool.runtime.hosting.model_control import version_of
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.details import details_of, with_parameters
from moonpool.runtime.model.request import Response, WireTensor
from moonpool.runtime.openai.answers import CHAT, COMPLETION, AnswerKind, TextAnswer
from moonpool.runtime.openai.conventions import endpoints_of
from moonpool.runtime.openai.endpoints import Inputs, ModelEndpoints, PieceEndpoint, PieceReader, TextEndpoint
from moonpool.runtime.openai.fields import BadField, check_chat, check_completion, check_embeddings, check_rerank
from moonpool.runtime.schedule.backlog import held_bytes
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.server.http.connection import HttpExchange
from moonpool.runtime.server.http.head import JSON, Body, Headers
from moonpool.runtime.server.http.inference import begin_trace
from moonpool.runtime.server.http.json_text import NotJson, check_values, dumps, loads
from moonpool.runtime.server.http.routes import Route, RouteReply, RouteRequest
from moonpool.runtime.server.inference.request import Hosted, make_request
from moonpool.runtime.server.openai.errors import NoSuchModel, reply_of
from moonpool.runtime.server.openai.meter import CountingReader
from moonpool.runtime.server.openai.models import OpenAIModels
from moonpool.runtime.server.service import Service

_log = RuntimeLog("moonpool")
_EVENTS: Headers = (
    (b"Content-Type", b"text/event-stream; charset=utf-8"),
    (b"Cache-Control", b"no-cache"),
    # For proxies, which would hold small pieces back.
    (b"X-Accel-Buffering", b"no"),
)
_DONE = b"data: [DONE]\n\n"
_MOST_UNSENT_BYTES = 64 << 20
# Events that are sent at once if they are there at once. More would hold the loop.
_MOST_EVENTS = 64
# A proxy may close a connection on which nothing comes for long. Clients skip a comment.
_SILENCE_S, _COMMENT = 15.0, b":\n\n"
_MOST_PROMPTS, _MOST_TEXTS = 128, 2048
# Of the fields beside the prompts, for all prompts of a request together.
_MOST_REPEATED_BYTES = 64 << 20
_MOST_ID_CHARACTERS = 128
Fields = Mapping[str, Any]


class OpenAIEndpoints:
    """All endpoints under `/v1`. For the loop's thread."""

    def __init__(self, service: Service, executor: Executor) -> None:
        """`executor` waits for models that are loaded."""
        self._service = service
        self._models = OpenAIModels(service, executor)

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        models = self._models
        return [
            Route("/v1/models", {"GET": _answered(models.list)}),
            Route("/v1/models/{model}", {"GET": _answered(models.show)}),
            Route("/v1/models/{model}/load", {"POST": _answered(models.load)}),
            Route("/v1/models/{model}/unload", {"POST": _answered(models.unload)}),
            Route("/v1/chat/completions", {"POST": _answered(self.chat)}),
            Route("/v1/completions", {"POST": _answered(self.complete)}),
            Route("/v1/embeddings", {"POST": _answered(self.embed)}),
            *(Route(path, {"POST": _answered(self.rerank)}) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        ]

    def port_routes(self) -> list[Route]:
        """Return what a port for this API alone has beside those."""
        return [Route("/health/ready", {"GET": _answered(self._models.ready)})]

    # Texts

    async def chat(self, request: RouteRequest) -> RouteReply | None:
        """Answer with the next message of a chat."""
        return await self._generate(request, CHAT, check_chat)

    async def complete(self, request: RouteRequest) -> RouteReply | None:
        """Go on with one or several texts."""
        return await self._generate(request, COMPLETION, check_completion)

    async def _generate(
        self, request: RouteRequest, kind: AnswerKind, check: Callable[[Fields], None]
    ) -> RouteReply | None:
        exchange = request.exchange
        fields, prompts = await request.read(partial(_read_prompts, check))
        hosted, endpoint = self._find_text(fields["model"], kind.endpoint)
        number = uuid4().hex
        answer = TextAnswer(kind, number, fields)
        with ExitStack() as closing:
            streams = [
                closing.enter_context(self._ask(request, hosted, endpoint.outputs, endpoint.inputs(each, body)))
                for each, body in prompts
            ]
            counts = self._service.metrics.openai.of(hosted.model.name)
            readers = [CountingReader(endpoint.reader(each), counts, exchange.received_ns) for each, _ in prompts]
            exchange.cancel = closing.close
            if fields.get("stream"):
                await _Stream(request, answer, readers).send(streams)
                return None
            size_bytes = 0
            for place, stream in enumerate(streams):
                async for response in stream:
                    size_bytes += _size_bytes(response)
                    check_values(size_bytes, exchange.limits.json_bytes)
                    answer.add(readers[place].piece(response), place)
                answer.end(place)
        return _reply(answer.whole())

    def _find(self, name: str) -> tuple[Hosted, ModelEndpoints]:
        """Return a model, whose name may have a version behind a colon. Raises `MoonpoolError`."""
        try:
            hosted: Hosted = self._service.models.find(name)
        except ModelNotFound:
            base, colon, version = name.rpartition(":")
            if not colon or not version.isdecimal():
                raise NoSuchModel(name) from None
            hosted = self._service.models.find(base, version_of(version))
        return hosted, endpoints_of(hosted.model)

    def _find_text(self, name: str, method: str) -> tuple[Hosted, TextEndpoint]:
        hosted, endpoints = self._find(name)
        endpoint = endpoints.text(name, method)
        if endpoint is None:
            raise NoSuchModel(name, why=_lacks(name, method))
        return hosted, endpoint

    def _ask(self, request: RouteRequest, hosted: Hosted, outputs: Sequence[str], inputs: Inputs) -> ResponseStream:
        """Submit a request. The caller closes its stream."""
        exchange = request.exchange
        details = with_parameters(details_of(request.id, 0, 0, 0, 0, {}), exchange.head.forwarded)
        made = make_request(hosted, inputs, outputs, details)
        service = self._service
        if service.capture is not None:
            service.capture.take(hosted.model, made)
        if service.traces.is_on:
            begin_trace(service, exchange, hosted, made)
        return ResponseStream(hosted.scheduler, made, None)

    # Numbers

    async def embed(self, request: RouteRequest) -> RouteReply:
        """Return a row of numbers for each text."""
        exchange = request.exchange
        fields = await request.read(_read_texts)
        hosted, endpoints = self._find(fields["model"])
        endpoint = endpoints.embedding
        if endpoint is None:
            raise NoSuchModel(fields["model"], why=_lacks(fields["model"], "embed"))
        made = endpoint.requests(_texts_in(fields, takes_tokens=endpoint.takes_tokens), fields)
        with ExitStack() as closing:
            streams = [
                closing.enter_context(self._ask(request, hosted, endpoint.outputs, inputs)) for inputs, _ in made
            ]
            exchange.cancel = closing.close
            found = [
                endpoint.rows(await _only(stream), count) for stream, (_, count) in zip(streams, made, strict=True)
            ]
        return RouteReply(200, JSON, _embeddings(fields, found))

    async def rerank(self, request: RouteRequest) -> RouteReply:
        """Return the documents with their scores, the best first."""
        exchange = request.exchange
        fields, body = await request.read(_read_ranking)
        hosted, endpoint = self._find_text(fields["model"], "rerank")
        if not isinstance(endpoint, PieceEndpoint):
            raise NoSuchModel(fields["model"], why=_lacks(fields["model"], "rerank"))
        inputs = endpoint.inputs(fields, body)
        with self._ask(request, hosted, endpoint.outputs, inputs) as stream:
            exchange.cancel = stream.close
            answer = endpoint.object(await _only(stream))
        return _reply(_ranking(fields, answer, hosted.model.name))


class _Stream:
    """An answer that is sent piece by piece."""

    def __init__(self, request: RouteRequest, answer: TextAnswer, readers: Sequence[PieceReader]) -> None:
        self._exchange = request.exchange
        self._headers = (*_EVENTS, *_id_header(request))
        self._answer = answer
        # What is the same in all chunks, before and behind the choice.
        self._before = b'data: %b,"choices":[' % dumps(answer.chunk_head)[:-1]
        self._behind = b'],"usage":null}\n\n' if answer.tells_usage else b"]}\n\n"
        self._readers = readers
        self._sent_s = 0.0
        self._timer: asyncio.TimerHandle

    async def send(self, streams: Sequence[ResponseStream]) -> None:
        """Send everything, as it comes. Raises an error before the first event; sends a later one."""
        exchange = self._exchange
        self._look_in(_SILENCE_S)
        try:
            if len(streams) == 1:
                await self._send(streams[0], 0)
            else:
                async with asyncio.TaskGroup() as group:
                    for place, stream in enumerate(streams):
                        group.create_task(self._send(stream, place))
            self._write(self._last())
        except BaseExceptionGroup as errors:
            self._fail(errors.exceptions[0])
        except MoonpoolError as error:
            self._fail(error)
        finally:
            self._timer.cancel()
        exchange.finish()

    async def _send(self, stream: ResponseStream, place: int) -> None:
        exchange = self._exchange
        events: list[bytes] = []
        try:
            async for response in stream:
                piece = self._readers[place].piece(response)
                events += map(self._event, self._answer.chunks(piece, place))
                if len(events) < _MOST_EVENTS and stream.has_next:
                    continue
                self._write(b"".join(events))
                events.clear()
                if exchange.unsent_bytes > _MOST_UNSENT_BYTES:
                    exchange.abort()
                # Pieces may come faster than they can be sent: let other clients have their turn.
                await asyncio.sleep(0)
            events += map(self._event, self._answer.end_chunks(place))
        finally:
            # What came before an error comes before it at the client, too.
            self._write(b"".join(events))

    def _event(self, choice: dict[str, Any]) -> bytes:
        return b"%b%b%b" % (self._before, _written(choice), self._behind)

    def _last(self) -> bytes:
        """Return the events behind those of all choices."""
        usage = self._answer.usage
        if not self._answer.tells_usage or usage is None:
            return _DONE
        return b'%b],"usage":%b}\n\n%b' % (self._before, dumps(usage), _DONE)

    def _write(self, events: bytes) -> None:
        exchange = self._exchange
        if not events:  # the status waits for the first event
            return
        if not exchange.status:
            exchange.begin(200, self._headers)
        exchange.send(events)
        self._sent_s = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        """Send an error as the last event, unless nothing was sent."""
        exchange = self._exchange
        if not exchange.status:
            raise error
        exchange.has_failed = True
        exchange.send(reply_of(error).event)

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _beat(self) -> None:
        """Send a comment if nothing was sent for long, once the headers are out."""
        left_s = self._sent_s + _SILENCE_S - time.monotonic()
        if left_s <= 0 and self._exchange.status:
            self._write(_COMMENT)
        self._look_in(left_s if left_s > 0 else _SILENCE_S)


def _answered(
    endpoint: Callable[[RouteRequest], Awaitable[RouteReply | None]],
) -> Callable[[RouteRequest], Awaitable[RouteReply | None]]:
    """Return an endpoint that tells errors as clients of this API read them, with the id of the request."""

    async def answer(request: RouteRequest) -> RouteReply | None:
        exchange = request.exchange
        exchange.received_ns = time.monotonic_ns()
        request.id = _id_of(exchange)
        try:
            made = await endpoint(request)
        except Exception as error:
            if exchange.status:
                raise
            if not isinstance(error, MoonpoolError):
                _log.exception("answering %r failed", exchange.head.target[:200])
            refusal = reply_of(error)
            made = RouteReply(refusal.status, refusal.headers, refusal.body)
        if made is None:
            return None
        return made._replace(headers=(*made.headers, *_id_header(request)))

    return answer


def _reply(value: object) -> RouteReply:
    return RouteReply(200, JSON, _written(value))


def _written(value: object) -> bytes:
    """Return what a model has answered as JSON. Raises `ModelError` for a text or a number that JSON has no form
    for.
    """
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise ModelError(f"the model's answer cannot be written as JSON: {error}") from None


def _body_of(fields: Fields) -> bytes:
    """Return the fields of a request as JSON. Raises `BadField`, as the lenient reader takes more than can be
    written.
    """
    try:
        return dumps(fields)
    except (TypeError, ValueError) as error:
        raise BadField(f"a value of the request cannot be written as JSON: {error}") from None


def _id_of(exchange: HttpExchange) -> str:
    """Return the id of a request: the client's, or one of ours."""
    given = exchange.head.headers.get(b"x-request-id", b"").decode("latin-1")
    if given and len(given) <= _MOST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return uuid4().hex


def _id_header(request: RouteRequest) -> Headers:
    return ((b"x-request-id", request.id.encode("ascii")),)


# Requests. These run on a thread if the body is long.


def _fields(body: Body) -> dict[str, Any]:
    try:
        root = loads(body)
    except NotJson as error:
        raise BadField(f"the body is no JSON: {error}") from None
    if not isinstance(root, dict):
        raise BadField("the body must be a JSON object")
    return root


def _read_prompts(check: Callable[[Fields], None], body: Body) -> tuple[Fields, list[tuple[Fields, bytes]]]:
    """Return the fields of a request, and fields and body for each of its prompts. Raises `BadField`."""
    fields = _fields(body)
    check(fields)
    prompt = fields.get("prompt")
    if type(prompt) is not list or type(prompt[0]) is int:
        return fields, [(fields, bytes(body))]
    if len(prompt) > _MOST_PROMPTS:
        raise BadField(f"at most {_MOST_PROMPTS} prompts go into a request", ("prompt",))
    # All prompts have the other fields, which are written once and must not become long by their number.
    others = _body_of({name: value for name, value in fields.items() if name != "prompt"})
    if len(others) * len(prompt) > _MOST_REPEATED_BYTES:
        text = f"the other fields of {len(prompt)} prompts have more than {_MOST_REPEATED_BYTES} bytes together"
        raise BadField(text, ("prompt",))
    return fields, [
        ({**fields, "prompt": each}, b'%b,"prompt":%b}' % (others[:-1], _body_of({"prompt": each})[10:-1]))
        for each in prompt
    ]


def _read_texts(body: Body) -> Fields:
    fields = _fields(body)
    check_embeddings(fields)
    return fields


def _texts_in(fields: Fields, *, takes_tokens: bool) -> list[Any]:
    """Return the texts to embed, or lists of tokens. Raises `BadField`."""
    given = fields["input"]
    texts = given if type(given) is list and type(given[0]) is not int else [given]
    if type(texts[0]) is not str and not takes_tokens:
        raise BadField(
            f"model '{fields['model']}' takes texts, and no ids of a tokenizer that it would have to share with the "
            "client; LangChain's OpenAIEmbeddings sends texts with check_embedding_ctx_length=False",
            ("input",),
        )
    if len(texts) > _MOST_TEXTS:
        raise BadField(f"at most {_MOST_TEXTS} texts go into a request", ("input",))
    return texts


def _read_ranking(body: Body) -> tuple[Fields, bytes]:
    fields = _fields(body)
    if "documents" not in fields and "texts" in fields:
        fields["documents"] = fields.pop("texts")
    check_rerank(fields)
    return fields, _body_of(fields)


# Answers


async def _only(stream: ResponseStream) -> Response:
    """Return the first response, of a model that gives one. Raises what the model answered instead."""
    async for response in stream:
        return response
    raise ModelError("the model gave no answer")


def _size_bytes(response: Response) -> int:
    """Return about the memory that a piece takes until the answer is whole."""
    return held_bytes(response) + sum(WireTensor.of(each).raw.nbytes for each in response.outputs.values())


def _lacks(name: str, method: str) -> str:
    return f"model '{name}' has no endpoint '{method}': see docs/OPENAI.md for what gives it one"


def _embeddings(fields: Fields, found: Sequence[tuple[NDArray[np.float32], int | None]]) -> bytes:
    sizes = {rows.shape[1] for rows, _ in found}
    if len(sizes) > 1:
        raise ModelError("the model gave embeddings of different sizes")
    rows = np.concatenate([each for each, _ in found])
    size = rows.shape[1]
    wanted = fields.get("dimensions")
    if wanted not in (None, size):
        raise BadField(f"embeddings of this model have {size} dimensions", ("dimensions",))
    if fields.get("encoding_format") == "base64":
        texts = [b'"%b"' % base64.b64encode(row) for row in rows.astype("<f4", copy=False)]
    elif np.isfinite(rows).all():
        texts = [dumps(row.tolist()) for row in rows]
    else:
        raise ModelError("the model gave a number that JSON has no form for")
    data = b",".join(
        [b'{"object":"embedding","index":%d,"embedding":%b}' % (index, text) for index, text in enumerate(texts)]
    )
    counts = [count for _, count in found if count is not None]
    usage = b""
    if len(counts) == len(found):
        tokens = sum(counts)
        usage = b',"usage":%b' % dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    return b'{"object":"list","model":%b,"data":[%b]%b}' % (dumps(fields["model"]), data, usage)


def _ranking(fields: Fields, answer: Mapping[str, Any], name: str) -> Fields:
    documents, scores = fields["documents"], answer.get("scores")
    if (
        type(scores) is not list
        or len(scores) != len(documents)
        or any(type(score) not in (int, float) for score in scores)
    ):
        raise ModelError(f"model '{name}' did not score each of the {len(documents)} documents")
    order = sorted(range(len(documents)), key=scores.__getitem__, reverse=True)
    results = [{"index": at, "relevance_score": scores[at]} for at in order[: fields.get("top_n")]]
    if fields.get("return_documents"):
        for each in results:
            document = documents[each["index"]]
            each["document"] = document if type(document) is dict else {"text": document}
    return {"id": f"rerank-{uuid4().hex}", "model": fields["model"], "results": results}
