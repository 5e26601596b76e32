"""Clients that go away: their requests leave the queue, and models see that they are cancelled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.inside import hosted_in
from tests.server.grpc.asking import add_sub, text
from tests.server.grpc.serving import TIMEOUT_S, Served, messages
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.promise(
        "Tensors and requests of clients",
        "A request can be cancelled while it is queued or executes. An event loop gets no "
        "outcome of a request that it cancelled.",
    ),
    pytest.mark.promise(
        "gRPC",
        "If a client cancels, its deadline passes or its connection ends, its request "
        "leaves the queue, and the model can see that it is cancelled.",
    ),
]

Serve = Callable[..., Served]


def idle(served: Served) -> bool:
    scheduler = hosted_in(served.runtime, "waits").scheduler
    return not scheduler.queued and not scheduler.executing and not served.server.calls


def test_a_call_that_is_cancelled_cancels_its_request(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits", "add_sub")
    stub = served.stub()
    path = tmp_path / "asked"
    future = stub.ModelInfer.future(text("waits", "PATH", str(path)), timeout=6 * TIMEOUT_S)
    wait_until(lambda: path.with_suffix(".begun").exists())

    future.cancel()

    wait_until(lambda: path.with_suffix(".cancelled").exists())
    wait_until(lambda: idle(served))
    assert stub.ModelInfer(add_sub(), timeout=TIMEOUT_S).model_name == "add_sub"
    text_of_metrics = served.service.metrics.text()
    assert 'moonpool_frontend_requests_total{protocol="grpc",status="CANCELLED"} 1' in (text_of_metrics)


def test_a_deadline_cancels_a_request(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits")
    path = tmp_path / "asked"
    stub = served.stub()

    with pytest.raises(grpc.RpcError) as raised:
        stub.ModelInfer(text("waits", "PATH", str(path)), timeout=0.5)

    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # The server may be so late that it reads the request now. This one comes over the same connection.
    assert stub.ServerLive(messages.ServerLiveRequest(), timeout=TIMEOUT_S).live
    wait_until(lambda: idle(served))
    assert path.with_suffix(".cancelled").exists() == path.with_suffix(".begun").exists()


def test_a_request_in_the_queue_is_never_executed(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits")
    stub = served.stub()
    first, second = tmp_path / "first", tmp_path / "second"
    one = stub.ModelInfer.future(text("waits", "PATH", str(first)), timeout=6 * TIMEOUT_S)
    wait_until(lambda: first.with_suffix(".begun").exists())
    two = stub.ModelInfer.future(text("waits", "PATH", str(second)), timeout=6 * TIMEOUT_S)
    scheduler = hosted_in(served.runtime, "waits").scheduler
    wait_until(lambda: scheduler.queued == 1)

    two.cancel()

    wait_until(lambda: scheduler.queued == 0)
    first.with_suffix(".go").touch()
    assert one.result().raw_output_contents[0] == b"\2\0\0\0go"
    wait_until(lambda: idle(served))
    assert not second.with_suffix(".begun").exists()


def test_a_connection_that_ends_cancels_what_was_asked_over_it(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits")
    channel = served.channel()
    method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    path = tmp_path / "asked"
    asked = text("waits", "PATH", str(path)).SerializeToString()
    future = method.future(asked, timeout=6 * TIMEOUT_S)
    wait_until(lambda: path.with_suffix(".begun").exists())

    channel.close()
    # gRPC tells it on a thread of its own.
    wait_until(future.done)

    wait_until(lambda: path.with_suffix(".cancelled").exists())
    wait_until(lambda: idle(served))


@pytest.mark.promise("gRPC", "A drain finishes the requests in …")
def test_a_drain_whose_time_is_over_cancels_what_is_left(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits")
    path = tmp_path / "asked"
    asked = text("waits", "PATH", str(path))
    future = served.stub().ModelInfer.future(asked, timeout=6 * TIMEOUT_S)
    wait_until(lambda: path.with_suffix(".begun").exists())

    assert not served.server.drain(0.1)

    assert future.code() is not grpc.StatusCode.OK
    wait_until(lambda: path.with_suffix(".cancelled").exists())


@pytest.mark.promise(
    "gRPC",
    "A drain finishes the requests in flight, accepts no new ones, and cancels those that "
    "are left when its time is over. Streams end once they have their responses.",
)
def test_a_drain_finishes_what_is_there(serve: Serve, tmp_path: Path) -> None:
    served = serve("waits")
    path = tmp_path / "asked"
    asked = text("waits", "PATH", str(path))
    future = served.stub().ModelInfer.future(asked, timeout=6 * TIMEOUT_S)
    wait_until(lambda: path.with_suffix(".begun").exists())
    future.add_done_callback(lambda _: None)
    path.with_suffix(".go").touch()

    assert served.server.drain(TIMEOUT_S)

    assert future.result().raw_output_contents[0] == b"\2\0\0\0go"
