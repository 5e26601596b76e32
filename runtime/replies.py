"""Requests whose responses come apart from the answer to their batch, as one stub knows them by numbers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import ANSWERED, OPEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.backend import Model
    from moonpool.runtime.request import Details, InferenceRequest

Key = tuple[int, int]


class Replies:
    """Says which request a response is for. The driver of a batch and the reactor meet here.

    The responses to a request may come before the answer to its batch and after it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executing: tuple[int, Sequence[InferenceRequest]] = (0, ())
        # Of the batch that is executing: those that had their last response already.
        self._ended: set[int] = set()
        self._open: dict[Key, InferenceRequest] = {}
        self._keys: dict[InferenceRequest, Key] = {}

    def begin(self, batch: int, requests: Sequence[InferenceRequest]) -> None:
        """This batch is about to be sent."""
        self._executing = (batch, requests)

    def answered(self, states: Sequence[int] | None) -> None:
        """The batch was answered; what it says of each request. Raises `RemoteProtocolError`."""
        with self._lock:
            batch, requests = self._executing
            self._executing = (0, ())
            if states is None and not self._ended:
                return
            ended, self._ended = self._ended, set()
            for index, request in enumerate(requests):
                state = ANSWERED if states is None else states[index]
                if state == OPEN and index not in ended:
                    self._open[batch, index] = request
                    self._keys[request] = (batch, index)
                elif state != OPEN and index in ended:
                    raise RemoteProtocolError(f"request {index} was answered twice")

    def find(self, batch: int, index: int, *, is_last: bool) -> InferenceRequest:
        """The request that a response is for, and no more for it after the last.

        Raises `RemoteProtocolError` where it may have none.
        """
        with self._lock:
            request = self._open.get((batch, index))
            if request is not None:
                if is_last:
                    del self._open[batch, index], self._keys[request]
                return request
            executing, requests = self._executing
            if batch != executing or index >= len(requests) or index in self._ended:
                raise RemoteProtocolError(
                    f"a response to request {index} of batch {batch}, which waits for none"
                )
            if is_last:
                self._ended.add(index)
            return requests[index]

    @property
    def executing(self) -> int:
        """The number of the batch that is executing, 0 for none."""
        return self._executing[0]

    @property
    def deserted(self) -> int:
        """The number of the batch that is executing, where nobody waits for anything any more, else 0."""
        with self._lock:
            batch, requests = self._executing
            some_wait = any(not each.left for each in (*requests, *self._open.values()))
            return 0 if some_wait else batch

    def key_of(self, request: InferenceRequest) -> Key | None:
        """The numbers of a request that is executing or open."""
        with self._lock:
            batch, requests = self._executing
            for index, each in enumerate(requests):
                if each is request and index not in self._ended:
                    return batch, index
            return self._keys.get(request)

    def watch(self, asked: InferenceRequest, model: Model, details: Details) -> None:
        """Where a request that the model in the stub makes is for one that is watched, it is watched, too.

        `details` say whose trace it hands on.
        """
        with self._lock:
            here = [*self._executing[1], *self._open.values()]
        for request in here:
            if request.trace is not None and request.trace.context == details.trace:
                request.trace.child(model, details.request_id).follow(asked)
                return

    def close(self) -> None:
        """Forget the requests; their memory may be the caller's."""
        with self._lock:
            self._executing = (0, ())
            self._open.clear()
            self._keys.clear()
