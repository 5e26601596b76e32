"""The responses to a request that was made with `decoupled=True`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.stub.response import InferenceResponse

_END = "Iteration is done for the responses."


class ResponseIterator:
    """Responses in the order in which they were sent, each as soon as it is there.

    A loop that is left early is resumed by the next one; after the last response, a loop sees all of them
    again. The last response may be an
    empty one: a model that ends without a further response says so with a message of its own.
    Thread-safe; each response goes to one of the threads that share a loop.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_abandon", "_cancel", "_index", "_is_over", "_lock", "_receive", "_seen")

    def __init__(self) -> None:
        raise TypeError("a ResponseIterator comes from exec(decoupled=True)")

    @classmethod
    def over(
        cls,
        receive: Callable[[], InferenceResponse | None],
        cancel: Callable[[], None],
        abandon: Callable[[], None] | None = None,
    ) -> ResponseIterator:
        """`receive` waits for the next response, and returns None after the last. The others do not wait.

        `abandon` is called when nobody refers to the iterator any more.
        """
        iterator = object.__new__(cls)
        iterator._receive = receive
        iterator._cancel = cancel
        iterator._abandon = abandon
        iterator._seen = []
        iterator._index = 0
        iterator._is_over = False
        iterator._lock = threading.Lock()
        return iterator

    _receive: Callable[[], InferenceResponse | None]
    _cancel: Callable[[], None]
    _abandon: Callable[[], None] | None
    _seen: list[InferenceResponse]
    _index: int
    _is_over: bool
    _lock: threading.Lock

    def __iter__(self) -> ResponseIterator:
        with self._lock:
            if self._is_over:
                self._index = 0
        return self

    def __next__(self) -> InferenceResponse:
        """The next response; waits for it. Raises StopIteration after the last."""
        with self._lock:
            if self._index == len(self._seen):
                response = None if self._is_over else self._receive()
                if response is None:
                    self._is_over = True
                    raise StopIteration(_END)
                self._seen.append(response)
            response = self._seen[self._index]
            self._index += 1
            return response

    def cancel(self) -> None:
        """Tell the model that nobody wants further responses. Nothing happens where it is done already."""
        self._cancel()

    def __del__(self) -> None:
        try:
            abandon = self._abandon
        except AttributeError:  # made by hand, and refused
            return
        if abandon is not None:
            abandon()
