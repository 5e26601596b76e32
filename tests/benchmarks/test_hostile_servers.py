"""Whatever a server sends, the generator has an outcome, waits for more or says that it is not the protocol."""

from __future__ import annotations

import http.server
import json
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.benchmarks.conftest import needs_nghttp2

from moonpool.benchmarks.data import DataMix, RequestData
from moonpool.benchmarks.generator.engine import Wire, WireError
from moonpool.benchmarks.generator.grpc import GrpcWire
from moonpool.benchmarks.generator.http import HttpWire
from moonpool.benchmarks.server import MeasuredServer
from moonpool.benchmarks.windows import Window
from moonpool.runtime.client.control_client import Refused
from moonpool.runtime.client.request import Endpoint, QuestionTensor

pytestmark = pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Whatever a server sends, each request has an outcome, or the error says that it is not the protocol.",
)

# Frames have known and unknown kinds, on the connection's stream and on those of requests.
FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
    ),
    st.integers(0, 10),
    st.integers(0, 255),
    st.sampled_from([0, 1, 3]),
    st.one_of(
        st.binary(max_size=20),
        # Messages of gRPC.
        st.binary(max_size=20).map(lambda data: struct.pack(">BI", 0, len(data)) + data),
        # Headers that are not in a table.
        st.tuples(st.binary(max_size=9), st.binary(max_size=9)).map(
            lambda pair: b"\0" + b"".join(bytes([len(text)]) + text for text in pair)
        ),
        # This is a name of the table with another value, such as a status.
        st.binary(max_size=9).map(lambda text: bytes([8, len(text)]) + text),
    ),
)
HEADS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 500 No\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"\r\n",
        b"3\r\nabc\r\n",
        b"0\r\n\r\n",
        b"-5\r\n",
    ]
)


def fed(wire: Wire, pieces: list[bytes]) -> None:
    """Begin a request, and the next one when one has ended."""
    b"".join(wire.opening())
    wire.begin(0, 0)
    try:
        for piece in pieces:
            for data in (piece[:3], piece[3:]):
                if data and wire.feed(data) is not None:
                    wire.outgoing()
                    wire.begin(0, 0)
            assert wire.skip >= 0
    except (WireError, ConnectionError):
        pass


@needs_nghttp2
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("is_stream", [True, False])
@given(pieces=st.lists(st.one_of(FRAMES, st.binary(max_size=30)), max_size=12))
def test_grpc(is_stream: bool, pieces: list[bytes]) -> None:
    fed(GrpcWire("a", "/b/c", b"x" * 70_000, is_stream=is_stream), pieces)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.one_of(HEADS, st.binary(max_size=30)), max_size=12))
def test_http(pieces: list[bytes]) -> None:
    fed(HttpWire(b"GET / HTTP/1.1\r\n\r\n"), pieces)


@pytest.fixture
def saying() -> Iterator[Callable[[Any], MeasuredServer]]:
    """A server that answers this to everything, as `moonpool bench` has it."""
    said: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said[0])

        do_POST = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        server = MeasuredServer(Endpoint("http", "127.0.0.1", listening.server_address[1]), "m", "", timeout_s=60.0)

        def say(value: Any) -> MeasuredServer:
            said.append(json.dumps(value).encode())
            return server

        yield say
        server.close()
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"inputs": 5},
        {"inputs": [5]},
        {"inputs": [{"datatype": "FP32"}]},
        {"inputs": [{"name": 1, "datatype": "FP32"}]},
        {"inputs": [{"name": "X", "datatype": []}]},
        {"inputs": [{"name": "X", "datatype": "FP32", "shape": ["a"]}]},
        {"inputs": [{"name": "X", "datatype": "FP32", "shape": [-5]}]},
        {"max_batch_size": "x"},
        {"input": [7]},
        {"model_transaction_policy": 5},
    ],
)
def test_a_description_that_is_none_is_refused(saying: Callable[[Any], MeasuredServer], value: object) -> None:
    with pytest.raises(Refused, match=r"does not follow the protocol|gave no JSON object"):
        saying(value).interface()


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"outputs": 5},
        {"outputs": [5]},
        {"outputs": [{"parameters": {"binary_data_size": 4}}]},
        {"outputs": [{"name": "Y", "parameters": {"binary_data_size": "x"}}]},
    ],
)
def test_an_answer_that_is_none_is_refused(saying: Callable[[Any], MeasuredServer], value: object) -> None:
    inputs = [QuestionTensor.of("X", "FP32", np.zeros(1, np.float32))]
    with pytest.raises(Refused, match="does not follow the protocol"):
        saying(value).prepare(DataMix([RequestData(inputs)]), processes=1, most_connections=1)


@pytest.mark.parametrize("value", [{"model_stats": 5}, {"model_stats": {}}])
def test_statistics_that_are_none_are_refused(saying: Callable[[Any], MeasuredServer], value: dict[str, Any]) -> None:
    server = saying(value)
    if value["model_stats"]:
        with pytest.raises(Refused, match="statistics of http"):
            server.answered()
    else:
        assert server.answered() is None


ADVICE = {"reason": "processor", "text": "another instance would help", "line": "instance_group []"}
MINE = {"name": "m", "version": "2", "advice": {**ADVICE, "more": 1}}


@pytest.mark.promise("Measuring (`moonpool bench`)", "If another instance would help …")
@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({"models": [{"name": "other", "version": "1", "advice": 7}, MINE]}, ADVICE),
        ({"models": [{"name": "m", "version": "1"}]}, None),
        ({"models": [{**MINE, "advice": None}]}, None),
        ({"models": [{**MINE, "advice": {"text": "x"}}]}, None),
        ({"models": [{**MINE, "advice": {**ADVICE, "line": ["x"]}}]}, None),
        ({"models": [{**MINE, "advice": [1]}]}, None),
        ({"models": [5]}, None),
        ({"models": 5}, None),
        ({"models": []}, None),
        ([], None),
    ],
)
def test_advice_is_taken_as_a_server_of_moonpools_words_it_and_not_otherwise(
    saying: Callable[[Any], MeasuredServer], value: object, advice: dict[str, str] | None
) -> None:
    assert saying(value).advice(Window(1.0)) == advice
