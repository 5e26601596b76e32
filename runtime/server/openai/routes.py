"""The endpoints of OpenAI's API: each reads a request, asks the model, and writes the answer.

Theory of operation. Everything runs in tasks of the server's loop, one for each request; long bodies are read on a
thread (`LongBodies`). A request becomes one request to the scheduler for each of its prompts, or for as many texts as
the model takes in a batch. Their responses are streams. If the client leaves, the streams close, and that cancels the
requests.
"""

from __future__ import annotations

import asyncio
from binascii import b2a_base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from math import inf
from secrets import token_hex
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from moonpool.runtime.errors import ModelError
from moonpool.runtime.openai.answers import CHAT, COMPLETION, AnswerKind, TextAnswer
from moonpool.runtime.openai.endpoints import Inputs, PieceEndpoint
from moonpool.runtime.openai.fields import BadField, check_chat, check_completion, check_embeddings, check_rerank
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.server.http.head import JSON, Body
from moonpool.runtime.server.http.json_text import NotJson, TooMuchJson, dumps, loads
from moonpool.runtime.server.http.routes import Route, RouteReply, RouteRequest
from moonpool.runtime.server.openai.asking import AnswerAccount, ModelAsker, lacks, together
from moonpool.runtime.server.openai.errors import NoSuchModel
from moonpool.runtime.server.openai.events import ChunkWriter, EventStream, answered, json_reply
from moonpool.runtime.server.openai.meter import CountingReader
from moonpool.runtime.server.openai.models import OpenAIModels
from moonpool.runtime.server.openai.transcripts import Transcriptions
from moonpool.runtime.server.service import Service

_OF_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_MOST_PROMPTS, _MOST_TEXTS, _MOST_DOCUMENTS = 128, 2048, 10_000
_MOST_DIMENSIONS = 1 << 18
# Numbers that are written before other clients have their turn: about 3 ms.
_TURN_VALUES = 1 << 15
# Of the fields beside the prompts, for all prompts of a request together.
_MOST_REPEATED_BYTES = 64 << 20
Fields = Mapping[str, Any]


class OpenAIEndpoints:
    """All endpoints under `/v1`. For the loop's thread."""

    def __init__(self, service: Service, executor: Executor) -> None:
        """`executor` waits for models that are loaded."""
        self._asker = ModelAsker(service)
        self._models = OpenAIModels(service, self._asker, executor)

    def routes(self) -> list[Route]:
        models = self._models
        return [
            Route("/v1/models", {"GET": answered(models.list)}),
            Route("/v1/models/{model}", {"GET": answered(models.show)}),
            Route("/v1/models/{model}/load", {"POST": answered(models.load)}),
            Route("/v1/models/{model}/unload", {"POST": answered(models.unload)}),
            Route("/v1/chat/completions", {"POST": answered(self.chat)}),
            Route("/v1/completions", {"POST": answered(self.complete)}),
            Route("/v1/embeddings", {"POST": answered(self.embed)}),
            Route("/v1/audio/transcriptions", {"POST": answered(Transcriptions(self._asker).transcribe)}),
            *(Route(path, {"POST": answered(self.rerank)}) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        ]

    def port_routes(self) -> list[Route]:
        """Return what a port for this API alone has beside those."""
        return [Route("/health/ready", {"GET": answered(self._models.ready)})]

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
        hosted, endpoint = self._asker.find_text(fields["model"], kind.endpoint)
        number = token_hex(16)
        answer = TextAnswer(kind, number, fields)
        with ExitStack() as closing:
            made = [
                self._asker.ask_for_pieces(
                    closing, request, hosted, endpoint, endpoint.inputs(*prompt), prompt[0], kind.operation
                )
                for prompt in prompts
            ]
            exchange.cancel = closing.close
            is_stream = bool(fields.get("stream"))
            # What the client has sent may be large, and the answer may take long.
            del fields, prompts
            exchange.body = b""
            if is_stream:
                streams, readers = zip(*made, strict=True)
                await EventStream(request, ChunkWriter(answer), readers).send(streams)
                return None
            account = AnswerAccount(exchange.limits.json_bytes)
            await together([_collect(answer, place, *each, account) for place, each in enumerate(made)])
        return json_reply(answer.whole())

    # Numbers

    async def embed(self, request: RouteRequest) -> RouteReply:
        """Return a row of numbers for each text."""
        exchange = request.exchange
        fields = await request.read(_read_texts)
        hosted, endpoints = self._asker.find(fields["model"])
        endpoint = endpoints.embedding
        if endpoint is None:
            raise NoSuchModel(fields["model"], why=lacks(fields["model"], "embed"))
        account = AnswerAccount(exchange.limits.json_bytes)
        made = endpoint.requests(_texts_in(fields, takes_tokens=endpoint.takes_tokens), fields)
        found: dict[int, tuple[NDArray[np.float32], int | None]] = {}

        async def ask(place: int, inputs: Inputs, count: int) -> None:
            response = await self._asker.answer(request, hosted, endpoint.outputs, inputs, "embeddings")
            await account.take(response)
            found[place] = endpoint.rows(response, count)

        request.cancel_if_gone()
        await together([ask(place, *each) for place, each in enumerate(made)])
        return RouteReply(200, JSON, await _embeddings(fields, [found[place] for place in range(len(made))]))

    async def rerank(self, request: RouteRequest) -> RouteReply:
        """Return the documents with their scores, the best first."""
        exchange = request.exchange
        fields, body = await request.read(_read_ranking)
        hosted, endpoint = self._asker.find_text(fields["model"], "rerank")
        if not isinstance(endpoint, PieceEndpoint):
            raise NoSuchModel(fields["model"], why=lacks(fields["model"], "rerank"))
        inputs = endpoint.inputs(fields, body)
        request.cancel_if_gone()
        response = await self._asker.answer(request, hosted, endpoint.outputs, inputs, "rerank")
        await AnswerAccount(exchange.limits.json_bytes).take(response)
        answer = endpoint.object(response)
        return json_reply(_ranking(fields, answer, hosted.model.name))


def _body_of(fields: Fields) -> bytes:
    """Return the fields of a request as JSON. Raises `BadField`, as the lenient reader takes more than can be
    written.
    """
    try:
        return dumps(fields)
    except (TypeError, ValueError) as error:
        raise BadField(f"a value of the request cannot be written as JSON: {error}") from None


# Requests. These run on a thread if the body is long.


def _fields(body: Body) -> dict[str, Any]:
    try:
        root = loads(body, has_lists=True)
    except TooMuchJson:
        raise
    except NotJson as error:
        raise BadField(f"the body is not JSON: {error}") from None
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
    if fields.get("documents") is None and "texts" in fields:
        fields["documents"] = fields.pop("texts")
    check_rerank(fields)
    if len(fields["documents"]) > _MOST_DOCUMENTS:
        raise BadField(f"at most {_MOST_DOCUMENTS} documents go into a request", ("documents",))
    return fields, _body_of(fields)


# Answers


async def _collect(
    answer: TextAnswer, place: int, stream: ResponseStream, reader: CountingReader, account: AnswerAccount
) -> None:
    """Add the pieces of the answer to one prompt as they come."""
    async for response in stream:
        piece = reader.piece(response)
        await account.take(response, piece.extra_bytes)
        answer.add(piece, place)
    answer.end(place)


async def _embeddings(fields: Fields, found: Sequence[tuple[NDArray[np.float32], int | None]]) -> bytes:
    sizes = {rows.shape[1] for rows, _ in found}
    if len(sizes) > 1:
        raise ModelError("the model gave embeddings of different sizes")
    rows = found[0][0] if len(found) == 1 else np.concatenate([each for each, _ in found])
    size = rows.shape[1]
    wanted = fields.get("dimensions")
    if size > _MOST_DIMENSIONS:
        raise ModelError(f"the model gave embeddings of {size} dimensions, and {_MOST_DIMENSIONS} are the most")
    if wanted not in (None, size):
        raise BadField(f"embeddings of this model have {size} dimensions", ("dimensions",))
    is_base64 = fields.get("encoding_format") == "base64"
    if not np.isfinite(rows).all():
        raise ModelError("the model gave an embedding with a number that is not finite")
    rows = rows.astype("<f4", copy=False)
    parts, turn = [], max(1, _TURN_VALUES // size)
    for index, row in enumerate(rows):
        text = b'"%b"' % b2a_base64(row, newline=False) if is_base64 else orjson.dumps(row, option=_OF_NUMPY)
        parts.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, text))
        if index % turn == turn - 1:
            await asyncio.sleep(0)
    data = b",".join(parts)
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
        or any(type(score) not in (int, float) or not abs(score) < inf for score in scores)
    ):
        raise ModelError(f"model '{name}' did not score each of the {len(documents)} documents")
    order = sorted(range(len(documents)), key=scores.__getitem__, reverse=True)
    results = [{"index": at, "relevance_score": scores[at]} for at in order[: fields.get("top_n")]]
    if fields.get("return_documents"):
        for each in results:
            document = documents[each["index"]]
            each["document"] = document if type(document) is dict else {"text": document}
    return {"id": f"rerank-{token_hex(16)}", "model": fields["model"], "results": results}
