"""Give the session of HTTP/2 frames of any kind, in any order, for so many seconds:
`python -m tests.server.grpc.fuzzing SECONDS SEED`.

Frames are good, changed or random; between them the server's side sends, takes and says goodbye. `test_sanitized.py`
runs this with an extension that notices every wrong access.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.server.grpc import frames as http2

from moonpool.runtime.server.grpc import open_nghttp2

new_session, _ = open_nghttp2()

_KINDS = range(11)
_STREAMS = (0, 1, 1, 3, 5, 7, 9, 1001, 2**31 - 1)
_REQUEST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b"), (b"te", b"trailers"))
_HEADERS = ("grpc-timeout", "x", "x-bin", ":path", "te", "grpc-encoding", "connection", "\0", "")


def _head(rng: random.Random) -> bytes:
    good = http2.head(rng.choice((http2.INFER, http2.STREAM, "/", "x" * rng.choice((1, 5000)))))
    more = [
        http2.literal(rng.choice(_HEADERS), rng.choice(("1S", "9x", "", "y" * rng.randrange(9000))))
        for _ in range(rng.randrange(4))
    ]
    table = b"\x40" + http2.literal("bomb", "x" * 4000)[1:] + b"\xbe" * rng.randrange(5000)
    return good + b"".join(more) + rng.choice((b"", b"", table))


def _body(rng: random.Random, kind: int) -> bytes:
    if kind == http2.DATA:
        data = b"".join(
            http2.message(rng.randbytes(rng.choice((0, 1, 100, 9000))), is_compressed=rng.random() < 0.1)
            for _ in range(rng.randrange(9))
        )
        return data[: rng.choice((len(data), rng.randrange(len(data) + 1)))]
    if kind == http2.HEADERS:
        return _head(rng)
    if kind == http2.WINDOW_UPDATE and rng.random() < 0.98:
        return rng.choice((1, 100, 65535)).to_bytes(4, "big")
    sizes = {http2.PRIORITY: 5, http2.RESET: 4, http2.PING: 8, http2.WINDOW_UPDATE: 4}
    if kind == http2.SETTINGS:
        return b"".join(
            rng.randrange(8).to_bytes(2, "big") + rng.choice((0, 1, 100, 65535, 2**31 - 1)).to_bytes(4, "big")
            for _ in range(rng.randrange(4))
        )  # fmt: skip
    return rng.randbytes(sizes.get(kind, rng.randrange(40)))


def _frames(rng: random.Random, last: int) -> tuple[bytes, int]:
    """Return some frames, and the last stream that was begun."""
    found = b""
    usual = (http2.DATA, http2.DATA, http2.HEADERS, http2.RESET, http2.WINDOW_UPDATE, http2.PING)
    for _ in range(rng.randrange(1, 8)):
        kind = rng.choice(_KINDS if rng.random() < 0.01 else usual)
        stream = max(1, last - 2 * rng.randrange(4))
        if kind == http2.HEADERS and rng.random() < 0.95:
            stream = last = last + 2
        if kind in (http2.SETTINGS, http2.PING) or rng.random() < 0.003:
            stream = rng.choice(_STREAMS) if rng.random() < 0.02 else 0
        flags = rng.choice((0, 0, 0, 0, 1, rng.randrange(256)))
        body = _body(rng, kind)
        if kind == http2.HEADERS and rng.random() < 0.2:
            cut = rng.randrange(len(body) + 1)
            found += http2.frame(kind, 0, stream, body[:cut][:16384])
            found += http2.frame(http2.CONTINUATION, 4, stream, body[cut:][:16384])
            continue
        if kind == http2.HEADERS and rng.random() < 0.95:
            flags = rng.choice((4, 4, 4, 5))
        elif kind == http2.DATA and rng.random() < 0.95:
            flags &= 1
        found += http2.frame(kind, flags, stream, body[:16384])
    if rng.random() < 0.02:
        changed = bytearray(found)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed), last
    return found, last


def _serve(rng: random.Random, session: Any, stream: int) -> None:
    what = rng.randrange(14)
    if what < 5:
        message: Any = rng.choice((None, b"", rng.randbytes(rng.choice((1, 100, 70_000)))))
        if rng.random() < 0.3:
            sizes = [rng.choice((0, 1, 100, 5_000, 70_000)) for _ in range(rng.randrange(1, 5))]
            message = tuple(memoryview(rng.randbytes(size)) for size in sizes)
        status = rng.choice((-1, -1, 0, 5, 10**6))
        details = rng.choice((None, b"", b"why", b"\xff" * 100, b"x" * 7000))
        session.send(stream, message, rng.random() < 0.2, rng.random() < 0.5, status, details)
    elif what < 9:
        while session.take(stream) is not None and rng.random() < 0.8:
            continue
    elif what == 9:
        session.ping()
    elif what == 10:
        session.replenish()
    elif what == 11:
        headers = tuple((name.encode(), rng.randbytes(rng.randrange(9))) for name in _HEADERS[:6:5])
        # A server sends no requests.
        with contextlib.suppress(ValueError):
            message = rng.choice((b"", (b"", b""), rng.randbytes(70_000)))
            session.request(headers, message, rng.random() < 0.5, rng.random() < 0.7)
    elif what == 12:
        session.cancel(stream)
    elif rng.random() < 0.05:
        session.goaway(rng.randrange(14), rng.randbytes(rng.randrange(200)))


def one(rng: random.Random) -> int:
    """Live through one connection. Returns the number of events."""
    is_client = rng.random() < 0.4
    session = new_session(rng.choice((0, 100, 1 << 20)), rng.random() < 0.5, is_client)
    data = http2.frame(http2.SETTINGS) + http2.frame(http2.SETTINGS, 1)
    if is_client:
        for _ in range(rng.randrange(5)):
            session.request(_REQUEST, b"x" * rng.choice((0, 9, 70_000)), rng.random() < 0.5, rng.random() < 0.7)  # fmt: skip
        session.out()
        status = http2.literal("grpc-status", "0")
        data += http2.frame(http2.HEADERS, 4, 1, b"\x88") + http2.frame(http2.DATA, 0, 1, _body(rng, http2.DATA)[:16384])  # fmt: skip
        data += http2.frame(http2.HEADERS, 5, 1, status)
    else:
        data = http2.PREFACE + data + http2.call(1)
    events, last = 0, 1
    # An error ends the session, also while it still has streams and messages.
    with contextlib.suppress(ConnectionError):
        for _ in range(rng.randrange(60)):
            for part in _parts(rng, data):
                events += _feed(rng, session, part)
            _serve(rng, session, max(1, last - 2 * rng.randrange(4)))
            if rng.random() < 0.7:
                data_or_parts, size_bytes, more, is_over = session.out()
                assert size_bytes == len(b"".join(data_or_parts) if isinstance(data_or_parts, list) else data_or_parts)
                events += len(more)
                if is_over:
                    break
            data, last = _frames(rng, last)
    return events


def _feed(rng: random.Random, session: Any, part: bytes) -> int:
    """Feed bytes, and place some of the large messages. Returns the number of events."""
    found, has_all = 0, False
    while not has_all:
        events, has_all = session.feed(part, len(part))
        for event in events:
            assert event[0] in range(9)
            found += 1
            if event[0] == 8 and rng.random() < 0.7:
                _place(rng, session, event[1], event[3])
            if len(event) > 1 and rng.random() < 0.5:
                _serve(rng, session, event[1])
    return found


def _place(rng: random.Random, session: Any, stream: int, size_bytes: int) -> None:
    is_right = rng.random() < 0.9
    memory = memoryview(bytearray(size_bytes if is_right else rng.randrange(100)))
    try:
        session.place(stream, memory)
    except ValueError:
        assert not is_right


def _parts(rng: random.Random, data: bytes) -> Iterator[bytes]:
    while data:
        size = rng.choice((len(data), len(data), rng.randrange(1, len(data) + 1)))
        yield data[:size]
        data = data[size:]


def main(seconds: float, seed: int) -> None:
    """Live through connections until the time is over."""
    deadline = time.monotonic() + seconds
    rng = random.Random(seed)
    connections = events = 0
    while time.monotonic() < deadline:
        connections += 1
        events += one(rng)
    sys.stdout.write(f"{connections} connections had {events} events (seed {seed})\n")
    if not events:
        sys.exit("the session saw nothing")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32))
