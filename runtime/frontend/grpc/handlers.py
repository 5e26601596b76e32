"""Handlers of RPCs that take one message and give one, from functions that know nothing of gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from moonpool.runtime.frontend.grpc.bounds import SMALL_BYTES, parse
from moonpool.runtime.frontend.grpc.status import Status, status_of
from moonpool.runtime.frontend.grpc.wire import BadMessage

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from moonpool.runtime.frontend.grpc.call import Call

UNREADABLE = Status("INTERNAL", "Unable to parse request")


def unary(
    kind: Any, answer: Callable[[Any], Any], executor: Executor | None = None
) -> Callable[[Call], None]:
    """A handler that gives a message of `kind` to `answer`, and its answer to the client.

    `answer` runs on a thread of `executor` if there is one; else it must not block. What it raises is the status.
    """

    def handle(call: Call) -> None:
        call.receive(lambda data: received(call, data))

    def received(call: Call, data: bytes | None) -> None:
        if data is None:
            call.fail(UNREADABLE)
        elif executor is None and len(data) > SMALL_BYTES:
            # Reading it would keep other clients waiting.
            text = (
                f"the {kind.DESCRIPTOR.name} has {len(data)} bytes, and {SMALL_BYTES} is the most"
            )
            call.fail(Status("INVALID_ARGUMENT", text))
        elif executor is None:
            respond(call, data)
        else:
            try:
                executor.submit(respond, call, data)
            except RuntimeError:  # shut down
                call.fail(Status("UNAVAILABLE", "the server is stopping"))

    def respond(call: Call, data: bytes) -> None:
        try:
            call.reply(answer(parse(kind, data)).SerializeToString())
        except (BadMessage, DecodeError):
            call.fail(UNREADABLE)
        except Exception as error:
            call.fail(status_of(error))

    return handle
