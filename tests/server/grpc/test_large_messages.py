"""Large messages: requests are received where stubs read them, and responses leave as views."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.e2e.hosting import ECHO
from tests.e2e.hosting import MODELS as E2E_MODELS
from tests.server.grpc.frames import (
    ACK,
    DATA,
    END_STREAM,
    HEADERS,
    PING,
    RESET,
    SETTINGS,
    STREAM,
    WINDOW_UPDATE,
    RawClient,
    call,
    frame,
    frames,
    message,
)
from tests.server.grpc.serving import Served, messages
from tests.server.grpc.test_session import COMING, MESSAGE, SENT, Talk
from tests.waiting import wait_until

from moonpool.ipc.port import compiled
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.hosting.python_backend import PythonBackend
from moonpool.runtime.model.protobuf import BadProtobuf
from moonpool.runtime.server.grpc.infer_request import InferMessage, begun

LARGE = 200_000
PADDED = 8
Serve = Callable[..., Served]


@pytest.fixture
def talk() -> Talk:
    return Talk()


# The session


def coming(talk: Talk, data: bytes) -> tuple[memoryview, bytes]:
    """Place a large message whose first bytes are fed. Returns its memory, and the bytes that were fed."""
    fed = frame(DATA, END_STREAM, 1, message(data))[: 9 + 5 + 1000]
    events, has_all = talk.session.feed(fed, len(fed))
    assert (events, has_all) == ([(COMING, 1, data[:1000], len(data))], False)
    memory = memoryview(bytearray(len(data)))
    assert talk.session.place(1, memory)
    assert talk.session.feed(fed, len(fed)) == ([], True)
    return memory, fed


def test_a_large_message_is_received_into_memory_of_the_callers(talk: Talk) -> None:
    talk.begin()
    data = np.random.default_rng(1).bytes(LARGE)
    memory, _ = coming(talk, data)
    room = talk.session.room()
    assert room is not None
    # Nothing but the rest of this frame is received there.
    assert len(room) == LARGE - 1000
    room[:50_000] = data[1000:51_000]
    assert talk.feed(room[:50_000]) == []  # type: ignore[arg-type]
    rest = talk.session.room()
    assert rest is not None
    rest[:] = data[51_000:]

    events = talk.feed(rest)  # type: ignore[arg-type]

    assert events[0][:2] == (MESSAGE, 1)
    assert events[0][2] is memory
    assert memory == data
    assert talk.session.room() is None


def test_no_room_reaches_beyond_a_frame_and_none_is_in_padding(talk: Talk) -> None:
    talk.begin()
    data = bytes(LARGE)
    whole = message(data)
    first = frame(DATA, 0, 1, whole[:100_000])
    talk.session.feed(first[:5000], 5000)
    talk.session.place(1, memoryview(bytearray(LARGE)))
    talk.session.feed(first[:5000], 5000)
    room = talk.session.room()
    assert room is not None
    assert len(room) == 9 + 100_000 - 5000
    assert talk.feed(room) == []  # type: ignore[arg-type]
    # The next bytes are the head of a frame.
    assert talk.session.room() is None
    padded = frame(DATA, PADDED, 1, b"\x10" + whole[100_000:170_000] + bytes(16))
    talk.feed(padded[:40_000])
    assert talk.session.room() is None
    assert talk.feed(padded[40_000:]) == []
    events = talk.feed(frame(DATA, END_STREAM, 1, whole[170_000:]))
    assert (events[0][0], bytes(events[0][2])) == (MESSAGE, data)


def test_memory_of_another_size_is_refused(talk: Talk) -> None:
    talk.begin()
    assert not talk.session.place(1, memoryview(bytearray(LARGE)))
    fed = frame(DATA, END_STREAM, 1, message(bytes(LARGE)))
    talk.session.feed(fed, len(fed))
    with pytest.raises(ValueError, match=f"has {LARGE} bytes, and its memory 3"):
        talk.session.place(1, memoryview(bytearray(3)))
    with pytest.raises(BufferError):
        talk.session.place(1, memoryview(bytes(LARGE)))
    with pytest.raises(ValueError, match="the same buffer"):
        talk.session.feed(fed[:10], 10)


def test_the_memory_is_let_go_with_the_stream(talk: Talk) -> None:
    talk.begin()
    fed = frame(DATA, 0, 1, message(bytes(LARGE))[:1000])
    talk.session.feed(fed, len(fed))
    memory = memoryview(bytearray(LARGE))
    assert talk.session.place(1, memory)
    assert talk.feed(fed) == []
    with pytest.raises(BufferError):
        memory.release()
    talk.feed(frame(RESET, 0, 1, b"\0\0\0\x08"))
    memory.release()


def test_a_large_message_behind_another_one_may_be_placed(talk: Talk) -> None:
    talk.begin()
    data = np.random.default_rng(2).bytes(LARGE)
    assert talk.feed(frame(DATA, 0, 1, message(b"small") + message(data)))[0][2] == b"small"
    found = talk.session.take(1)
    assert found is not None
    assert found[1:] == (2, LARGE)
    assert found[0] == data[: len(found[0] or b"")]
    memory = memoryview(bytearray(LARGE))
    assert talk.session.place(1, memory)
    found = talk.session.take(1)
    assert found is not None
    assert memory is found[0]  # type: ignore[comparison-overlap]
    assert memory == data


def test_large_pieces_of_a_message_leave_as_views(talk: Talk) -> None:
    talk.begin()
    head, tensor, more = b"head", np.random.default_rng(3).bytes(40_000), bytes(10_000)
    memory = memoryview(bytearray(tensor))
    assert talk.session.send(1, (head, memory, b"", b"tag", more, b""), False, True, 0, None)
    parts, size_bytes, events, _ = talk.session.out()

    assert isinstance(parts, list)
    assert size_bytes == sum(map(len, parts))
    assert memory[:1].obj in [part.obj for part in parts if isinstance(part, memoryview)]
    body = b"".join(each.body for each in frames(b"".join(parts)) if each.kind == DATA)
    assert body == message(head + tensor + b"tag" + more)
    assert (SENT, 1) in events


def test_a_message_has_bytes(talk: Talk) -> None:
    talk.begin()
    with pytest.raises(OverflowError):
        talk.session.send(1, (), False, False, 0, None)
    with pytest.raises(TypeError):
        talk.session.send(1, (b"x", "text"), False, False, 0, None)  # type: ignore[arg-type]
    assert talk.session.replenish()[0] == 0


# Requests


def asked(*tensors: bytes) -> Any:
    request = messages.ModelInferRequest(model_name="mine", id="7")
    for number, tensor in enumerate(tensors):
        request.inputs.add(name=f"I{number}", datatype="UINT8", shape=[len(tensor)])
        request.raw_input_contents.append(tensor)
    return request


def placed(data: bytes) -> InferMessage:
    found = begun(data[:4096])
    assert found is not None
    found.place(np.frombuffer(bytearray(data), np.uint8))
    return found


@pytest.mark.promise(
    "gRPC", "A stub that writes into the memory of a request which is still coming cannot make another request of it."
)
def test_nothing_but_sizes_of_tensors_is_read_where_stubs_write() -> None:
    data = asked(bytes(LARGE), b"second").SerializeToString()
    found = placed(data)
    place = data.index(b"mine")
    found.memory[place : place + 4] = b"them"

    whole = found.complete()

    assert (whole.model, whole.request_id) == ("mine", "7")
    # The second tensor becomes a name of another model.
    found = placed(data)
    found.memory[len(data) - 8] = 1 << 3 | 2
    with pytest.raises(InvalidRequest, match="in the order of their numbers"):
        found.complete()


def test_a_request_without_tensors_in_its_first_bytes_is_not_placed() -> None:
    assert begun(asked().SerializeToString()) is None
    long = messages.ModelInferRequest(model_name="x" * 5000, raw_input_contents=[bytes(LARGE)])
    with pytest.raises(BadProtobuf):
        begun(long.SerializeToString()[:4096])


def test_unknown_fields_behind_the_tensors_are_left_out() -> None:
    unknown = b"\x98\x06\x05" + b"\xa2\x06\x02hi" + b"\xa5\x06abcd" + b"\xa1\x06abcdefgh"
    found = placed(asked(bytes(LARGE)).SerializeToString() + unknown)
    assert found.complete().model == "mine"
    for broken in (b"\xa2\x06\x09hi", b"\xa5\x06abc", b"\x98\x06", b"\x9b\x06", b"\x3a\x7f"):
        with pytest.raises(BadProtobuf):
            placed(asked(bytes(LARGE)).SerializeToString() + broken).complete()


# The server


def wanted(value: np.ndarray[Any, Any]) -> list[triton.InferInput]:
    found = triton.InferInput("X", list(value.shape), "FP32")
    found.set_data_from_numpy(value)
    return [found]


@pytest.fixture
def served(serve: Serve) -> Served:
    started = serve()
    started.runtime.load("echo", E2E_MODELS / "echo.py", config=ECHO)
    return started


@pytest.mark.promise(
    "gRPC", "The tensors of a large request are received into the memory that the model reads: nobody copies them."
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_nobody_copies_a_large_request(served: Served, monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    copied: list[int] = []
    write = SharedRegion.write

    def spy(region: SharedRegion, offset: int, array: np.ndarray[Any, Any]) -> None:
        copied.append(array.nbytes)
        write(region, offset, array)

    def copied_bytes() -> int:
        by_the_port: int = compiled.counts()["copied_bytes"] if compiled is not None else 0
        return sum(copied) + by_the_port

    monkeypatch.setattr(SharedRegion, "write", spy)
    client = served.client()
    before = copied_bytes()
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error or result))
    for size in (1000, 30_000, 1 << 18):
        given = np.random.default_rng(size).random(size, np.float32)
        for _ in range(2):
            if is_stream:
                client.async_stream_infer("echo", wanted(given))
            else:
                answers.append(client.infer("echo", wanted(given)))
        wait_until(lambda: len(answers) == 2)
        for result in answers:
            assert np.array_equal(result.as_numpy("OUT_X"), given)
        answers.clear()
    client.stop_stream()
    assert copied_bytes() - before < 64 << 10
    # What is compressed cannot be received there.
    client.infer("echo", wanted(given), compression_algorithm="gzip")
    assert copied_bytes() - before > given.nbytes


def begin_upload(client: RawClient, stream: int, size_bytes: int) -> None:
    """Announce a large request, and send its first bytes."""
    request = messages.ModelInferRequest(model_name="echo")
    request.inputs.add(name="X", datatype="FP32", shape=[size_bytes // 4])
    head = request.SerializeToString() + b"\x3a"
    digits, left = b"", size_bytes
    while left > 127:
        digits, left = digits + bytes([left & 127 | 128]), left >> 7
    head += digits + bytes([left])
    client.send(call(stream))
    prefix = struct.pack("!BI", 0, len(head) + size_bytes)
    client.send(frame(DATA, 0, stream, prefix + head + bytes(1000)))


@pytest.mark.promise(
    "gRPC",
    "A large request takes its memory when its first bytes come, up to a share for each client; if it is "
    "cancelled, the memory is free again.",
)
def test_a_client_that_only_announces_gets_no_more_than_its_share(served: Served) -> None:
    memory = PythonBackend.memory_of(served.service.models.find("echo", None).model)
    with RawClient(served.server.port) as client:
        for number in range(4):
            begin_upload(client, 2 * number + 1, 40 << 20)
        wait_until(lambda: len(served.server.calls) == 4)
        wait_until(lambda: served.port.awaited_bytes > 0)
        assert 40 << 20 < served.port.awaited_bytes <= 64 << 20
        client.send(frame(RESET, 0, 1, b"\0\0\0\x08"))
        wait_until(lambda: served.port.awaited_bytes == 0)
    # The client has gone with the others, and there is room again.
    wait_until(lambda: not served.server.calls)
    taken = memory.size_bytes
    with ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(RawClient(served.server.port))
            begin_upload(client, 1, 40 << 20)
        wait_until(lambda: served.port.awaited_bytes > 2 * (40 << 20))
        client.next(WINDOW_UPDATE)
        assert memory.size_bytes <= 5 * taken
    wait_until(lambda: served.port.awaited_bytes == 0)


@pytest.mark.promise(
    "gRPC",
    "A large request that does not come ends after a time, also if its client pings meanwhile, and its memory is free "
    "again.",
)
def test_a_large_request_that_does_not_come_is_ended(serve: Serve) -> None:
    served = serve(read_timeout_ms=3000, http2_max_ping_strikes=0)
    served.runtime.load("echo", E2E_MODELS / "echo.py", config=ECHO)
    with RawClient(served.server.port) as client:
        begin_upload(client, 1, 40 << 20)
        wait_until(lambda: served.port.awaited_bytes > 40 << 20)

        def is_ended() -> bool:
            client.send(frame(PING, 0, 0, bytes(8)))
            return bool(served.port.awaited_bytes == 0)

        wait_until(is_ended)
        assert client.next(HEADERS).stream == 1
        wait_until(lambda: not served.server.calls)
        # The connection goes on.
        client.send(call(3, STREAM))
        wait_until(lambda: len(served.server.calls) == 1)


def test_a_large_request_that_comes_may_take_its_time(served: Served) -> None:
    with RawClient(served.server.port) as client:
        # Only then may it send as much as the server's settings say.
        client.send(frame(SETTINGS, ACK))
        begin_upload(client, 1, 40 << 20)
        wait_until(lambda: served.port.awaited_bytes > 0)
        port = served.port
        [connection] = port.clients.open
        # Bytes for two minutes at the least rate.
        for _ in range(128):
            client.send(frame(DATA, 0, 1, bytes(16 << 10)))
        wait_until(lambda: connection.session.filled(1) > 2 << 20)

        async def is_open_after(passed_s: float) -> bool:
            [call] = served.server.calls
            call.look(port.now + passed_s, 60.0)  # type: ignore[attr-defined]
            return bool(served.port.awaited_bytes > 0 and not call._is_over)

        assert served.server.run(is_open_after(180.0))
        assert not served.server.run(is_open_after(200.0))
