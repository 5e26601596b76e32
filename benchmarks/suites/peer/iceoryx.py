"""iceoryx2's request-response with borrowed slices, and events to wait on."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.benchmarks.suites.peer.peer import Floats, Peer, Unavailable

_READY_S = 60.0


class Service:
    """One node's access to the service and to the events beside it."""

    def __init__(self, folder: str) -> None:
        iox = importlib.import_module("iceoryx2")
        iox.set_log_level(iox.LogLevel.Error)
        config = iox.config.default()
        # With a name of its own, files that iceoryx2 leaves behind can be found and removed.
        config.global_cfg.root_path = iox.Path.new(folder)
        config.global_cfg.prefix = iox.FileName.new(_prefix(folder))
        builder = iox.NodeBuilder.new().config(config)
        builder = builder.signal_handling_mode(iox.SignalHandlingMode.Disabled)
        self._node = builder.create(iox.ServiceType.Ipc)
        payload = iox.Slice[ctypes.c_uint8]
        calls = self._builder(iox, "calls").request_response(payload, payload)
        # iceoryx2 reserves memory for the most payloads that could be under way, by default hundreds. It
        # uses every one of them before it uses the first again.
        for most in ("max_clients", "max_servers", "max_loaned_requests"):
            calls = getattr(calls, most)(1)
        calls = calls.max_nodes(2).max_active_requests_per_client(1).max_response_buffer_size(1)
        calls = calls.max_borrowed_responses_per_pending_response(1)
        self.calls = calls.open_or_create()
        self.asked = self._builder(iox, "asked").event().open_or_create()
        self.answered = self._builder(iox, "answered").event().open_or_create()
        self.grow = iox.AllocationStrategy.PowerOfTwo

    def _builder(self, iox: Any, name: str) -> Any:
        return self._node.service_builder(iox.ServiceName.new(name))


class Iceoryx(Peer):
    """A client that fills a loaned slice and waits for the event of the answer."""

    def __init__(self) -> None:
        try:
            importlib.import_module("iceoryx2")
        except ImportError as error:
            raise Unavailable(f"{error}; pip install iceoryx2") from error
        self._folder = tempfile.TemporaryDirectory(prefix="iceoryx2-")
        processes = multiprocessing.get_context("spawn")
        ready = processes.Event()
        self._process = processes.Process(target=serve, args=(self._folder.name, ready))
        self._process.start()
        if not ready.wait(_READY_S):
            self._process.kill()
            self._process.join()
            self._folder.cleanup()
            raise Unavailable(f"its server was not ready within {_READY_S} s")
        self._service = Service(self._folder.name)
        client = self._service.calls.client_builder().initial_max_slice_len(64)
        self._client = client.allocation_strategy(self._service.grow).create()
        self._notifier = self._service.asked.notifier_builder().create()
        self._listener = self._service.answered.listener_builder().create()

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        request = self._client.loan_slice_uninit(a.nbytes + b.nbytes)
        sent = np.frombuffer(request.payload().as_memory_view(), np.float32)
        sent[: a.size], sent[a.size :] = a[0], b[0]
        pending = request.assume_init().send()
        self._notifier.notify()
        while (response := pending.receive()) is None:
            self._listener.blocking_wait()
        answer = np.frombuffer(response.payload().as_memory_view(), np.float32)
        # A response must be returned soon, so the caller copies it.
        total, difference = answer[: a.size].copy(), answer[a.size :].copy()
        response.delete()
        pending.delete()
        return total[np.newaxis], difference[np.newaxis]

    def close(self) -> None:
        # A request of a single byte ends the other process.
        self._client.loan_slice_uninit(1).assume_init().send().delete()
        self._notifier.notify()
        self._process.join()
        self._process.close()
        for port in (self._client, self._notifier, self._listener):
            port.delete()
        del self._service
        for path in Path("/dev/shm").glob(f"{_prefix(self._folder.name)}*"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._folder.cleanup()


def _prefix(folder: str) -> str:
    return f"{Path(folder).name}_"


def serve(folder: str, ready: Any) -> None:
    """Serve in the other process."""
    service = Service(folder)
    builder = service.calls.server_builder().initial_max_slice_len(64)
    builder = builder.max_loaned_responses_per_request(1)
    server = builder.allocation_strategy(service.grow).create()
    listener = service.asked.listener_builder().create()
    notifier = service.answered.notifier_builder().create()
    ready.set()
    goes_on = True
    while goes_on:
        listener.blocking_wait()
        while goes_on and (request := server.receive()) is not None:
            goes_on = _answer(request)
            request.delete()
            notifier.notify()
    for port in (server, listener, notifier):
        port.delete()


def _answer(request: Any) -> bool:
    received = request.payload().as_memory_view()
    if len(received) == 1:
        return False
    inputs = np.frombuffer(received, np.float32)
    half = inputs.size // 2
    response = request.loan_slice_uninit(len(received))
    outputs = np.frombuffer(response.payload().as_memory_view(), np.float32)
    np.add(inputs[:half], inputs[half:], out=outputs[:half])
    np.subtract(inputs[:half], inputs[half:], out=outputs[half:])
    response.assume_init().send()
    return True
