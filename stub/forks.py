"""Requests to other models from processes that the model forked, as `multiprocessing` does.

Theory of operation. A fork has copies of everything, but the channels to the runtime and the tables of shared memory
are the stub's alone. So the stub has a *door*: a socket that every fork, and every fork of a fork, inherits. For
each question a fork makes a pair of sockets, hands one of them in through the door, and talks with a thread of
the stub over the other; tensors travel as bytes. Nobody waits for a process that is gone: the end of either
closes the pair, so a fork keeps no copy of what the stub has of another's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.codec import encode, unpacked
from moonpool.ipc.errors import LocalProtocolError
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub import host, output, pb_utils, threads
from moonpool.stub.errors import ErrorCode, TritonError, TritonModelException
from moonpool.stub.host import Host
from moonpool.stub.preferred_memory import ORDINARY
from moonpool.stub.report import describe
from moonpool.stub.request import InferenceRequest, InferenceTrace
from moonpool.stub.response import InferenceResponse
from moonpool.stub.response_iterator import ResponseIterator
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from moonpool.stub.host import Answer

_LENGTH = struct.Struct("<Q")
_GONE = "The process that hosts the model has ended."
# What a fork may ask of the stub's host beside inference.
_METHODS = frozenset(
    [
        "load_model",
        "unload_model",
        "is_model_ready",
        "new_metric",
        "change_metric",
        "metric_value",
        "failure",
    ]
)


class Door:
    """The stub's side: listens from the first fork on."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        """`on_fork` is called in every fork: what belongs to the stub is not to be touched there."""
        self._on_fork = on_fork
        self._inside, self._outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_open = False
        # What is being answered.
        self._ends: set[socket.socket] = set()
        os.register_at_fork(after_in_parent=self._open, after_in_child=self._move_out)

    def _open(self) -> None:
        if not self._is_open and self._inside.fileno() >= 0:
            # Where there is no thread to be had, the next fork tries again.
            threads.start(self._listen, "moonpool-forks")
            self._is_open = True

    def _move_out(self) -> None:
        """In a fork."""
        if self._inside.fileno() >= 0:
            self._inside.close()
            for end in self._ends:
                end.close()
            self._on_fork()
            output.prepare_fork()
            pb_utils.use_memory(None)
            host.use(ForkedHost(self._outside))

    def _listen(self) -> None:
        while True:
            knock, fds, _, _ = socket.recv_fds(self._inside, 1, 1)
            if not knock:  # nobody has the other end any more
                return
            for fd in fds:
                self._begin(socket.socket(fileno=fd))

    def _begin(self, end: socket.socket) -> None:
        self._ends.add(end)
        thread = threading.Thread(
            target=self._serve, args=(end,), name="moonpool-fork", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            with contextlib.suppress(OSError):  # the fork has ended
                _send(end, ("raise", f"the process that hosts the model is full: {error}"))
            self._close(end)

    def _serve(self, end: socket.socket) -> None:
        """Do in the stub what a fork asks for, on a thread of its own."""
        try:
            with contextlib.suppress(OSError, EOFError):  # the fork has ended
                _answer(end)
        finally:
            self._close(end)

    def _close(self, end: socket.socket) -> None:
        # A fork may have been made in the moment in which this came.
        _hang_up(end)
        end.close()
        self._ends.discard(end)


class ForkedHost(Host):
    """The host of a fork: it asks the stub. Any thread may call any method, and nothing is locked."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door

    def _ask(self, *question: Any) -> socket.socket:
        try:
            packet = encode(*question)
        except LocalProtocolError as error:
            raise TritonModelException(str(error)) from error
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._door, [b"\0"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise TritonModelException(_GONE) from error
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # what is to be read tells why nobody listens
            _send_packet(ours, packet)
        return ours

    def infer(self, request: InferenceRequest, decoupled: bool) -> Answer:
        end = self._ask("infer", decoupled, *_packed_request(request))
        if not decoupled:
            with end:
                return _response(*_told(end))

        def receive() -> InferenceResponse | None:
            answer = _told(end)
            return _response(*answer) if answer else None

        def cancel() -> None:
            with contextlib.suppress(OSError):  # the stub has ended
                end.shutdown(socket.SHUT_WR)

        def abandon() -> None:
            _hang_up(end)
            end.close()

        return ResponseIterator.over(receive, cancel, abandon)

    def ainfer(self, request: InferenceRequest, decoupled: bool) -> asyncio.Future[Answer]:
        import asyncio

        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, self._begun, request, decoupled)

    def _begun(self, request: InferenceRequest, decoupled: bool) -> Answer:
        """As `infer`, but return an iterator only when its first response is there."""
        answer = self.infer(request, decoupled)
        return answer._wait() if isinstance(answer, ResponseIterator) else answer

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._ask(method, *arguments) as end:
            return _told(end)[0]

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        self._call("load_model", name, config, files)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._call("unload_model", name, unload_dependents)

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(self._call("is_model_ready", name, version))

    def new_metric(
        self,
        name: str,
        description: str,
        kind: int,
        labels: Mapping[str, str] | None,
        buckets: Sequence[float] | None,
    ) -> int:
        return int(self._call("new_metric", name, description, kind, labels, buckets))

    def failure(self, why: str) -> str:
        return str(self._call("failure", why))

    def change_metric(self, metric: int, operation: int, value: float) -> None:
        self._call("change_metric", metric, operation, value)

    def metric_value(self, metric: int) -> float:
        return float(self._call("metric_value", metric))


def _answer(end: socket.socket) -> None:
    """Answer one question. Raises EOFError and OSError where nobody waits for the answer any more."""
    question = _receive(end)
    try:
        if question[0] == "infer":
            _infer(end, *question[1:])
        elif question[0] in _METHODS:
            method = getattr(host.current(), question[0])
            _send(end, ("answer", method(*question[1:])))
    except OSError:
        raise
    except TritonModelException as error:
        _send(end, ("raise", str(error)))
    except Exception as error:  # the fork waits for an answer, whatever went wrong
        _send(end, ("raise", describe(error)))


def _infer(end: socket.socket, decoupled: bool, *packed: Any) -> None:
    answer = _request(*packed).exec(decoupled)
    if isinstance(answer, ResponseIterator):
        # The fork sends nothing more. The end of its messages means that it cancels, or is gone.
        threads.start(partial(_cancel_at_end, end, answer), "moonpool-forks")
        for response in answer:
            _send(end, ("answer", *_packed_response(response)))
        _send(end, ("answer",))
    else:
        _send(end, ("answer", *_packed_response(answer)))


def _cancel_at_end(end: socket.socket, responses: ResponseIterator) -> None:
    with contextlib.suppress(OSError):
        end.recv(1)
    responses.cancel()


# What travels


def _send(end: socket.socket, message: tuple[Any, ...]) -> None:
    _send_packet(end, encode(*message))


def _send_packet(end: socket.socket, packet: bytes) -> None:
    end.sendall(_LENGTH.pack(len(packet)))
    end.sendall(packet)


def _receive(end: socket.socket) -> list[Any]:
    """A question, or what was answered: nothing after the last of many responses.

    Raises TritonModelException where that is the answer, EOFError where there is none.
    """
    head = _read(end, _LENGTH.size)
    first, *rest = unpacked(_read(end, _LENGTH.unpack(head)[0]))
    if first == "raise":
        raise TritonModelException(rest[0])
    return rest if first == "answer" else [first, *rest]


def _told(end: socket.socket) -> list[Any]:
    """As `_receive`. Raises TritonModelException also where there is no answer."""
    try:
        return _receive(end)
    except EOFError:
        raise TritonModelException(_GONE) from None


def _read(end: socket.socket, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    left = memoryview(data)
    while left:
        try:
            count = end.recv_into(left)
        except ConnectionResetError:  # it ended without reading all that it was sent
            count = 0
        if not count:
            raise EOFError
        left = left[count:]
    return data


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        end.shutdown(socket.SHUT_RDWR)


def _packed_request(request: InferenceRequest) -> list[object]:
    return [
        request._model_name,
        request._model_version,
        request._details.request_id,
        request._details.correlation_id,
        request._details.flags,
        request._details.timeout_us,
        request._details.parameters,
        list(request._requested_output_names),
        request._trace._context,
        _packed_tensors(request._inputs),
    ]


def _request(
    model: str,
    version: int,
    request_id: str,
    correlation_id: int | str,
    flags: int,
    timeout_us: int,
    parameters: dict[str, Any] | None,
    outputs: list[str],
    trace: str | None,
    inputs: list[list[Any]],
) -> InferenceRequest:
    return InferenceRequest(
        model_name=model,
        model_version=version,
        request_id=request_id,
        correlation_id=correlation_id,
        flags=flags,
        timeout=timeout_us,
        parameters=parameters,
        requested_output_names=outputs,
        trace=InferenceTrace(trace),
        inputs=_tensors(inputs),
        # A fork has no devices.
        preferred_memory=ORDINARY,
    )


def _packed_response(response: InferenceResponse) -> list[object]:
    error = response._error
    failure = None if error is None else [int(error.code()), error.message()]
    return [failure, response._parameters, _packed_tensors(response._outputs)]


def _response(
    failure: list[Any] | None, parameters: dict[str, Any] | None, outputs: list[list[Any]]
) -> InferenceResponse:
    error = None
    if failure is not None:
        error = TritonError(failure[1], ErrorCode(failure[0]))
    response = InferenceResponse(_tensors(outputs), error)
    response._parameters = parameters
    return response


def _packed_tensors(tensors: Iterable[Tensor]) -> list[list[object]]:
    rows: list[list[object]] = []
    for tensor in tensors:
        data = tensor._data.tobytes()
        rows.append([tensor._name, tensor._datatype, list(tensor._shape), data])
    return rows


def _tensors(rows: list[list[Any]]) -> list[Tensor]:
    tensors = []
    for name, datatype, shape, data in rows:
        # Writable, as all tensors are.
        buffer = bytearray(data)
        if datatype >= BYTES:
            array: np.ndarray = np.ndarray((len(buffer),), np.uint8, buffer)
        else:
            array = np.ndarray(shape, DTYPES[datatype], buffer)
        tensors.append(Tensor.from_wire(name, datatype, tuple(shape), array))
    return tensors
