"""Captures requests of clients into a file, which `moonpool bench --replay` sends again at their times.

Theory of operation. Threads that submit requests call `take`. It copies the tensors of every n-th request, puts them
into a queue and returns; if the queue has too many bytes, it counts the request as dropped instead, so no request ever
waits for the disk. One daemon thread takes entries from the queue and writes them. `_changed` is the condition for the
queue, its bytes, the counts and `_is_over`; it is held for no longer than these take, and neither for the copy nor for
a write. After `close`, or when the file has all its bytes or cannot be written, `is_on` is False and nothing is taken
any more. `close` has the thread write what is in the queue, and waits for it for some seconds.

The file has what clients sent, which may be anything. So it is made with mode 0600, and an existing file, a link among
them, is refused.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import IO, NamedTuple

from moonpool.ipc.tensors import NAMES
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest, ModelVersion
from moonpool.runtime.model.reshaping import Reshaping, of_inputs
from moonpool.runtime.process.threads import start_thread

_log = RuntimeLog("moonpool.server")
# The form of the file, as `moonpool bench` reads it.
FORMAT = 1
# The most bytes of tensors, and the most requests, that wait to be written.
_QUEUE_BYTES, _QUEUE_REQUESTS = 64 << 20, 4096
# The bytes that are encoded at a time, while no other thread runs; a multiple of three, so that the parts join.
_CHUNK_BYTES = 3 << 16
_END_S = 10.0


class _Tensor(NamedTuple):
    number: int
    datatype: int
    shape: list[int]
    data: bytes


class _Entry(NamedTuple):
    at_ns: int
    config: ModelConfig
    tensors: list[_Tensor]
    size_bytes: int


class Capture:
    """The captured requests of a server. Any thread may call any method."""

    def __init__(self, path: str, *, rate: int, most_bytes: int) -> None:
        """Make the file, and capture one of `rate` requests until it has `most_bytes`. Raises OSError,
        `OutOfThreads`.
        """
        self.is_on = True
        self._path, self._rate, self._most_bytes = path, rate, most_bytes
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._seen = self._written = self._dropped = 0
        self._is_over = False
        # True if the file can have no more.
        self._is_ended = False
        self._begin_ns = time.monotonic_ns()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: IO[bytes] = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._size_bytes = self._file.write(json.dumps({"format": FORMAT}).encode() + b"\n")
        self._file.flush()
        self._thread = threading.Thread(target=self._run, name="moonpool-capture", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self._file.close()
            raise
        share = "all requests" if rate == 1 else f"one of {rate} requests"
        _log.warning(
            "Capturing %s to %s, up to %d bytes: the file has the inputs as clients sent them, whatever they contain.",
            share,
            path,
            most_bytes,
        )

    def take(self, model: ModelVersion, request: InferenceRequest) -> None:
        """Capture a request that is about to be submitted, if it is its turn and there is room. Never waits."""
        at_ns = time.monotonic_ns()
        with self._changed:
            self._seen += 1
            if not self.is_on or self._seen % self._rate:
                return
            size_bytes = sum(array.nbytes for array in request.arrays)
            if self._queued_bytes + size_bytes > _QUEUE_BYTES or len(self._queue) >= _QUEUE_REQUESTS:
                self._dropped += 1
                is_first = self._dropped == 1
            else:
                self._queued_bytes += size_bytes
                is_first = None
        if is_first is None:
            try:
                self._put(at_ns, model.config, request, size_bytes)
            except MemoryError:  # the request itself has its memory, and goes on
                with self._changed:
                    self._queued_bytes -= size_bytes
                    self._dropped += 1
        elif is_first:
            _log.warning("Requests arrive faster than they can be captured: some are missing in the file.")

    def _put(self, at_ns: int, config: ModelConfig, request: InferenceRequest, size_bytes: int) -> None:
        # The memory belongs to the client or to the model soon.
        tensors = [
            _Tensor(each.number, each.datatype, list(each.shape), array.tobytes())
            for each, array in zip(request.shapes.tensors, request.arrays, strict=True)
        ]
        with self._changed:
            self._queue.append(_Entry(at_ns, config, tensors, size_bytes))
            self._changed.notify()

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            try:
                if not self._is_ended and not self._write(entry):
                    self._stop("has all the bytes that it may have")
            except OSError as error:
                self._stop(f"cannot be written: {error.strerror}")
            finally:
                with self._changed:
                    self._queued_bytes -= entry.size_bytes
        try:
            self._file.close()
        except OSError as error:
            self._stop(f"cannot be written: {error.strerror}")
        _log.info("Captured %d requests to %s; %d were left out.", self._written, self._path, self._dropped)

    def _next(self) -> _Entry | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_over)
            return self._queue.popleft() if self._queue else None

    def _stop(self, why: str) -> None:
        with self._changed:
            self.is_on, self._is_ended = False, True
        _log.warning("No more requests are captured: %s %s.", self._path, why)

    def _write(self, entry: _Entry) -> bool:
        """Write a line; return False, without any of it, if the file would have too many bytes. Raises OSError."""
        parts = list(_parts(entry, (entry.at_ns - self._begin_ns) / 1e9))
        size_bytes = sum(len(part) for part in parts)
        if self._size_bytes + size_bytes > self._most_bytes:
            return False
        for part in parts:
            self._file.write(part)
        self._file.flush()
        self._size_bytes += size_bytes
        self._written += 1
        return True

    def close(self) -> None:
        """Write what was taken, and close the file. What the disk does not take within some seconds is lost."""
        with self._changed:
            self.is_on = False
            self._is_over = True
            self._changed.notify()
        self._thread.join(_END_S)


def _parts(entry: _Entry, at_s: float) -> Iterator[bytes]:
    """Yield the parts of the line of a request."""
    reshaped = of_inputs(entry.config)
    yield f'{{"at_s":{at_s:.6f},"model":{json.dumps(entry.config.name)},"inputs":['.encode()
    for index, (number, datatype, shape, data) in enumerate(entry.tensors):
        name = entry.config.inputs[number].name
        there = reshaped.get(name)
        if there is not None:
            # The request has the model's form of the shape, and a client sends its own.
            shape = Reshaping(there.wanted, there.given, there.has_rows).of(shape)
        described = {"name": name, "datatype": NAMES[datatype], "shape": shape}
        text = json.dumps(described, separators=(",", ":"))
        yield f'{"," if index else ""}{text[:-1]},"b64":"'.encode()
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield base64.b64encode(data[begin : begin + _CHUNK_BYTES])
        yield b'"}'
    yield b"]}\n"
