"""Responses that wait for a slow reader are bounded: in a stream that nobody reads, and before a slow step of an
ensemble.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ensemble_repositories import chain, write_ensemble, write_model
from tests.server.http.serving import Serving
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.errors import BacklogFull
from moonpool.runtime.model.request import Response
from moonpool.runtime.schedule import backlog
from moonpool.runtime.schedule.backlog import ResponseBacklog, held_bytes

pytestmark = pytest.mark.promise(
    "Limits",
    "Responses that wait for a slow client, or before a slow step of an ensemble, take no more memory than "
    "`MOONPOOL_BACKLOG_BYTES`.",
)

X = np.array([1, 2, 3], np.float32)
# Sends one and the same tensor until the request is cancelled, and writes that down.
FLOODS = """
import os

import triton_python_backend_utils as pb_utils

CANCELLED = os.path.join(os.path.dirname(__file__), "cancelled")


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            tensor = pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
            while not request.is_cancelled():
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            open(CANCELLED, "w").close()
"""
# Waits while the file HELD lies beside it.
HOLDS = """
import os
import time

import triton_python_backend_utils as pb_utils

HELD = os.path.join(os.path.dirname(__file__), "HELD")


class TritonPythonModel:
    def execute(self, requests):
        while os.path.exists(HELD):
            time.sleep(0.002)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(each, "X").as_numpy())])
            for each in requests
        ]
"""
LIMIT = 'parameters { key: "MOONPOOL_BACKLOG_BYTES" value { string_value: "1M" } }'
DECOUPLED = f"model_transaction_policy {{ decoupled: true }} {LIMIT}"


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[moonpool.Runtime]:
    write_model(tmp_path, "floods", FLOODS, more=DECOUPLED)
    write_model(tmp_path, "holds", HOLDS)
    write_ensemble(tmp_path, "slow", chain(["floods", "holds"]), more=LIMIT)
    gated = chain(["floods", "holds"])
    write_ensemble(tmp_path, "gated", gated, more=LIMIT)
    file = tmp_path / "gated" / "config.pbtxt"
    file.write_text(file.read_text().replace("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 2"))
    with moonpool.Runtime(tmp_path) as runtime:
        yield runtime


def was_cancelled(folder: Path) -> bool:
    return (folder / "floods" / "1" / "cancelled").exists()


def test_a_stream_that_nobody_reads_ends(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    runtime.load("floods")
    with runtime.stream("floods", {"X": X}) as stream:
        wait_until(lambda: was_cancelled(tmp_path))
        with pytest.raises(BacklogFull, match="MOONPOOL_BACKLOG_BYTES of model 'floods' allows 1048576"):
            for _ in stream:
                pass
        assert list(stream) == []


@pytest.mark.parametrize("name", ["slow", "gated"])
def test_an_ensemble_whose_step_is_too_slow_ends(runtime: moonpool.Runtime, tmp_path: Path, name: str) -> None:
    held = tmp_path / "holds" / "1" / "HELD"
    held.touch()
    runtime.load(name)
    with pytest.raises(BacklogFull, match=f"MOONPOOL_BACKLOG_BYTES of model '{name}'"):
        list(runtime.stream(name, {"A": X}))
    wait_until(lambda: was_cancelled(tmp_path))
    held.unlink()
    # Nothing that waited is left in the step's queue.
    assert runtime.infer("holds", {"X": X})["Y"].tolist() == X.tolist()


def test_a_client_that_reads_no_events_is_given_up(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    runtime.load("floods")
    body = json.dumps({"X": X.tolist()}).encode()
    head = b"POST /v2/models/floods/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with Serving(runtime) as serving, socket.create_connection(("127.0.0.1", serving.port)) as client:
        client.sendall(head + body)
        wait_until(lambda: was_cancelled(tmp_path))


def test_the_largest_ends_if_too_much_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    backlogs = [
        ResponseBacklog(name, 1 << 40, lambda error, name=name: ended.append(f"{name}: {error}"))  # type: ignore[misc]
        for name in "abc"
    ]
    monkeypatch.setattr(backlog, "_MOST_BYTES", 10 << 20)
    for each, mebibytes in zip(backlogs, (3, 5, 3), strict=True):
        each.came_bytes += mebibytes << 20
        each.look()
    assert [text.partition(":")[0] for text in ended] == ["b"]
    assert "MOONPOOL_BACKLOG_BYTES" in ended[0]
    for each in backlogs:
        each.close()
    # None of them counts any more.
    alone = ResponseBacklog("d", 1 << 40, lambda error: ended.append(str(error)))
    alone.came_bytes += 9 << 20
    alone.look()
    assert len(ended) == 1
    alone.close()


def test_small_backlogs_count_together_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    backlogs = [ResponseBacklog("m", 1 << 40, lambda error: ended.append(str(error))) for _ in range(200)]
    monkeypatch.setattr(backlog, "_MOST_BYTES", 10 << 20)
    for each in backlogs:
        each.came_bytes += 100 << 10
        each.look()
    assert sum(not each.is_closed for each in backlogs) * (100 << 10) <= 12 << 20
    assert "the most of them for this request to model 'm'" in ended[0]
    for each in backlogs:
        each.close()


@pytest.mark.parametrize(
    "response",
    [
        Response({}, {"n" * 5000: "v" * 5000}),
        Response({"Y": np.array([b"s" * 5000, b"t" * 5000], object)}),
        Response({f"Y{number}": X for number in range(20)}),
        Response({}, {"\U0001f600" * 2500: 1}),
    ],
)
def test_names_strings_and_arrays_count(response: Any) -> None:
    assert held_bytes(response) > 10_000
