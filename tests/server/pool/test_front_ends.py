"""A server with front ends, as its clients see it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.e2e.hosting import MODELS
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.repositories import CONFIG, write
from tests.server.running import RunningServer, running, starting
from tests.waiting import wait_until

SHARED = """
backend: "python"
input [{ name: "HOW" data_type: TYPE_STRING dims: [1] }, { name: "X" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU }]
parameters [{ key: "MOONPOOL_ENVIRONMENT" value { string_value: "GATE" } }]
"""
# No request waits longer for the instance.
TIMED = (
    SHARED + "dynamic_batching { default_queue_policy { default_timeout_microseconds: 200000 } }"
)
RESPONDER = """
backend: "python"
input [{ name: "HOW" data_type: TYPE_STRING dims: [1] }, { name: "N" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "Y" data_type: TYPE_INT32 dims: [-1] }]
model_transaction_policy { decoupled: true }
"""
SEQUENCES = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
sequence_batching { max_sequence_idle_microseconds: 5000000 }
"""
# What a front end answered before, it has told the main process of, also on a busy machine.
LAST_S = 0.5
TO_TIMED: dict[str, Any] = {"model": "timed"}
LIVES = ("--model-control-mode=explicit", "--frontends=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write(folder, "echo")
    write(folder, "shared", (MODELS / "shared.py").read_text(), SHARED)
    write(folder, "timed", (MODELS / "shared.py").read_text(), TIMED)
    write(folder, "responder", (MODELS / "responder.py").read_text(), RESPONDER)
    write(folder, "sequences", config=SEQUENCES)
    return folder


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "gate"


@pytest.fixture(scope="module")
def server(folder: Path, gate: Path) -> Iterator[RunningServer]:
    traces = f"--trace-config=triton,file={gate.parent / 'trace'}"
    everything = (*LIVES, "--load-model=*", traces)
    with running(folder, *everything, variables={"GATE": str(gate)}) as server:
        yield server


def front_ends(server: RunningServer) -> list[int]:
    """Return the process ids of the front ends."""
    children = Path(f"/proc/{server.process.pid}/task")
    found: list[int] = []
    for task in children.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids = (task / "children").read_text().split()
            found += [int(pid) for pid in pids if is_front_end(pid)]
    return sorted(found)


def is_front_end(pid: str) -> bool:
    return b"front_end" in Path(f"/proc/{pid}/cmdline").read_bytes()


def listening(server: RunningServer) -> int:
    """Return the number of processes that accept connections over HTTP."""
    port = f":{server.ports['http']:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] == "0A" for row in rows)


def kill_one(server: RunningServer) -> None:
    """Kill a front end, and wait until another one has taken its place."""
    pids = front_ends(server)
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    # The sockets of a process with threads are closed only when it is reaped.
    wait_until(lambda: not Path(f"/proc/{pids[0]}").exists())
    wait_until(lambda: listening(server) == 2, 60.0)


def ask(server: RunningServer, how: str, *values: float, model: str = "shared") -> tuple[int, Any]:
    body = {
        "inputs": [
            {"name": "HOW", "datatype": "BYTES", "shape": [1], "data": [how]},
            {"name": "X", "datatype": "FP32", "shape": [len(values)], "data": values},
        ]
    }
    return server.get(f"/v2/models/{model}/infer", "POST", json.dumps(body).encode())


def succeeded(server: RunningServer, model: str) -> int:
    _, told = server.get(f"/v2/models/{model}/stats")
    return int(told["model_stats"][0]["inference_stats"]["success"]["count"])


@pytest.mark.promise(
    "Front ends",
    "`--frontends N` has N processes share the ports and feed the same stubs; every request is "
    "answered, and counted in the statistics and metrics of the server.",
)
def test_every_request_is_answered_and_counted(server: RunningServer) -> None:
    before = succeeded(server, "echo")
    wrong: list[Any] = []

    def client(first: int) -> None:
        connection = http.client.HTTPConnection(server.http, timeout=60)
        for i in range(first, first + 50):
            x = [float(i)] * 4
            row = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": x}
            connection.request("POST", "/v2/models/echo/infer", json.dumps({"inputs": [row]}))
            answer = json.loads(connection.getresponse().read())
            if answer.get("outputs", [{}])[0].get("data") != x:
                wrong.append(answer)
        connection.close()

    threads = [threading.Thread(target=client, args=(1000 * i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    wait_until(lambda: succeeded(server, "echo") - before == 12 * 50)
    pattern = r'nv_inference_request_success\{model="echo",version="1"\} (\d+)'
    connection = http.client.HTTPConnection(server.metrics, timeout=60)
    connection.request("GET", "/metrics")
    found = re.search(pattern, connection.getresponse().read().decode())
    connection.close()
    assert found is not None
    assert int(found[1]) - before >= 12 * 50


@pytest.mark.promise(
    "Watching a server",
    "Connections and answers of all front ends are counted together. Connections of a "
    "front end that has ended do not count as open.",
)
def test_connections_and_answers_of_all_front_ends_are_told(server: RunningServer) -> None:
    def answers() -> int:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
            text = response.read().decode()
        pattern = r'moonpool_frontend_requests_total\{protocol="http",status="200"\} (\d+)'
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    before = answers()
    for _ in range(20):
        assert ask(server, "twice", 1)[0] == 200
    # A request that was passed on counts once, too.
    assert server.get("/v2/models/shared")[0] == 200
    wait_until(lambda: answers() - before == 21)


def test_tritonclient_s_binary_tensors_and_errors(server: RunningServer) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("echo")["name"] == "echo"
        tensor = tritonclient.http.InferInput("IN", [1, 4], "FP32")
        tensor.set_data_from_numpy(x)
        assert np.array_equal(client.infer("echo", [tensor]).as_numpy("OUT"), x)
        assert np.array_equal(client.infer("echo", [tensor], "1").as_numpy("OUT"), x)
        for model, version, text in (
            ("nothing", "", "unknown model"),
            ("echo", "7", "version 7"),
        ):
            with pytest.raises(tritonclient.utils.InferenceServerException, match=text):
                client.infer(model, [tensor], version)


def test_a_large_body_is_answered(server: RunningServer) -> None:
    x = np.arange(300_000, dtype=np.float32)
    with tritonclient.http.InferenceServerClient(server.http) as client:
        how = tritonclient.http.InferInput("HOW", [1], "BYTES")
        how.set_data_from_numpy(np.array([b"twice"], object))
        tensor = tritonclient.http.InferInput("X", [len(x)], "FP32")
        tensor.set_data_from_numpy(x)
        for _ in range(3):
            assert np.array_equal(client.infer("shared", [how, tensor]).as_numpy("Y"), x * 2)


@pytest.mark.promise(
    "Front ends",
    "The main process answers what only one process can know: control, metadata, clients' "
    "shared memory, sequences, streams of gRPC, traced requests.",
)
def test_requests_that_need_the_main_process_are_passed_to_it(server: RunningServer) -> None:
    """Only one process has shared memory of clients, and the state of sequences."""
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    region = Path(f"/dev/shm/front-ends-{os.getpid()}")
    region.write_bytes(x.tobytes())
    try:
        with tritonclient.http.InferenceServerClient(server.http) as client:
            client.register_system_shared_memory("region", f"/{region.name}", 16)
            tensor = tritonclient.http.InferInput("IN", [1, 4], "FP32")
            tensor.set_shared_memory("region", 16)
            for _ in range(5):
                assert np.array_equal(client.infer("echo", [tensor]).as_numpy("OUT"), x)
            # JSON has more than one way to say it.
            body = (
                '{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "parameters": '
                '{"shared_memory_r\\u0065gion": "region", "shared_memory_byte_size": 16}}]}'
            )
            status, answer = server.get("/v2/models/echo/infer", "POST", body.encode())
            assert (status, answer["outputs"][0]["data"]) == (200, x.ravel().tolist())
            client.unregister_system_shared_memory("region")
            plain = tritonclient.http.InferInput("IN", [4], "FP32")
            plain.set_data_from_numpy(x[0])
            for i in range(3):
                answer = client.infer(
                    "sequences", [plain], sequence_id=5, sequence_start=i == 0, sequence_end=i == 2
                )
                assert np.array_equal(answer.as_numpy("OUT"), x[0])
    finally:
        region.unlink()


@pytest.mark.promise("Front ends", "`--frontends N` has N processes share …")
def test_grpc(server: RunningServer) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    before = succeeded(server, "echo")
    for _ in range(4):
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            assert client.is_server_ready()
            assert client.get_model_metadata("echo").name == "echo"
            tensor = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
            tensor.set_data_from_numpy(x)
            for _ in range(5):
                assert np.array_equal(client.infer("echo", [tensor]).as_numpy("OUT"), x)
            with pytest.raises(tritonclient.utils.InferenceServerException, match="unknown model"):
                client.infer("nothing", [tensor])
    wait_until(lambda: succeeded(server, "echo") - before == 20)


@pytest.mark.promise("Front ends", "The main process answers what only …")
def test_streams_of_grpc_are_passed_on(server: RunningServer) -> None:
    answers: list[Any] = []
    ended = threading.Event()

    def take(result: Any, error: Any) -> None:
        answers.append(error or int(result.as_numpy("Y")[0]))
        if len(answers) == 300:
            ended.set()

    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(take)
        how = tritonclient.grpc.InferInput("HOW", [1], "BYTES")
        how.set_data_from_numpy(np.array([b"count"], object))
        count = tritonclient.grpc.InferInput("N", [1], "INT32")
        count.set_data_from_numpy(np.array([100], np.int32))
        for _ in range(3):
            client.async_stream_infer("responder", [how, count])
        assert ended.wait(60), answers
        client.stop_stream()
    assert sorted(answers) == sorted(list(range(100)) * 3)


@pytest.mark.promise("Front ends", "The main process answers what only …")
def test_requests_are_traced_where_the_settings_are(server: RunningServer, gate: Path) -> None:
    def traced() -> int:
        return sum(file.read_text().count("HTTP_RECV_START") for file in gate.parent.glob("trace*"))

    def set_trace(**changes: object) -> None:
        assert server.get("/v2/trace/setting", "POST", json.dumps(changes).encode())[0] == 200

    assert ask(server, "twice", 1)[0] == 200
    assert traced() == 0
    set_trace(trace_level=["TIMESTAMPS"], trace_rate="1", log_frequency="1")
    try:
        # The setting reaches the front ends a moment later.
        wait_until(lambda: ask(server, "twice", 1)[0] == 200 and traced() >= 4)
    finally:
        set_trace(trace_level=["OFF"])


@pytest.mark.promise("Front ends", "No request fails while a model is loaded anew.")
def test_a_model_is_loaded_anew_while_it_is_asked(folder: Path, server: RunningServer) -> None:
    stop = threading.Event()
    wrong: list[Any] = []
    row = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [row]}).encode()
    asked = [0, 0, 0]

    def client(number: int) -> None:
        while not stop.is_set():
            status, answer = server.get("/v2/models/again/infer", "POST", body)
            asked[number] += 1
            if status != 200:
                wrong.append(answer)

    write(folder, "again")
    assert server.get("/v2/repository/models/again/load", "POST")[0] == 200
    threads = [threading.Thread(target=client, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        write(folder, "again")
        assert server.get("/v2/repository/models/again/load", "POST")[0] == 200
    enough = [each + 5 for each in asked]
    wait_until(lambda: all(each >= least for each, least in zip(asked, enough, strict=True)))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.get("/v2/repository/models/again/unload", "POST")[0] == 200
    wait_until(lambda: server.get("/v2/models/again/infer", "POST", body)[0] != 200)


def test_errors_of_all_front_ends_are_told_in_one_place(server: RunningServer) -> None:
    for _ in range(6):
        assert ask(server, "no such thing", 1)[0] == 500

    def told() -> list[dict[str, Any]]:
        _, shown = server.get("/v2/moonpool/overview")
        return [each for each in shown["errors"] if "no such thing" in each["text"]]

    wait_until(lambda: [each["requests"] for each in told()] == [6])
    (error,) = told()
    assert (error["model"], error["instance"]) == ("shared", "shared_0_0")
    assert "KeyError" in error["traceback"]


def test_the_death_of_a_stub_is_told_with_its_reason(server: RunningServer) -> None:
    status, told = ask(server, "die", 1)
    assert status == 500
    assert re.search(r"Stub process 'shared_0_0' is not healthy. It .* during execute", str(told))
    wait_until(lambda: ask(server, "twice", 1)[0] == 200)


@pytest.mark.promise(
    "Front ends",
    "If an instance of a model that was given up is back, all front ends answer for the model "
    "again.",
)
def test_a_model_that_was_given_up_is_served_again(tmp_path: Path) -> None:
    """No client can load models in this mode, so the server starts the model again after a pause."""
    options = {"MAX_RESTARTS": 0, "RESTART_WINDOW_S": 5, "RESTART_BACKOFF_MAX_S": 5}
    given = "".join(
        f'parameters [{{ key: "MOONPOOL_{name}" value {{ string_value: "{value}" }} }}]\n'
        for name, value in options.items()
    )
    write(tmp_path, "shared", (MODELS / "shared.py").read_text(), SHARED + given)
    with running(tmp_path, "--frontends=2", variables={"GATE": "/nowhere"}) as server:
        for _ in range(2):
            # One front end may learn later than the other one that the model is back.
            wait_until(lambda: ask(server, "die", 1)[0] == 500)
            wait_until(lambda: "has no instance left" in str(ask(server, "twice", 1)))
        wait_until(lambda: all(ask(server, "twice", 1)[0] == 200 for _ in range(8)))


@pytest.mark.promise(
    "Front ends",
    "The end of a front end ends only its own connections. Another one takes its place, "
    "and nothing of it is left.",
)
def test_the_end_of_a_front_end_is_that_of_its_connections_only(server: RunningServer) -> None:
    stop = threading.Event()
    outcomes: list[object] = []

    def client() -> None:
        while not stop.is_set():
            try:
                outcomes.append(ask(server, "twice", 1)[0])
            except (OSError, http.client.HTTPException) as error:
                outcomes.append(type(error))

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) > 20)
    kill_one(server)
    count = len(outcomes)
    wait_until(lambda: len(outcomes) > count + 20)
    stop.set()
    for thread in threads:
        thread.join()
    answers = [each for each in outcomes if isinstance(each, int)]
    assert set(answers) == {200}
    # Only requests that were open on the killed front end, or connected to it just then, may fail.
    assert len(outcomes) - len(answers) <= 20
    assert "has ended and is started again" in server.text()


KEEPS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kept = None

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(each, "IN").as_numpy() for each in requests]
        if self.kept is None:
            self.kept = given[0]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.kept.copy())]) for _ in given]
"""


@pytest.mark.promise("Front ends", "The end of a peer cancels …")
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_kept_tensors_of_an_ended_front_end_stay_unchanged(tmp_path: Path, level: str) -> None:
    """Otherwise a kept tensor would turn into the data of another client."""
    write(tmp_path, "keeps", KEEPS)

    def ask(server: RunningServer, value: float) -> list[float]:
        row = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
        body = json.dumps({"inputs": [row]}).encode()
        status, told = server.get("/v2/models/keeps/infer", "POST", body)
        assert status == 200, told
        data: list[float] = told["outputs"][0]["data"]
        return data

    with running(tmp_path, "--frontends=2", f"--sandbox={level}") as server:
        assert ask(server, 1.0) == [1.0] * 4
        # Either of them may have had the request, so both are killed.
        for pid in front_ends(server):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.text().count("has ended and is started again") == 2)
        wait_until(lambda: listening(server) == 2, 60.0)
        for value in range(2, 10):
            assert ask(server, value) == [1.0] * 4


@pytest.mark.promise(
    "Front ends",
    "No text of a model or a client ends a front end, and every name fits a message.",
)
def test_no_text_of_a_model_or_a_client_ends_a_front_end(server: RunningServer) -> None:
    """All limits are in bytes, and these characters have four bytes each."""
    before = front_ends(server)
    emoji = "\N{GRINNING FACE}" * 9000
    inputs = [
        {"name": "HOW", "datatype": "BYTES", "shape": [1], "data": [emoji]},
        {"name": "X", "datatype": "FP32", "shape": [1], "data": [1]},
    ]
    for request_id in ("", emoji):
        for _ in range(4):
            body = json.dumps({"id": request_id, "inputs": inputs}).encode()
            status, told = server.get("/v2/models/shared/infer", "POST", body)
            assert (status, emoji[:100] in told["error"]) == (500, True), str(told)[:300]
    # The main process learns of errors when it asks the front ends for their counts.
    wait_until(lambda: emoji[:100] in str(server.get("/v2/moonpool/overview")[1]["errors"]))
    assert front_ends(server) == before


@pytest.mark.promise(
    "Front ends",
    "If a front end is killed, all its answers are counted except those of the last moment.",
)
def test_answers_of_a_front_end_that_is_killed_were_counted(server: RunningServer) -> None:
    before = succeeded(server, "shared")
    stop = threading.Event()
    answered_s: list[float] = []
    killed_s: list[float] = []

    def client() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                assert ask(server, "twice", 1)[0] == 200
                answered_s.append(time.monotonic())

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    # The server itself reads the front ends' figures once a second.
    for _ in range(2):
        wait_until(partial(_is_enough, answered_s, time.monotonic(), len(answered_s)))
        killed_s.append(time.monotonic())
        kill_one(server)
    stop.set()
    for thread in threads:
        thread.join()
    late = sum(any(0 <= killed - each < LAST_S for killed in killed_s) for each in answered_s)
    assert late < 0.7 * len(answered_s), "the test has been too quick to tell"
    wait_until(lambda: succeeded(server, "shared") - before >= len(answered_s) - late)


def _is_enough(answered_s: list[float], begun_s: float, count: int) -> bool:
    """Return true if there are many answers, most of them not of the last moment."""
    return len(answered_s) > count + 150 and time.monotonic() - begun_s > 3 * LAST_S


@pytest.mark.promise("Front ends", "A front end that was stopped …")
def test_a_front_end_that_is_stopped_is_ended_and_replaced(server: RunningServer) -> None:
    stopped = front_ends(server)[0]
    os.kill(stopped, signal.SIGSTOP)

    # As in `kill_one`.
    wait_until(lambda: not Path(f"/proc/{stopped}").exists(), 60.0)
    server.wait_for("has not answered for 10 s and is ended")
    wait_until(lambda: listening(server) == 2, 60.0)
    for _ in range(20):
        assert ask(server, "twice", 1)[0] == 200


@pytest.mark.promise("Front ends", "No text of a model or …")
def test_an_instance_may_not_have_a_name_that_no_message_has_room_for(
    folder: Path, server: RunningServer
) -> None:
    config = f'instance_group [{{ name: "{"n" * 1100}" kind: KIND_CPU }}]'
    write(folder, "named", config=CONFIG.replace("instance_group [{ kind: KIND_CPU }]", config))
    before = front_ends(server)
    try:
        status, told = server.get("/v2/repository/models/named/load", "POST")
    finally:
        shutil.rmtree(folder / "named")

    assert status >= 400
    assert "instance_group[0].name: has 1100 bytes, and 512 is the most" in told["error"]
    assert front_ends(server) == before


@pytest.mark.promise("Front ends", "Front ends end with the main process, however it ends.")
def test_a_front_end_ends_with_the_main_process(folder: Path) -> None:
    with starting(folder, *LIVES) as server:
        server.wait_for("Ready", 60.0)
        pids = front_ends(server)
        assert len(pids) == 2
        # Stopped, they do not see the end of their directory.
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        server.tell(signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.promise("Front ends", "The end of a front end …")
def test_nothing_is_left_of_a_front_end_that_has_ended(server: RunningServer) -> None:
    def held() -> tuple[int, int]:
        (pid,) = [each["pid"] for each in instances(server, "shared")]
        regions = Path(f"/proc/{pid}/maps").read_text().count("/memfd:moonpool-")
        return len(os.listdir(f"/proc/{server.process.pid}/fd")), regions

    assert ask(server, "twice", 1)[0] == 200
    # The main process has two regions, and each front end has two.
    wait_until(lambda: held()[1] == 6, 60.0)
    descriptors, regions = held()
    for _ in range(4):
        kill_one(server)
    # Front ends keep some connections to the main process for the next request, but not one for each that has ended.
    wait_until(lambda: held()[0] < descriptors + 4 and held()[1] == regions, 60.0)


def instances(server: RunningServer, model: str) -> list[dict[str, Any]]:
    _, told = server.get("/v2/moonpool/overview")
    return [
        instance
        for each in told["models"]
        if each["name"] == model
        for instance in each["instances"]
    ]


def test_a_client_that_leaves_cancels_its_request(server: RunningServer) -> None:
    def seen() -> float:
        return float(ask(server, "seen", 0)[1]["outputs"][0]["data"][0])

    before = seen()
    body = json.dumps(
        {
            "inputs": [
                {"name": "HOW", "datatype": "BYTES", "shape": [1], "data": ["until cancelled"]},
                {"name": "X", "datatype": "FP32", "shape": [1], "data": [1]},
            ]
        }
    )
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v2/models/shared/infer", body)
    # The client closes the connection before the answer.
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert seen() in (before, before + 1)


@pytest.mark.promise("Requests between models", "The timeout of a request, from …")
def test_nobody_waits_in_a_stub_beyond_the_timeout_of_the_queue(
    server: RunningServer, gate: Path
) -> None:
    gate.touch()
    begun = Path(f"{gate}.begun")
    begun.unlink(missing_ok=True)
    try:
        thread = threading.Thread(target=ask, args=(server, "until told", 7), kwargs=TO_TIMED)
        thread.start()
        wait_until(begun.exists)
        # Connections go to all front ends.
        outcomes = [ask(server, "same", number, **TO_TIMED) for number in range(8)]
    finally:
        gate.unlink()
    thread.join()
    assert outcomes == [(503, {"error": "Request timeout expired"})] * 8


@pytest.mark.promise("Front ends", "On SIGTERM, front ends finish the requests that are under way.")
def test_requests_in_flight_are_finished_at_the_end(folder: Path, gate: Path) -> None:
    gate.touch()
    begun = Path(f"{gate}.begun")
    begun.unlink(missing_ok=True)
    variables = {"GATE": str(gate)}
    with starting(folder, *LIVES, "--load-model=shared", variables=variables) as server:
        server.wait_for("Ready", 60.0)
        outcomes: list[Any] = []
        thread = threading.Thread(target=lambda: outcomes.append(ask(server, "until told", 7)))
        thread.start()
        wait_until(begun.exists)
        server.tell(signal.SIGTERM)
        server.wait_for("Waiting for in-flight requests")
        gate.unlink()
        thread.join()
        assert server.wait() == 0, server.text()
    assert outcomes[0][0] == 200
    assert outcomes[0][1]["outputs"][0]["data"] == [7.0]


def left_by_a_server() -> int:
    """Return a port of which the kernel still remembers a connection, because its server closed it first."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        place: tuple[str, int] = server.getsockname()
        with socket.create_connection(place) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    return place[1]


@pytest.mark.promise(
    "Front ends", "A server with front ends may be started at once on the ports of one that ended."
)
def test_it_starts_on_the_port_of_a_server_that_has_just_ended(folder: Path) -> None:
    ports = {name: left_by_a_server() for name in ("http", "grpc")}
    flags = [f"--{name}-port={port}" for name, port in ports.items()]

    with running(folder, *LIVES, *flags) as server:
        assert server.ports["http"] == ports["http"]
        assert server.get("/v2/health/ready")[0] == 200


def test_a_port_that_is_taken_is_told(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with starting(folder, *LIVES, f"--http-port={port}") as server:
            assert server.wait() == 1
            assert f"port {port} (http): Address already in use" in server.text()
