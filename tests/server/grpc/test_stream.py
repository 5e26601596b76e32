"""ModelStreamInfer: many requests over one call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.inside import hosted_in
from tests.server.grpc.asking import add_sub, packed, repeat, text
from tests.server.grpc.serving import TIMEOUT_S, Served
from tests.server.grpc.streaming import Requests, ask_all, told
from tests.waiting import wait_until

Serve = Callable[..., Served]
ZEROS = np.zeros(4, np.float32).tobytes()
NUMBERS = [np.int32(number).tobytes() for number in range(3)]


def sums(first: float) -> list[bytes]:
    """Return the outputs of the adding model for this value and zero."""
    data = np.full(4, first, np.float32).tobytes()
    return [data, data]


def add(first: float, request_id: str) -> Any:
    return add_sub(sums(first)[0], ZEROS, request_id)


@pytest.mark.promise(
    "gRPC",
    "Responses in a stream come in the order of the requests, and those of decoupled "
    "models when they are sent. Errors have the id of their request, and the stream goes "
    "on.",
)
def test_responses_come_in_the_order_of_the_requests(serve: Serve) -> None:
    asked = [add(number, str(number)) for number in range(300)]
    asked[7].model_name = "nope"

    responses = ask_all(serve("add_sub").stub(), *asked)

    expected: list[Any] = [("", str(n), True, sums(n)) for n in range(300)]
    expected[7] = ("Request for unknown model: 'nope' is not found", "7", None, [])
    assert responses == expected


@pytest.mark.promise("gRPC", "Responses in a stream come in …")
def test_a_slow_request_holds_those_behind_it_and_no_decoupled_one(serve: Serve, tmp_path: Path) -> None:
    stub = serve("waits", "add_sub", "repeat").stub()
    path = tmp_path / "slow"
    requests = Requests(text("waits", "PATH", str(path), "slow"), add(1, "quick"))
    call = stub.ModelStreamInfer(iter(requests), timeout=6 * TIMEOUT_S)
    requests.send(repeat(1, request_id="decoupled"))
    requests.close()

    assert told(next(call))[1] == "decoupled"
    path.with_suffix(".go").touch()
    assert [told(response)[1] for response in call] == ["slow", "quick"]


def test_responses_to_many_requests_are_mixed_and_each_has_its_id(serve: Serve) -> None:
    stub = serve("repeat", "add_sub").stub()
    asked = [repeat(5, request_id=f"r{n}") for n in range(20)] + [add(1, "a")]

    by_id: dict[str, list[bytes]] = {}
    for _, request_id, _, tensors in ask_all(stub, *asked):
        by_id.setdefault(request_id, []).append(tensors[0])

    five = [np.int32(number).tobytes() for number in range(5)]
    assert by_id == {**{f"r{n}": five for n in range(20)}, "a": [sums(1)[0]]}


def test_in_grpc_error_mode_an_error_of_a_model_is_the_status_of_the_stream(serve: Serve) -> None:
    stub = serve("repeat").stub()
    requests = Requests(repeat(1, fail=True), repeat(1))
    metadata = (("triton_grpc_error", "true"),)
    call = stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S, metadata=metadata)

    assert told(next(call))[3] == [NUMBERS[0], b""]
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    requests.close()

    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "on purpose")


def test_bytes_that_are_no_message_end_the_stream(serve: Serve) -> None:
    method = "/inference.GRPCInferenceService/ModelStreamInfer"
    call = serve().channel().stream_stream(method)(iter([b"\xff" * 9]), timeout=TIMEOUT_S)

    with pytest.raises(grpc.RpcError) as raised:
        list(call)

    assert raised.value.code() is grpc.StatusCode.INTERNAL


def test_a_client_that_leaves_cancels_what_it_asked_for(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits")
    paths = [tmp_path / name for name in ("first", "second")]
    requests = Requests(*(text("waits", "PATH", str(path)) for path in paths))
    call = served.stub().ModelStreamInfer(iter(requests), timeout=6 * TIMEOUT_S)
    wait_until(lambda: paths[0].with_suffix(".begun").exists())

    call.cancel()
    requests.close()

    wait_until(lambda: paths[0].with_suffix(".cancelled").exists())
    scheduler = hosted_in(served.runtime, "waits").scheduler
    wait_until(lambda: not scheduler.queued and not scheduler.executing)
    assert not paths[1].with_suffix(".begun").exists()


def have_ended(served: Served, count: int) -> bool:
    """Tell if so many requests to `repeat` have been executed, and nothing of them is left."""
    scheduler = hosted_in(served.runtime, "repeat").scheduler
    executed = served.runtime.statistics("repeat")["execution_count"]
    return executed == count and not scheduler.executing and not len(scheduler.open_requests)


@pytest.mark.promise(
    "gRPC", "If a client does not read its stream, the stream ends at a limit and its requests are cancelled."
)
def test_a_client_that_does_not_read_is_left_when_too_much_waits_for_it(serve: Serve) -> None:
    served = serve("repeat", "add_sub", max_backlog_bytes=8 << 20)
    requests = Requests(repeat(2000, size=1 << 16))
    call = served.stub().ModelStreamInfer(iter(requests), timeout=6 * TIMEOUT_S)
    server = served.server

    wait_until(lambda: have_ended(served, 1), 60.0)

    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    requests.close()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    # The server still serves other clients.
    assert served.stub().ModelInfer(add_sub(), timeout=TIMEOUT_S).model_name == "add_sub"
    wait_until(lambda: not server.calls)


@pytest.mark.promise("What the server bears, and whom it answers like", "The bytes that wait for all …")
def test_the_client_with_the_most_unread_bytes_is_disconnected(serve: Serve) -> None:
    served = serve("repeat", max_backlogs_bytes=48 << 20)
    few, many = Requests(repeat(400, size=1 << 16)), Requests(repeat(2000, size=1 << 16))
    stub = served.stub()
    patient = stub.ModelStreamInfer(iter(few), timeout=6 * TIMEOUT_S)
    wait_until(lambda: sum(served.unread_bytes) > 1 << 20, what="some to wait")
    greedy = stub.ModelStreamInfer(iter(many), timeout=6 * TIMEOUT_S)

    wait_until(lambda: have_ended(served, 2), 60.0)

    with pytest.raises(grpc.RpcError) as raised:
        list(greedy)
    many.close()
    few.close()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(list(patient)) == 400
    wait_until(lambda: not served.unread_bytes)


@pytest.mark.promise("gRPC", "Hundreds of streams that are dropped leave nothing behind.")
def test_hundreds_of_streams_that_are_dropped_leave_nothing(serve: Serve) -> None:
    served = serve("add_sub")
    calls = []
    for number in range(300):
        if number % 50 == 0:
            stub = served.stub()
        own = Requests(add(1, "x"))
        calls.append((own, stub.ModelStreamInfer(iter(own), timeout=6 * TIMEOUT_S)))
    for number, (own, call) in enumerate(calls):
        if number % 2:
            assert told(next(call))[1] == "x"
        call.cancel()
        own.close()

    server = served.server
    wait_until(lambda: not server.calls)
    assert served.stub().ModelInfer(add_sub(), timeout=TIMEOUT_S).model_name == "add_sub"


@pytest.mark.promise("gRPC", "A drain finishes the requests in …")
def test_a_drain_ends_streams_when_what_was_asked_is_answered(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits")
    idle, busy = Requests(), Requests(text("waits", "PATH", str(tmp_path / "asked")))
    path = tmp_path / "asked"
    stub = served.stub()
    calls = [stub.ModelStreamInfer(iter(each), timeout=6 * TIMEOUT_S) for each in (idle, busy)]
    wait_until(lambda: path.with_suffix(".begun").exists())
    threading.Timer(0.1, path.with_suffix(".go").touch).start()

    assert served.server.drain(TIMEOUT_S)

    assert told(next(calls[1]))[3] == [packed([b"go"])]
    for call in calls:
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    idle.close()
    busy.close()
