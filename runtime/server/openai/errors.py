"""Tells clients of OpenAI's API what went wrong, in the form, with the status and the headers that they act on.

openai-python tries again after 408, 409, 429 and 5xx, unless the header `x-should-retry` says no. It waits for as long
as `retry-after-ms` says, and does not try again if that is more than a minute or two.
"""

from __future__ import annotations

import math
from http import HTTPStatus

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
from moonpool.runtime.server.http.head import JSON, Headers
from moonpool.runtime.server.http.json_text import NotJson, TooMuchJson
from moonpool.runtime.server.http.routes import ErrorReply

# For an error of the model: the same request would fail again.
_HOPELESS: Headers = (*JSON, (b"x-should-retry", b"false"))


class NoSuchModel(ModelNotFound):
    """The request names no model that has the endpoint."""

    def __init__(self, name: str, *, why: str = "", status: int = HTTPStatus.BAD_REQUEST) -> None:
        """The status is 400 for a model that a request names in its body, as in Triton's front end."""
        super().__init__(why or f"Unknown model: {name}")
        self.status = status


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
