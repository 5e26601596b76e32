"""Streams whose requests are sent one by one."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

from tests.server.grpc.serving import TIMEOUT_S


class Requests:
    """Requests that gRPC iterates over until they are closed."""

    def __init__(self, *asked: Any) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.send(*asked)

    def send(self, *asked: Any) -> None:
        for each in asked:
            self._queue.put(each)

    def close(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        while (asked := self._queue.get(timeout=6 * TIMEOUT_S)) is not None:
            yield asked


def told(response: Any) -> tuple[str, str, bool | None, list[bytes]]:
    """Return the error, the id, whether it is the last, and the tensors of a response in a stream."""
    answer = response.infer_response
    final = None
    if "triton_final_response" in answer.parameters:
        final = answer.parameters["triton_final_response"].bool_param
    return response.error_message, answer.id, final, list(answer.raw_output_contents)


def ask_all(stub: Any, *asked: Any, metadata: Any = ()) -> list[Any]:
    """Return all responses to some requests, after which the client ends its side at once."""
    call = stub.ModelStreamInfer(iter(asked), timeout=TIMEOUT_S, metadata=metadata)
    return [told(response) for response in call]
