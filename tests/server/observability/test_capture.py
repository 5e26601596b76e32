"""Requests that a server captures, and `moonpool bench --replay` sends again."""

from __future__ import annotations

import base64
import json
import os
import queue
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.cli.shell import CommandLine, write_model
from tests.server.running import RunningServer, running, starting
from tests.waiting import wait_until

from moonpool.benchmarks.data import read_capture
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.server.capture import Capture

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            for r in requests
        ]
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [
  { name: "X" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } },
  { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] optional: true }
]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2, 2 ] } ]
"""
MOST_S = 60.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "echo", ECHO, CONFIG)
    return tmp_path / "models"


def ask_http(server: RunningServer, values: list[float], texts: list[str] | None = None) -> None:
    inputs: list[dict[str, Any]] = [{"name": "X", "datatype": "FP32", "shape": [1, 4], "data": values}]
    if texts is not None:
        inputs.append({"name": "TEXT", "datatype": "BYTES", "shape": [1, len(texts)], "data": texts})
    status, body = server.get("/v2/models/echo/infer", "POST", json.dumps({"inputs": inputs}).encode())
    assert status == 200, body


def ask_grpc(server: RunningServer, values: list[float]) -> None:
    import tritonclient.grpc as client

    tensor = client.InferInput("X", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.array([values], np.float32))
    with client.InferenceServerClient(server.grpc) as connection:
        connection.infer("echo", [tensor])


def ask_stream(server: RunningServer, requests: list[list[float]]) -> None:
    """Send requests on one stream, and wait for their answers."""
    import tritonclient.grpc as client

    answers: queue.Queue[tuple[object, object]] = queue.Queue()
    with client.InferenceServerClient(server.grpc) as connection:
        connection.start_stream(lambda result, error: answers.put((result, error)))
        for values in requests:
            tensor = client.InferInput("X", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.array([values], np.float32))
            connection.async_stream_infer("echo", [tensor])
        for _ in requests:
            _, error = answers.get(timeout=MOST_S)
            assert error is None
        connection.stop_stream()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.promise(
    "Watching a server",
    "With `--capture`, the inputs of requests are written to a new file that only its user may read, and "
    "`moonpool bench --replay` sends them again at their times.",
)
def test_what_clients_ask_is_asked_again(cli: CommandLine, repository: Path) -> None:
    path = cli.folder / "captured"
    with running(repository, f"--capture={path}") as server:
        assert "the file has the inputs as clients sent them" in server.text()
        ask_http(server, [1, 2, 3, 4])
        ask_grpc(server, [5, 6, 7, 8])
        ask_http(server, [1, 2, 3, 4], ["a", "ü", ""])

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    mix, schedule = read_capture(path, "echo", 1.0)
    arrays = [mix.requests[number].arrays() for number in mix.order]
    assert [each["X"].tolist() for each in arrays] == [
        [[1, 2, 3, 4]], [[5, 6, 7, 8]], [[1, 2, 3, 4]],
    ]  # fmt: skip
    assert arrays[2]["TEXT"].tolist() == [[b"a", "ü".encode(), b""]]

    # The same requests, at the same times, come to another server.
    again = cli.folder / "again"
    with running(repository, f"--capture={again}") as other:
        ended = cli(
            "bench", "echo", "--url", f"http://{other.http}", "--replay", path, "--speed", "2",
            "--seconds", "0.05", "--warm-up", "0", "--windows", "1", "--save", ".", "--export", "jsonl",
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    tensors = [line["inputs"] for line in lines(path)[1:]]
    # The first one is sent once before the window, to see that it is answered. A machine that is too slow leaves some
    # out.
    sent = [line["inputs"] for line in lines(again)[1:]]
    [point] = json.loads((cli.folder / "echo.json").read_text())["series"]
    assert len(sent) == 1 + point["requests"]
    assert point["requests"] + point["unsent"] == 3
    assert [each for each in sent if each in tensors] == sent
    # Each was due at its time, twice as fast.
    due = [line["at_s"] for line in lines(cli.folder / "echo.requests.jsonl")]
    came = [line["at_s"] for line in lines(path)[1:]]
    planned = [(each - came[0]) / 2 for each in came] if len(due) == 3 else due
    assert due == pytest.approx(planned, abs=1e-5)
    assert schedule.times_ns.tolist() == pytest.approx([(each - came[0]) * 1e9 for each in came], abs=1e4)


def test_streams_and_generate_are_captured(cli: CommandLine, repository: Path) -> None:
    path = cli.folder / "captured"
    with running(repository, f"--capture={path}") as server:
        ask_stream(server, [[1, 2, 3, 4], [5, 6, 7, 8]])
        for end in ("generate", "generate_stream"):
            values = json.dumps({"X": [9, 9, 9, 9], "TEXT": ["a"]}).encode()
            status, body = server.get(f"/v2/models/echo/{end}", "POST", values)
            assert status == 200, body

    mix, _ = read_capture(path, "echo", 1.0)
    arrays = [mix.requests[number].arrays() for number in mix.order]
    assert [each["X"].tolist() for each in arrays] == [
        [[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 9, 9, 9]], [[9, 9, 9, 9]],
    ]  # fmt: skip
    assert [each["TEXT"].tolist() for each in arrays[2:]] == [[[b"a"]], [[b"a"]]]


def test_one_of_some_requests_is_captured(cli: CommandLine, repository: Path) -> None:
    path = cli.folder / "captured"
    with running(repository, f"--capture={path}", "--capture-rate=3") as server:
        for number in range(7):
            ask_http(server, [number] * 4)

    data = [base64.b64decode(line["inputs"][0]["b64"]) for line in lines(path)[1:]]
    assert [np.frombuffer(each, np.float32)[0] for each in data] == [2, 5]


@pytest.mark.parametrize("is_link", [False, True])
def test_an_existing_file_is_refused(cli: CommandLine, repository: Path, *, is_link: bool) -> None:
    target = cli.folder / "precious"
    target.write_text("keep")
    path = cli.folder / "link" if is_link else target
    if is_link:
        path.symlink_to(target)
    with starting(repository, f"--capture={path}") as server:
        assert server.wait() == 2
        assert "exists already: name a new file" in server.text()
    assert target.read_text() == "keep"


# Without a server: the queue, the bounds, and a disk that fails.

MODEL = ModelConfig.from_dict(
    {
        "name": "m",
        "backend": "python",
        "input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [-1]}],
        "output": [{"name": "Y", "data_type": "TYPE_UINT8", "dims": [-1]}],
    }
)


class _Model:
    name = "m"
    version = 1
    config = MODEL


def request(size_bytes: int) -> InferenceRequest:
    return Signature(MODEL).request({"X": np.full(size_bytes, 7, np.uint8)})


def test_a_file_has_no_more_bytes_than_it_may_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "captured"
    capture = Capture(str(path), rate=1, most_bytes=1000)
    for _ in range(5):
        capture.take(_Model(), request(200))
    capture.close()

    assert path.stat().st_size <= 1000
    assert len(lines(path)) == 3
    assert not capture.is_on
    assert "has all the bytes that it may have" in caplog.text


def put_in_place_of(path: Path, file: int) -> None:
    """Have what this process writes to a file that it has open go to another one."""
    (there,) = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]
    os.dup2(file, int(there), inheritable=False)
    os.close(file)


def test_requests_are_left_out_and_counted_while_the_disk_is_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moonpool.server")
    capture = Capture(str(tmp_path / "captured"), rate=1, most_bytes=64 << 20)
    reads, writes = os.pipe()
    put_in_place_of(tmp_path / "captured", writes)
    capture.take(_Model(), request(1 << 20))
    for _ in range(5000):
        # Returns at once, although nobody reads the pipe, which the first request fills.
        capture.take(_Model(), request(1))
    end = threading.Thread(target=capture.close)
    end.start()
    with open(reads, "rb") as file:
        written = len(file.readlines())
    end.join()

    assert 4096 <= written <= 4097
    assert caplog.text.count("some are left out") == 1
    assert f"Captured {written} requests" in caplog.text
    assert f"{5001 - written} were left out" in caplog.text


def test_requests_that_are_not_captured_are_not_looked_at(tmp_path: Path) -> None:
    capture = Capture(str(tmp_path / "captured"), rate=2, most_bytes=1 << 20)
    nothing: Any = object()
    capture.take(_Model(), nothing)
    capture.take(_Model(), request(10))
    capture.close()

    assert len(lines(tmp_path / "captured")) == 2


def test_a_disk_that_fails_ends_the_capture_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture = Capture(str(tmp_path / "captured"), rate=1, most_bytes=1 << 20)
    put_in_place_of(tmp_path / "captured", os.open("/dev/full", os.O_WRONLY))
    capture.take(_Model(), request(10))
    wait_until(lambda: not capture.is_on, MOST_S)
    capture.take(_Model(), request(10))
    capture.close()

    assert "cannot be written: No space left on device" in caplog.text


def test_a_line_that_a_killed_server_left_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "captured"
    capture = Capture(str(path), rate=1, most_bytes=1 << 20)
    capture.take(_Model(), request(3))
    capture.close()
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[1][:30])

    mix, _ = read_capture(path, "m", 1.0)
    assert [each.arrays()["X"].tolist() for each in mix.requests] == [[7, 7, 7]]


def test_a_long_tensor_is_encoded_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "captured"
    capture = Capture(str(path), rate=1, most_bytes=1 << 20)
    capture.take(_Model(), request(500_000))
    capture.close()

    [data] = [base64.b64decode(line["inputs"][0]["b64"]) for line in lines(path)[1:]]
    assert data == bytes([7]) * 500_000
