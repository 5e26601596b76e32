"""Tells clients of OpenAI's API what went wrong, in the form, with the status and the headers that they act on.

openai-python tries again after 408, 409, 429 and 5xx, unless the header `x-should-retry` says no. It waits for as long
as `retry-after-ms` says, and does not try again if that is more than a minute or two.
"""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from secrets import token_hex

from moonpool.ipc.errors import Closed, MoonpoolError, OutOfMemory
from moonpool.runtime.errors import (
    BacklogFull,
    ExecuteTimedOut,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    OutOfThreads,
    QueueFull,
    QueueTimeout,
    RequestTimedOut,
    StubDied,
)
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.openai.endpoints import NoTemplate
from moonpool.runtime.openai.fields import BadField
from moonpool.runtime.server.http.head import JSON, Head, Headers
from moonpool.runtime.server.http.json_text import NotJson, TooMuchJson

_INVALID, _SERVER = "invalid_request_error", "server_error"
# For an error of the model: the same request would fail again.
_HOPELESS: Headers = (*JSON, (b"x-should-retry", b"false"))
_TYPES = {
    400: _INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: _INVALID,
    405: _INVALID,
    413: _INVALID,
    415: _INVALID,
    422: _INVALID,
    429: "rate_limit_error",
}
# As in Triton's front end.
_WITHOUT_DETAIL = (401, 413)
_MOST_ID_CHARACTERS = 128
_CODES = {401: "invalid_auth", 404: "not_found", 413: "content_too_large"}


class NoSuchModel(ModelNotFound):
    """The request names no model that has the endpoint."""

    def __init__(self, name: str, *, why: str = "", status: int = HTTPStatus.BAD_REQUEST) -> None:
        """The status is 400 for a model that a request names in its body, as in Triton's front end."""
        super().__init__(why or f"Unknown model: {name}")
        self.status = status


class ErrorReply:
    """Is what a client gets for an error."""

    def __init__(
        self,
        status: int,
        text: str,
        headers: Headers = JSON,
        *,
        code: str | None = None,
        param: str | None = None,
        detail: object = None,
    ) -> None:
        self.status = status
        self.headers = headers
        self.error = {
            "message": text,
            "type": _TYPES.get(status, _SERVER),
            "param": param,
            "code": code or _CODES.get(status),
        }
        # As Triton's own front end has it.
        self._detail = text if detail is None else detail

    @property
    def body(self) -> bytes:
        detail = {} if self.status in _WITHOUT_DETAIL else {"detail": self._detail}
        return _written({"error": self.error, **detail})

    @property
    def event(self) -> bytes:
        """The event that ends a stream. openai-python raises it, and so does not take what came before for all."""
        return b"data: %b\n\n" % _written({"error": self.error})


def id_of(head: Head) -> str:
    """Return the id of a request: the client's, or one of ours."""
    given = head.headers.get(b"x-request-id", b"").decode("latin-1")
    if given and len(given) <= _MOST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return token_hex(16)


def id_header(request_id: str) -> Headers:
    """Return the header that tells a client the id of its request."""
    return ((b"x-request-id", request_id.encode("ascii")),)


def reply_of(error: BaseException) -> ErrorReply:
    """Return what the client gets. Everything that is not moonpool's own is an internal error."""
    text = public_text(error)
    if isinstance(error, BadField):
        return _field_reply(error, text)
    if isinstance(error, ModelNotFound):
        status = error.status if isinstance(error, NoSuchModel) else HTTPStatus.BAD_REQUEST
        return ErrorReply(status, text, code="model_not_found", param="model")
    if isinstance(error, QueueFull):
        return ErrorReply(429, text, _later(error), code="queue_full")
    if isinstance(error, RequestTimedOut | ExecuteTimedOut):
        return ErrorReply(504, text, _HOPELESS, code="timeout")
    if isinstance(error, Closed):
        return ErrorReply(503, text, (*JSON, (b"Retry-After", b"1")), code="model_unavailable")
    if isinstance(error, QueueTimeout | ModelUnavailable | OutOfMemory | OutOfThreads | BacklogFull):
        return ErrorReply(503, text, _later(error), code="model_unavailable")
    if isinstance(error, StubDied):
        return ErrorReply(500, text, _HOPELESS, code="model_error")
    if isinstance(error, NoTemplate):
        return ErrorReply(500, text, _HOPELESS, code="model_error", detail=error.detail)
    if isinstance(error, ModelError):
        if error.code == "INVALID_ARG":
            return ErrorReply(400, text, _HOPELESS, code="invalid_value")
        return ErrorReply(500, text, _HOPELESS, code="model_error")
    if isinstance(error, TooMuchJson):
        return ErrorReply(413, text)
    if isinstance(error, InvalidRequest | NotJson):
        return ErrorReply(400, text)
    if isinstance(error, MoonpoolError):
        return ErrorReply(error.http_status, text)
    return ErrorReply(500, text)


def _field_reply(error: BadField, text: str) -> ErrorReply:
    param = error.param or None
    if not error.kind:
        return ErrorReply(400, text, param=param, code="invalid_value")
    detail = [{"type": error.kind, "loc": ["body", *error.where], "msg": error.text, "input": error.given}]
    return ErrorReply(422, text, param=param, code=error.kind, detail=detail)


def _written(value: object) -> bytes:
    """Return an error as JSON, even if a text that it quotes has half of a character."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _later(error: MoonpoolError) -> Headers:
    """Return the headers that say when to try again."""
    seconds = error.retry_after_s
    if seconds is None:
        return JSON
    return (
        *JSON,
        (b"retry-after-ms", b"%d" % max(1, math.ceil(seconds * 1000))),
        (b"Retry-After", b"%d" % max(1, math.ceil(seconds))),
    )
