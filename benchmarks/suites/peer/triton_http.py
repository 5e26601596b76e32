"""Triton's server in a process of its own, called over HTTP with tritonclient."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

from moonpool.benchmarks.hosts.kserve import TritonHost
from moonpool.benchmarks.suites.hosted import folders_of
from moonpool.benchmarks.suites.peer.peer import Floats, Peer, Unavailable, rate_of_threads


class TritonHttp(Peer):
    """tritonclient.http with binary tensors; every calling thread has a connection of its own."""

    def __init__(self) -> None:
        try:
            self._http: Any = importlib.import_module("tritonclient.http")
        except (ImportError, RuntimeError) as error:  # RuntimeError: it is installed without HTTP
            raise Unavailable(f"{error}; pip install tritonclient[http]") from error
        self._clients = threading.local()
        models = folders_of(("add_sub",))
        self._server = TritonHost(Path(sys.executable), models, ("--pinned-memory-pool-byte-size=0",))

    def _client(self) -> Any:
        client = getattr(self._clients, "client", None)
        if client is None:
            client = self._clients.client = self._http.InferenceServerClient(
                f"127.0.0.1:{self._server.http_port}", network_timeout=600.0
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
        self._server.close()
