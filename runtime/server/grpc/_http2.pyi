"""gRPC over HTTP/2 without I/O, on nghttp2."""

from typing import Any

def open_library(name: str, /) -> None:
    """Find nghttp2 by the name or path of its library, once. Raises OSError."""

class Session:
    """One HTTP/2 connection of a client, or with `is_client` to a server. For one thread.

    An event is a tuple of its kind, its stream and more:
    (HEAD, stream, headers or None if they are too large, nanoseconds of the deadline or a negative number),
    (MESSAGE, stream, message, whether it is compressed), (END, stream), (CLOSED, stream, code of HTTP/2),
    (REFUSED, stream, status of gRPC, size of the message), (SENT, stream),
    (PING, whether it answers one of ours, whether messages were sent since the last one), (GREETED,),
    (COMING, stream, first bytes of a large message, its size). A client gets a HEAD for the trailers, too.
    """

    def __init__(self, max_message_bytes: int, compresses: bool, is_client: bool = False) -> None: ...
    def feed(self, buffer: memoryview | bytes, size: int, /) -> tuple[list[tuple[Any, ...]], bool]:
        """Read so many bytes of a buffer; return the events, and whether all was read. Raises ConnectionError.

        If not all was read, the last event is COMING: the message may be placed now, and the same buffer is fed again.
        """

    def room(self) -> memoryview | None:
        """Return memory to receive into and to feed next, or None for any."""

    def filled(self, stream: int, /) -> int:
        """Return how many bytes have come of the message that is coming."""

    def out(self) -> tuple[bytes | list[bytes | memoryview], int, list[tuple[Any, ...]], bool]:
        """Return bytes for the client, their size, events, and whether the session is over. Raises ConnectionError.

        If large messages leave, the bytes come in parts, some of which are views of the messages.
        """

    def take(self, stream: int, /) -> tuple[bytes | None, int, int] | None:
        """Return the next message of a stream, whether it is compressed, and its size; None if it has not come.

        If it is refused, there is a status of gRPC instead: (None, status, size). If it is large and has begun to come,
        there are its first bytes, 2 and its size, once: it may be placed, and taken again.
        """

    def place(self, stream: int, memory: memoryview, /) -> bool:
        """Receive the message that is coming into this memory, which has its size. Returns False if none is coming."""

    def send(
        self,
        stream: int,
        message: bytes | tuple[bytes | memoryview, ...] | None,
        is_compressed: bool,
        is_awaited: bool,
        status: int,
        details: bytes | None,
        /,
    ) -> bool:
        """Send a message, which may come in pieces, a status (-1 is none), or both.

        Returns False if the stream has ended. The pieces keep their memory until they are sent.

        With `is_awaited`, there will be an event SENT.
        """

    def request(
        self,
        headers: tuple[tuple[bytes, bytes], ...],
        message: bytes | tuple[bytes | memoryview, ...],
        is_last: bool,
        is_wanted: bool,
        /,
    ) -> int:
        """Send a request and its first message, as a client; return its stream. Raises ConnectionError.

        With `is_last` there are no further messages. Messages that come back are dropped unless they are wanted.
        """

    def cancel(self, stream: int, /) -> None:
        """Reset a stream, if it is still open. Raises ConnectionError."""

    def ping(self) -> None:
        """Send a ping."""

    def goaway(self, code: int, text: bytes, /) -> None:
        """Tell the client that no further streams are accepted."""

    def replenish(self) -> tuple[int, int]:
        """Refill the budgets against floods, once a second.

        Returns the bytes of messages that wait, and those that left.
        """
