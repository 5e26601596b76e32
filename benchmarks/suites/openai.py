"""OpenAI's API before a model: the first piece, pieces a second, embeddings joined over clients, and memory."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import moonpool
from moonpool.benchmarks.generator.engine import Generator, Tally
from moonpool.benchmarks.generator.http import EventWire, HttpWire
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.memory import memory_mib
from moonpool.benchmarks.suites.peer.served import MoonpoolServed
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import Series, in_turns, time_us
from moonpool.runtime.client.request import Endpoint, json_post
from moonpool.runtime.server.openai.routes import _embeddings

_CHAT, _EMBED = "openai_chat", "openai_embed"
_STREAMS, _PIECES, _IDLE, _UNREAD_S = 64, 500, 1000, 10.0
_ANSWER_S = 60.0


def _chat(pieces: int, **more: Any) -> dict[str, Any]:
    return {"model": _CHAT, "messages": [{"role": "user", "content": "hello"}], "max_tokens": pieces, **more}


class _Client:
    """Sends requests to a server, one at a time or many."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._endpoint = Endpoint("http", *self._address)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        return json_post(self._endpoint, path, (), json.dumps(body).encode())

    def chat(self, pieces: int, **more: Any) -> bytes:
        return self.post("/v1/chat/completions", _chat(pieces, stream=True, **more))

    def connected(self) -> socket.socket:
        """Return a connection, which the caller closes."""
        sock = socket.create_connection(self._address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def first(self, sock: socket.socket, request: bytes) -> float:
        """Ask for a stream, and read it to its end; return the microseconds to its first piece."""
        before = time.perf_counter_ns()
        sock.sendall(request)
        data = sock.recv(1 << 16)
        while b"piece" not in data:
            data += sock.recv(1 << 16)
        took_us = (time.perf_counter_ns() - before) / 1000
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(1 << 16)
        return took_us

    def pressed(self, request: bytes, callers: int, seconds: float, *, is_stream: bool) -> tuple[Tally, int]:
        """Press the server; return the figures, and the number of all responses."""
        wires: list[HttpWire] = []

        def wire() -> HttpWire:
            wires.append(EventWire(request) if is_stream else HttpWire(request))
            return wires[-1]

        generator = Generator(self._address, [wire], timeout_s=_ANSWER_S, is_stream=is_stream)
        with contextlib.closing(generator):
            tally = generator.closed_loop(callers, seconds, time.perf_counter_ns())
        if tally.errors:
            raise RuntimeError(f"the server answers {tally.errors.most_common(1)}")
        return tally, sum(each.responses for each in wires)


def _bare() -> float:
    """Return the microseconds to the first piece of the model's own generator in this process."""

    async def answer(pieces: int) -> Any:
        for _ in range(pieces):
            yield "piece "

    def first() -> object:
        with contextlib.suppress(StopIteration):
            answer(1).__anext__().send(None)
        return None

    return statistics.median(time_us(first, 100))


def _first_in_process(runtime: moonpool.Runtime) -> float:
    before = time.perf_counter_ns()
    with runtime.chat(_CHAT, _chat(1)["messages"], stream=True, max_tokens=1) as stream:
        next(stream), next(stream)
        took_us = (time.perf_counter_ns() - before) / 1000
        list(stream)
    return took_us


def _stream_in_process(runtime: moonpool.Runtime, body: bytes) -> float:
    """Return the microseconds to the first response of the model as one with tensors, for the bare trip."""
    before = time.perf_counter_ns()
    stream = runtime.stream(_CHAT, {"request": np.array([body], object)}, outputs=["chat"])
    next(stream)
    took_us = (time.perf_counter_ns() - before) / 1000
    list(stream)
    return took_us


def _first_piece(report: Report, client: _Client, quick: bool) -> None:
    rounds, count = (1, 5) if quick else (20, 100)
    body = json.dumps(_chat(1)).encode()
    with moonpool.Runtime() as runtime, contextlib.closing(client.connected()) as sock:
        runtime.load(_CHAT, MODELS / _CHAT)
        cases: dict[str, Callable[[], float]] = {
            "stream": partial(_stream_in_process, runtime, body),
            "chat": partial(_first_in_process, runtime),
            "http": partial(client.first, sock, client.chat(1)),
        }
        repeated = {name: partial(lambda call: [call() for _ in range(count)], call) for name, call in cases.items()}
        found = in_turns(repeated, rounds)
    names = {"stream": "its tensors, `Runtime.stream`", "chat": "`Runtime.chat`", "http": "a client of the server"}
    for name, words in names.items():
        report.figure(f"first piece: {words}", "µs", found[name].values, headline=True)
    report.figure(
        "first piece: of a client over `Runtime.stream`", "µs", found["http"].minus(found["stream"]), goal="≤ 150"
    )
    report.note(f"The model's own generator, called in this process, takes {_bare():.1f} µs to its first piece.")


def _busy_us(server: MoonpoolServed) -> tuple[float, float]:
    """Return the microseconds of processor time of the server, and of its models' processes."""
    own, *stubs = server.busy_by_process_s().values()
    return own * 1e6, sum(stubs) * 1e6


def _pieces(report: Report, server: MoonpoolServed, client: _Client, quick: bool) -> None:
    rounds, seconds, pieces = (1, 0.1, 20) if quick else (7, 2.0, _PIECES)
    request = client.chat(pieces)

    def window() -> list[float]:
        before = _busy_us(server)
        tally, responses = client.pressed(request, _STREAMS, seconds, is_stream=True)
        spent = [(after - earlier) / responses for after, earlier in zip(_busy_us(server), before, strict=True)]
        return [responses / tally.seconds, *spent, tally.busy_s * 1e6 / responses]

    with moonpool.Runtime() as runtime:
        runtime.load(_CHAT, MODELS / _CHAT)

        def here() -> list[float]:
            """Return the rate at which a thread of this process takes the responses of the same model."""
            body = json.dumps(_chat(20 * pieces)).encode()
            before = time.perf_counter()
            count = sum(1 for _ in runtime.stream(_CHAT, {"request": np.array([body], object)}, outputs=["chat"]))
            return [count / (time.perf_counter() - before)]

        measured = in_turns({"http": window, "here": here}, rounds)
    found = measured["http"].rounds
    rates = Series([each[:1] for each in found])
    what = f"pieces over {_STREAMS} streams"
    report.figure(what, "pieces/s", rates.values, goal="50,000", headline=True)
    report.figure("responses of the same model, `Runtime.stream`", "responses/s", measured["here"].values)
    report.ratio(f"{what} over these responses", rates.over(measured["here"]))
    for at, side in enumerate(("the server", "the model's process", "the generator"), 1):
        report.figure(f"{what}: processor time of {side}", "µs", [each[at] for each in found])
    report.note(f"Each stream has {pieces} pieces of 6 bytes, yielded in a loop; the generator shares the processors.")


def _joined(report: Report, client: _Client, quick: bool) -> None:
    rounds, seconds = (1, 0.2) if quick else (5, 2.0)
    request = client.post("/v1/embeddings", {"model": _EMBED, "input": "hello", "encoding_format": "base64"})

    def rate(callers: int) -> list[float]:
        tally, responses = client.pressed(request, callers, seconds, is_stream=False)
        return [responses / tally.seconds]

    def own() -> list[float]:
        """Return the rate of the model's method, with 32 texts a call, in this process."""
        took_us = time_us(partial(time.sleep, 0.02), 5 if quick else 50)
        return [32e6 / statistics.median(took_us)]

    found = in_turns({**{callers: partial(rate, callers) for callers in (1, 32, 64)}, 0: own}, rounds)
    for callers, goal in ((32, ""), (64, "5")):
        report.figure(f"embeddings of {callers} clients", "texts/s", found[callers].values, headline=True)
        report.ratio(f"embeddings of {callers} clients over one client's", found[callers].over(found[1]), goal=goal)
        report.ratio(f"embeddings of {callers} clients over the model's own", found[callers].over(found[0]), goal="0.9")


def _numbers(report: Report, quick: bool) -> None:
    rows = np.random.default_rng(1).standard_normal((1, 1024)).astype(np.float32)

    def written(fields: dict[str, str]) -> None:
        """Run the coroutine, which takes turns with others only after many numbers."""
        with contextlib.suppress(StopIteration):
            _embeddings(fields, [(rows, None)]).send(None)

    for form, goal in (("base64", "≤ 5"), ("float", "")):
        fields = {"model": _EMBED, "encoding_format": form}
        values = time_us(partial(written, fields), 10 if quick else 5000)
        report.figure(f"1,024 numbers to {form}", "µs", values, goal=goal)


@contextlib.contextmanager
def _asked(client: _Client, request: bytes, count: int) -> Iterator[list[socket.socket]]:
    """Open so many streams, each of which has had its first piece."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(contextlib.closing(client.connected())) for _ in range(count)]
        for sock in socks:
            sock.sendall(request)
        for sock in socks:
            while b"piece" not in sock.recv(1 << 16):
                pass
        yield socks


def _memory(report: Report, server: MoonpoolServed, client: _Client, quick: bool) -> None:
    idle, seconds = (20, 0.2) if quick else (_IDLE, _UNREAD_S)
    with _asked(client, client.chat(1, user="waits"), 1):
        before = memory_mib(server.pid)["USS"]
    with _asked(client, client.chat(1, user="waits"), idle):
        after = memory_mib(server.pid)["USS"]
    report.figure(f"{idle:,} idle streams, in the server", "MiB", [after - before], goal="≤ 64", headline=True)
    before, most = memory_mib(server.pid)["USS"], 0.0
    with _asked(client, client.chat(1, user="floods"), 1):
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            most = max(most, memory_mib(server.pid)["USS"])
            time.sleep(0.02)
    report.figure("a client that reads nothing, in the server", "MiB", [most - before], goal="≤ 64", headline=True)


def measure(report: Report, quick: bool) -> None:
    """One server with two models."""
    with contextlib.closing(MoonpoolServed((_CHAT, _EMBED))) as server:
        client = _Client(server.http_port)
        _first_piece(report, client, quick)
        _pieces(report, server, client, quick)
        _joined(report, client, quick)
        _memory(report, server, client, quick)
    _numbers(report, quick)


if __name__ == "__main__":
    main("openai", "What do clients of OpenAI's API wait for, and what does it cost?", measure)
