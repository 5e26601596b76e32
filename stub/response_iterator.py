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

    If a loop is left, the next one goes on there, in the first pass and in later ones. A loop begins anew only if the
    last one came to the end. The last response may be empty: then it stands for an end that came without a response.
    Thread-safe; each response goes to one of the threads that share a loop.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = (
        "_abandon",
        "_cancel",
        "_index",
        "_is_begun",
        "_is_over",
        "_lock",
        "_receive",
        "_seen",
    )

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

        Responses still come after `cancel`. `abandon` is called when nobody refers to the iterator any more.
        """
        iterator = object.__new__(cls)
        iterator._receive = receive
        iterator._cancel = cancel
        iterator._abandon = abandon
        iterator._seen = []
        iterator._index = 0
        iterator._is_over = iterator._is_begun = False
        iterator._lock = threading.Lock()
        return iterator

    _receive: Callable[[], InferenceResponse | None]
    _cancel: Callable[[], None]
    _abandon: Callable[[], None] | None
    _seen: list[InferenceResponse]
    _index: int
    _is_over: bool
    # True if the current loop has had a response.
    _is_begun: bool
    _lock: threading.Lock

    def __iter__(self) -> ResponseIterator:
        with self._lock:
            self._is_begun = False
        return self

    def __next__(self) -> InferenceResponse:
        """The next response; waits for it. Raises StopIteration after the last."""
        with self._lock:
            seen = self._seen
            if self._index == len(seen) and not self._is_over:
                response = self._receive()
                if response is None:
                    self._is_over = True
                else:
                    seen.append(response)
            if self._index == len(seen):
                # A loop that has had a response ends here. One that begins at the end begins anew.
                if self._is_begun or not seen:
                    self._is_begun = True
                    raise StopIteration(_END)
                self._index = 0
            self._is_begun = True
            response = seen[self._index]
            self._index += 1
            return response

    def _wait(self) -> ResponseIterator:
        """Wait for the first response or the end; return the iterator."""
        with self._lock:
            if not self._seen and not self._is_over:
                response = self._receive()
                if response is None:
                    self._is_over = True
                else:
                    self._seen.append(response)
        return self

    def cancel(self) -> None:
        """Tell the model that no further responses are needed; `is_cancelled()` is True there from then on.

        Responses that it still sends arrive, up to its own end. Nothing happens if the model is done already.
        """
        self._cancel()

    def __del__(self) -> None:
        try:
            abandon = self._abandon
        except AttributeError:  # made by hand, and refused
            return
        if abandon is not None:
            abandon()
