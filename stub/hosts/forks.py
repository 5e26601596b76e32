"""Lets processes that the model forked, as `multiprocessing` does, ask for what the model may ask for.

All but responses in a stream: Triton's backend gives forks none either, while its own tests send plain requests from
the workers of a `multiprocessing.Pool`.

Theory of operation. A fork has copies of everything, but only the stub may use the channels to the runtime and the
tables of shared memory. So the stub has a *broker*, a thread that listens on a socket which every fork, and every fork
of a fork, inherits. For each question a fork makes a pair of sockets, sends one end to the broker, and talks over the
other end with a new thread of the stub. Tensors travel as bytes. A fork needs no lock for this, and the state of its
inherited locks does not matter.

No side waits for a process that is gone: the end of either process closes its end of the pair, and the other side reads
end of file. This works only if no third process holds a copy of an end. So a new fork closes the ends that the stub has
at that moment, and the stub shuts an end down before it closes it, in case a fork has copied it in that very moment.

Descriptors that the processes pass to each other lie with the stub for that time (`descriptors.py`): a fork says so
when it knocks, and keeps the pair.

The broker starts after the first fork, in the parent. If the machine has no thread to spare, the next fork tries again.
If a thread for one question cannot be started, the fork that asked gets an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.codec import encode, unpacked
from moonpool.ipc.errors import LocalProtocolError
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub import output, threads
from moonpool.stub.hosts import descriptors
from moonpool.stub.pb_utils import host
from moonpool.stub.pb_utils.errors import ErrorCode, TritonError, TritonModelException
from moonpool.stub.pb_utils.host import Host
from moonpool.stub.pb_utils.memory import use_memory
from moonpool.stub.pb_utils.request import InferenceRequest, InferenceTrace
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import ORDINARY, Tensor
from moonpool.stub.report import describe

if TYPE_CHECKING:
    import asyncio

_LENGTH = struct.Struct("<Q")
# What a fork wants when it knocks: to ask one question, or to share descriptors.
_ASKS, _SHARES = b"\0", b"\1"
_GONE = "The process that hosts the model has ended."
_NO_STREAMS = (
    "Requests with decoupled=True work in the model's own process only, and not in one that it forked: make it there, "
    "or ask a model that is not decoupled."
)
# The methods of the stub's host that a fork may call, beside inference.
_METHODS = frozenset(
    ["load_model", "unload_model", "is_model_ready", "new_metric", "change_metric", "metric_value", "failure"]
)


class ForkBroker:
    """Answers forks, in the stub. Listens from the first fork on."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        """Take `on_fork`, which runs in every fork and takes from it what belongs to the stub."""
        self._on_fork = on_fork
        self._inside, self._outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_open = False
        # The ends of the questions that are being answered.
        self._ends: set[socket.socket] = set()
        self._shelf = descriptors.Shelf()
        descriptors.use(self._shelf)
        os.register_at_fork(after_in_parent=self._open, after_in_child=self._move_out)

    def _open(self) -> None:
        if not self._is_open and self._inside.fileno() >= 0:
            # If there is no thread to spare, the next fork tries again.
            threads.start(self._listen, "moonpool-forks")
            self._is_open = True

    def _move_out(self) -> None:
        """Give up what belongs to the stub, and ask the broker from now on. In a fork."""
        if self._inside.fileno() >= 0:
            self._inside.close()
            for end in self._ends:
                end.close()
            self._on_fork()
            output.prepare_fork()
            use_memory(None)
            host.use(ForkedHost(self._outside))
            descriptors.use(descriptors.ForkedShelf(partial(_knock, self._outside, _SHARES)))

    def _listen(self) -> None:
        while True:
            knock, fds, _, _ = socket.recv_fds(self._inside, 1, 1)
            if not knock:  # no process holds the other end any more
                return
            for fd in fds:
                self._begin(socket.socket(fileno=fd), self._shelf.serve if knock == _SHARES else _answer)

    def _begin(self, end: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        self._ends.add(end)
        try:
            threads.start(partial(self._serve, end, answer), "moonpool-fork")
        except RuntimeError as error:  # the stub's own limit: the fork that asked gets the error
            with contextlib.suppress(OSError):  # the fork has ended
                _send(end, ("raise", f"the process that hosts the model is full: {error}"))
            self._close(end)

    def _serve(self, end: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        """Answer one question of a fork, or share its descriptors, on a thread of its own."""
        try:
            with contextlib.suppress(OSError, EOFError):  # the fork has ended
                answer(end)
        except Exception:  # its words make no sense: that harms the fork alone
            traceback.print_exc()
        finally:
            self._close(end)

    def _close(self, end: socket.socket) -> None:
        # Shut down first: a fork may have copied this end a moment ago.
        with contextlib.suppress(OSError):  # the other side was faster
            end.shutdown(socket.SHUT_RDWR)
        end.close()
        self._ends.discard(end)


class ForkedHost(Host):
    """Hosts the model in a fork: asks the stub. Any thread may call any method; there are no locks."""

    def __init__(self, broker: socket.socket) -> None:
        self._broker = broker

    def _ask(self, *question: Any) -> socket.socket:
        try:
            packet = encode(*question)
        except LocalProtocolError as error:
            raise TritonModelException(str(error)) from error
        try:
            ours = _knock(self._broker, _ASKS)
        except OSError as error:
            raise TritonModelException(_GONE) from error
        with contextlib.suppress(OSError):  # the answer, or its absence, tells why nobody listens
            _send_packet(ours, packet)
        return ours

    def infer(self, request: InferenceRequest, decoupled: bool) -> InferenceResponse:
        if decoupled:
            raise TritonModelException(_NO_STREAMS)
        with self._ask("infer", *_packed_request(request)) as end:
            return _response(*_told(end))

    def ainfer(self, request: InferenceRequest, decoupled: bool) -> asyncio.Future[InferenceResponse]:
        import asyncio

        return asyncio.get_running_loop().run_in_executor(None, self.infer, request, decoupled)

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
        self, name: str, description: str, kind: int, labels: Mapping[str, str] | None, buckets: Sequence[float] | None
    ) -> int:
        return int(self._call("new_metric", name, description, kind, labels, buckets))

    def failure(self, why: str) -> str:
        return str(self._call("failure", why))

    def change_metric(self, metric: int, operation: int, value: float) -> None:
        self._call("change_metric", metric, operation, value)

    def metric_value(self, metric: int) -> float:
        return float(self._call("metric_value", metric))


def _knock(broker: socket.socket, wish: bytes) -> socket.socket:
    """Return the end of a new pair with the stub, for what the fork wants of it. Raises OSError if the stub is gone."""
    kind = socket.SOCK_SEQPACKET if wish == _SHARES else socket.SOCK_STREAM
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    try:
        socket.send_fds(broker, [wish], [theirs.fileno()])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours


def _answer(end: socket.socket) -> None:
    """Answer one question. Raises EOFError or OSError if the fork has ended."""
    method, *arguments = _received(end)
    try:
        if method == "infer":
            response: Any = _request(*arguments).exec()
            _send(end, ("answer", *_packed_response(response)))
        elif method in _METHODS:
            _send(end, ("answer", getattr(host.current(), method)(*arguments)))
    except OSError:
        raise
    except TritonModelException as error:
        _send(end, ("raise", str(error)))
    except Exception as error:  # the fork waits for an answer, whatever went wrong
        _send(end, ("raise", describe(error)))


def _send(end: socket.socket, message: tuple[Any, ...]) -> None:
    _send_packet(end, encode(*message))


def _send_packet(end: socket.socket, packet: bytes) -> None:
    end.sendall(_LENGTH.pack(len(packet)))
    end.sendall(packet)


def _received(end: socket.socket) -> list[Any]:
    """Receive a message. Raises EOFError at the end of the other process."""
    with end.makefile("rb") as file:
        try:
            head = file.read(_LENGTH.size)
            size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 1
            body = file.read(size)
        except ConnectionResetError:  # the other process ended without reading everything
            raise EOFError from None
    if len(body) < size:
        raise EOFError
    message: list[Any] = unpacked(body)
    return message


def _told(end: socket.socket) -> list[Any]:
    """Receive the fields of an answer. Raises TritonModelException if that is the answer, or if the stub has ended."""
    try:
        kind, *rest = _received(end)
    except EOFError:
        raise TritonModelException(_GONE) from None
    if kind == "raise":
        raise TritonModelException(rest[0])
    return rest


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
        # A fork cannot use devices.
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
        # A bytearray, as all tensors are writable.
        buffer = bytearray(data)
        if datatype >= BYTES:
            array: np.ndarray = np.ndarray((len(buffer),), np.uint8, buffer)
        else:
            array = np.ndarray(shape, DTYPES[datatype], buffer)
        tensors.append(Tensor.from_wire(name, datatype, tuple(shape), array))
    return tensors
