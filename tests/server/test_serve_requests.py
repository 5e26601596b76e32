"""A server with clients: control, its end while requests run, TLS, tokens."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tests.server.certificates import self_signed
from tests.server.repositories import CONFIG, ECHO, write
from tests.server.running import RunningServer, running, starting
from tests.waiting import wait_until

BODY = json.dumps({"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
# The model prints that it executes, and executes until the test lets it end.
WAITS = ECHO.replace(
    "        return [",
    """        import os, time
        print("executing", flush=True)
        while not os.path.exists(os.path.dirname(__file__) + "/go"):
            time.sleep(0.01)
        return [""",
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write(tmp_path / "models", "good")
    return tmp_path / "models"


class Asking(threading.Thread):
    """A request that is under way while the test goes on."""

    def __init__(self, server: RunningServer, model: str) -> None:
        super().__init__()
        self.answer: tuple[int, Any] | None = None
        self.error: Exception | None = None
        self._server, self._path = server, f"/v2/models/{model}/infer"
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._server.get(self._path, "POST", BODY)
        except Exception as error:
            self.error = error


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Requests that are under way when the server gets a signal to end are answered. Those "
    "that take longer than the exit timeout are cut off, and the log says so.",
)
def test_requests_in_flight_at_the_signal_are_answered(models: Path) -> None:
    file = write(models, "waits", WAITS)
    with running(models) as server:
        asking = Asking(server, "waits")
        try:
            server.wait_for("] executing")
            server.tell(signal.SIGTERM)
            server.wait_for("Waiting for in-flight requests")
            wait_until(lambda: is_refused(server.ports["http"]), what="the port to be closed")
        finally:
            (file.parent / "go").touch()
            asking.join()
        assert server.wait() == 0
    assert asking.answer is not None, asking.error
    assert asking.answer[0] == 200
    assert asking.answer[1]["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.promise("The server (`moonpool serve`)", "Requests that are under way when …")
def test_requests_longer_than_the_exit_timeout_are_cut_off(models: Path) -> None:
    write(models, "waits", WAITS)
    with starting(models, "--exit-timeout-secs=1") as server:
        server.wait_for("] Ready")
        asking = Asking(server, "waits")
        server.wait_for("] executing")
        server.tell(signal.SIGTERM)
        assert server.wait() == 1
        assert "Exit timeout expired" in server.text()
        asking.join()
    assert asking.answer is None or asking.answer[0] != 200


@pytest.mark.promise("The server (`moonpool serve`)", "SIGTERM and SIGINT end it in …")
def test_a_second_signal_ends_it_at_once_and_the_models_with_it(models: Path) -> None:
    write(models, "waits", WAITS)
    with starting(models) as server:
        server.wait_for("] Ready")
        asking = Asking(server, "waits")
        server.wait_for("] executing")
        (stub,) = [pid for pid in children(server) if b"waits" in cmdline(pid)]
        server.tell(signal.SIGTERM)
        server.wait_for("Waiting for in-flight requests")
        server.tell(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        wait_until(lambda: cmdline(stub) == b"")
        asking.join()


def test_clients_control_the_models_where_the_mode_is_explicit(models: Path) -> None:
    with running(models, "--model-control-mode=explicit") as server:
        assert server.get("/v2/repository/index", "POST") == (200, [{"name": "good"}])
        assert server.get("/v2/repository/models/good/load", "POST")[0] == 200
        assert server.get("/v2/models/good/infer", "POST", BODY)[0] == 200
        files = {
            "config": json.dumps({"backend": "python", "max_batch_size": 0}),
            "file:1/model.py": base64.b64encode(ECHO.encode()).decode(),
        }
        body = json.dumps({"parameters": files}).encode()
        status, said = server.get("/v2/repository/models/fresh/load", "POST", body)
        assert (status, "must specify" in said["error"]) == (500, True)
        assert server.get("/v2/repository/models/good/unload", "POST")[0] == 200
        status, _ = server.get("/v2/models/good/infer", "POST", BODY)
        assert status != 200
        assert server.get("/v2/repository/models/fresh/unload", "POST")[0] == 200
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200)


@pytest.mark.promise("The server (`moonpool serve`)", "No request is lost while a changed model is replaced.")
def test_a_model_is_replaced_without_a_request_being_lost(models: Path) -> None:
    answers: list[tuple[int, Any]] = []
    enough = threading.Event()
    flags = ("--model-control-mode=poll", "--repository-poll-secs=0")
    with running(models, *flags) as server:

        def ask() -> None:
            while not enough.is_set():
                answers.append(server.get("/v2/models/good/infer", "POST", BODY))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for number in range(2, 5):
                text = ECHO.replace(".as_numpy()", f".as_numpy() * {number}")
                write(models, "good", text)
                server.tell(signal.SIGHUP)
                wait_until(partial(is_answered_with, answers, number))
        finally:
            enough.set()
            asking.join()
    assert {status for status, _ in answers} == {200}


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_nobody_controls_the_models_in_the_other_modes(models: Path, mode: str) -> None:
    with running(models, f"--model-control-mode={mode}") as server:
        status, said = server.get("/v2/repository/models/good/load", "POST")
    text = "explicit model load / unload is not allowed if polling is enabled"
    if mode == "none":
        text += "; --model-control-mode is none: restart the server with explicit, demand or poll to change its models"
    assert (status, said) == (503, {"error": text})


def test_the_server_has_its_name_and_the_readiness_that_was_wanted(models: Path) -> None:
    write(models, "bad", "raise ValueError('boom')")
    flags = ("--id=mine", "--exit-on-error=false")
    with running(models, *flags) as server:
        assert server.get("/v2")[1]["name"] == "mine"
        assert server.get("/v2/health/live")[0] == 200
        assert server.get("/v2/health/ready")[0] == 400
    with running(models, *flags, "--strict-readiness=false") as server:
        assert server.get("/v2/health/ready")[0] == 200


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Changes ask for the control token if there is one, and restricted APIs ask for a header.",
)
def test_changes_ask_for_the_token_and_nothing_else_does(models: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    flags = ("--model-control-mode=explicit", f"--control-token-file={token}")
    with running(models, *flags, "--load-model=good") as server:
        load = f"http://{server.http}/v2/repository/models/good/load"
        assert server.get("/v2/repository/models/good/load", "POST")[0] == 401
        assert server.get("/v2/models/good/infer", "POST", BODY)[0] == 200
        for given, status in (("wrong", 401), ("s3cret", 200)):
            headers = {"Authorization": f"Bearer {given}"}
            request = urllib.request.Request(load, b"", headers, method="POST")
            assert status_of(request) == status
        assert "s3cret" not in server.text()


TELLS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        told = [np.array([r.parameters().encode()], object).reshape(1, 1) for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text)]) for text in told]
"""
TELLING = CONFIG.replace(
    'output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]',
    'output [{ name: "TOLD" data_type: TYPE_STRING dims: [1] }]',
)


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Headers that match the server's pattern reach the model as parameters, over HTTP and gRPC.",
)
def test_headers_are_handed_on_to_models_where_that_is_wanted(models: Path) -> None:
    write(models, "tells", TELLS, TELLING)
    flags = ("--http-header-forward-pattern=x-.*", "--grpc-header-forward-pattern=x-.*")
    with running(models, *flags) as server:
        url = f"http://{server.http}/v2/models/tells"
        simple = json.dumps({"IN": [1, 2, 3, 4]}).encode()
        told: list[dict[str, str]] = []
        for path, body in (("/infer", BODY), ("/infer", BODY), ("/generate", simple)):
            headers = {"X-Who": f"me{len(told)}", "Y-Other": "no", "Content-Type": "application/json"}
            request = urllib.request.Request(url + path, body, headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                said = json.load(response)
            text = said["TOLD"] if path == "/generate" else said["outputs"][0]["data"][0]
            told.append(json.loads(text))
        with grpc_client.InferenceServerClient(server.grpc) as client:
            tensor = grpc_client.InferInput("IN", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
            answer = client.infer("tells", [tensor], headers={"x-who": "me3"})
            told.append(json.loads(answer.as_numpy("TOLD")[0, 0]))
    # Each under the name that was sent, which urllib and gRPC write in their own ways.
    names = ("X-Who", "X-Who", "X-Who", "x-who")
    assert told == [{name: f"me{number}"} for number, name in enumerate(names)]


@pytest.mark.promise("The server (`moonpool serve`)", "Changes ask for the control token …")
def test_apis_may_ask_for_a_header(models: Path) -> None:
    with running(models, "--http-restricted-api=health,metadata:key=value") as server:
        live = f"http://{server.http}/v2/health/live"
        assert status_of(urllib.request.Request(live)) == 403
        assert status_of(urllib.request.Request(live, headers={"key": "value"})) == 200
        assert server.get("/v2/models/good/infer", "POST", BODY)[0] == 200


@pytest.mark.promise("The server (`moonpool serve`)", "HTTP and gRPC may speak TLS.")
def test_both_protocols_may_speak_tls(models: Path, tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    flags = (f"--http-server-cert={certificate}", f"--http-server-key={key}")
    with running(models, *flags) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        url = f"https://localhost:{server.ports['http']}/v2/health/ready"
        with urllib.request.urlopen(url, timeout=60, context=context) as response:
            assert response.status == 200
    for_grpc = (f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}")
    with running(models, "--grpc-use-ssl=true", *for_grpc) as server:
        name = f"localhost:{server.ports['grpc']}"
        with grpc_client.InferenceServerClient(name, ssl=True, root_certificates=str(certificate)) as client:
            assert client.is_server_ready(client_timeout=30)


def children(server: RunningServer) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        # Threads end while they are being listed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def cmdline(pid: int) -> bytes:
    """Return the command line of a process, nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_answered_with(answers: list[tuple[int, Any]], number: int) -> bool:
    return bool(answers) and answers[-1][1]["outputs"][0]["data"][0] == number


def status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
