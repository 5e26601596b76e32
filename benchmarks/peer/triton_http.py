"""Triton's server in a process of its own, called over HTTP with tritonclient."""

from __future__ import annotations

import importlib
import subprocess
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from benchmarks.peer.peer import Floats, Peer, Unavailable, rate_of_threads
from benchmarks.peer.served import held_ports
from benchmarks.peer.triton_files import TritonFiles

_READY_S = 60.0


class TritonHttp(Peer):
    """tritonclient.http with binary tensors; every calling thread has a connection of its own."""

    def __init__(self) -> None:
        try:
            self._http: Any = importlib.import_module("tritonclient.http")
        except (ImportError, RuntimeError) as error:  # RuntimeError: it is installed without HTTP
            raise Unavailable(f"{error}; pip install tritonclient[http]") from error
        self._clients = threading.local()
        self._files = TritonFiles()
        (self._held,) = held_ports(1)
        self._address = f"127.0.0.1:{self._held.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        options = {
            "model-repository": self._files.repository,
            "backend-directory": self._files.backends,
            "http-address": "127.0.0.1",
            "http-port": self._address.rpartition(":")[2],
            "allow-grpc": "false",
            "allow-metrics": "false",
            "log-info": "false",
            "log-warning": "false",
            "pinned-memory-pool-byte-size": "0",
        }
        command = [str(self._files.server)]
        command += [f"--{key}={value}" for key, value in options.items()]
        with (self._files.folder / "server.log").open("w+") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._files.environment()
            )
            self._process = process
            deadline = time.monotonic() + _READY_S
            while not self._is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = " ".join(log.read().split())[-300:]
                    raise Unavailable(f"the server did not start: {said}")
                time.sleep(0.05)
        return process

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/v2/models/add_sub/ready"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def _client(self) -> Any:
        client = getattr(self._clients, "client", None)
        if client is None:
            client = self._clients.client = self._http.InferenceServerClient(
                self._address, network_timeout=600.0
            )
        return client

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        inputs = []
        for name, array in (("INPUT0", a), ("INPUT1", b)):
            tensor = self._http.InferInput(name, array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        answer = self._client().infer("add_sub", inputs)
        return answer.as_numpy("OUTPUT0"), answer.as_numpy("OUTPUT1")

    def rate(self, callers: int, total: int) -> float:
        return rate_of_threads(self, callers, total)

    def leave(self) -> None:
        client = getattr(self._clients, "client", None)
        if client is not None:
            client.close()
            del self._clients.client

    def close(self) -> None:
        # The server waits long for connections that are still open.
        self.leave()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._held.close()
        self._files.remove()
