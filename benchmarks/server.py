"""A model behind a server's address, measured by load workers; its tensors may lie in shared memory.

Theory of operation. `ask` is for threads that send requests by themselves: each has a connection of its own, in a
`threading.local`, and the connection is closed when its thread has ended, since nothing else refers to it. All else is
for one thread, but where it says so.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool import MoonpoolError
from moonpool.benchmarks.data import OPENAI, DataMix
from moonpool.benchmarks.generator.blocking import BlockingConnection, make_wire
from moonpool.benchmarks.generator.engine import ANSWERED
from moonpool.benchmarks.generator.workers import LoadWorkers, Prepared, Sending
from moonpool.benchmarks.loads import Load
from moonpool.benchmarks.resources import ResourceMeter, local_pid, triton_stubs
from moonpool.benchmarks.result import digests_of_configuration
from moonpool.benchmarks.timeline import MOST_TRACES, NoTraces, ServerTrace, read_traces
from moonpool.benchmarks.windows import Window, between, success_count
from moonpool.runtime.client.control_client import (
    HttpControlClient,
    Interface,
    Refused,
    control_client,
    interface,
    understood,
)
from moonpool.runtime.client.request import Endpoint, Place, Question, Unreachable, around_id, json_post
from moonpool.runtime.process.usage import with_descendants

_numbers = itertools.count()


class NoSharedMemory(MoonpoolError):
    """The machine has not enough shared memory."""

    code = "UNAVAILABLE"


class LoadRegion:
    """Shared memory with a name by which a server on this machine finds it. `close` deletes it."""

    def __init__(self, size_bytes: int, contents: bytes = b"") -> None:
        """Make the region and fill it. Raises `NoSharedMemory`."""
        self.name = f"moonpool-bench-{os.getpid()}-{next(_numbers)}"
        self.key = f"/{self.name}"
        # A region cannot be empty, but tensors can.
        self.size_bytes = max(1, size_bytes)
        # As shm_open of the C library does.
        self._path = f"/dev/shm/{self.name}"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Without pages a server that writes there would die of SIGBUS.
            os.posix_fallocate(fd, 0, self.size_bytes)
            with mmap.mmap(fd, self.size_bytes) as mapped:
                mapped[: len(contents)] = contents
        except OSError as error:
            self.close()
            raise NoSharedMemory(f"{size_bytes} bytes of shared memory: {error}") from error
        finally:
            os.close(fd)

    def close(self) -> None:
        os.unlink(self._path)


# Whether a request is the first and the last of its sequence, in the order of the engine's places.
_PLACES = ((True, False), (False, False), (False, True), (True, True))
# With more callers than this, several share a region for their outputs.
_OUTPUT_REGIONS = 16
# The time that a server has to write its traces, and between two looks at their file.
_TRACES_S, _LOOK_S = 10.0, 0.05


class MeasuredServer:
    """One model of one server. Call `prepare` before the first window; `close` unregisters its regions.

    Every method raises `Refused` and `Unreachable`. For one thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        version: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        timeout_s: float,
        server_pid: int | None = None,
    ) -> None:
        """`server_pid` is the server's process, if that is known otherwise than from a moonpool server itself."""
        self.where = endpoint.url
        self._server_pid = server_pid
        self._foreign: bool | None = None
        self.scheme = endpoint.scheme
        self._endpoint = endpoint
        self._model, self._version = model, version
        self._headers = headers
        self._timeout_s = timeout_s
        self._most_connections = 1
        # The server's settings before requests were traced, and the state of its file then.
        self._kept_settings: Mapping[str, Any] | None = None
        self._trace_file = Path()
        self._trace_state: tuple[int, int] | None = None
        self._client = control_client(endpoint, headers, timeout_s)
        self._workers: LoadWorkers | None = None
        self._meter: ResourceMeter | None = None
        # For `ask`: the connection of each thread, and all of them.
        self._prepared: list[Prepared] = []
        self._own = threading.local()
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._client.close)

    def interface(self) -> Interface:
        with understood(f"what {self.where} says of model '{self._model}'"):
            return interface(self._client, self._model, self._version)

    def configuration_fields(self) -> dict[str, str] | None:
        """Ask for the model's configuration, and return digests of its fields; None if the server has no such
        extension.
        """
        with understood(f"the configuration that {self.where} tells"):
            found = self._client.configuration(self._model, self._version)
            return None if found is None else digests_of_configuration(found)

    def advice(self, whole: Window) -> Mapping[str, Any] | None:  # noqa: ARG002 - the server has its own
        """Return the advice of a moonpool server for the last seconds, over HTTP; other servers have none."""
        found = self._client.advice(self._model, self._version)
        wanted = ("reason", "text", "line")
        if not isinstance(found, dict) or not all(isinstance(found.get(k), str) for k in wanted):
            return None
        return {key: found[key] for key in wanted}

    def prepare(
        self,
        mix: DataMix,
        *,
        processes: int,
        most_connections: int,
        shared_memory: bool = False,
        is_stream: bool = False,
        is_json: bool = False,
        openai: str | None = None,
        cancelled: tuple[float, float] | None = None,
        sequences: tuple[int, int] | None = None,
    ) -> None:
        """Make the requests, send the first one and those with an expected answer, and start the load workers.

        `most_connections` is the most that any load will need. With `openai`, an endpoint of that API, requests are
        those of `openai_mix`, and none is sent. Raises `WrongAnswer`, too.
        """
        questions = [Question(self._model, self._version, data.inputs, is_json=is_json) for data in mix.requests]
        self._most_connections = most_connections
        requests: list[list[Prepared]] = []
        if openai is not None:
            bodies = [data.inputs[0].values()[0].encode() for data in mix.requests]
            requests = [[json_post(self._endpoint, OPENAI[openai][0], self._headers, body) for body in bodies]]
        elif not is_stream and sequences is None:
            with understood(f"the answer of {self.where} to a request"):
                sizes = self._client.output_sizes(questions[0])
            self._check_answers(mix, questions)
            if shared_memory:
                count = min(most_connections, _OUTPUT_REGIONS)
                placed = self._in_shared_memory(questions[0], sizes, count)
                requests = [[self._serialized(each, is_stream=False)] for each in placed]
        if sequences is not None:
            requests = [[self._in_sequence(each, place, is_stream) for place in _PLACES for each in questions]]
        elif not requests:
            requests = [[self._serialized(each, is_stream=is_stream) for each in questions]]
        self._prepared = list(requests[0])
        self._workers = LoadWorkers(
            self._endpoint,
            Sending(requests, order=mix.order, cancelled=cancelled, sequences=sequences, is_stream=is_stream),
            processes=processes,
            timeout_s=self._timeout_s,
            headers=self._headers,
        )
        self._cleanup.callback(self._workers.close)

    def _check_answers(self, mix: DataMix, questions: Sequence[Question]) -> None:
        """Compare the answers that are expected with the server's."""
        for number, (data, question) in enumerate(zip(mix.requests, questions, strict=True)):
            if data.expected:
                with understood(f"the answer of {self.where} to request {number}"):
                    answer = self._client.infer(question)
                    outputs = {tensor.name: tensor.array() for tensor in answer}
                data.check(outputs, f"request {number} at {self.where}")

    def _serialized(self, question: Question, *, is_stream: bool) -> bytes:
        if self._endpoint.scheme == "http":
            serialize = question.as_generate_stream if is_stream else question.as_http
            return serialize(self._endpoint, self._headers)
        return question.as_grpc(is_stream=is_stream)

    def _in_sequence(self, question: Question, place: tuple[bool, bool], is_stream: bool) -> tuple[bytes, bytes]:
        """Serialize the form of a request for a place in a sequence, without the id."""

        def serialize(sequence_id: int) -> bytes:
            return self._serialized(replace(question, sequence=(sequence_id, *place)), is_stream=is_stream)

        return around_id(serialize, 11 if self._endpoint.scheme == "http" else 5)

    def _in_shared_memory(self, question: Question, sizes: Mapping[str, int], count: int) -> list[Question]:
        """Register one region for the inputs of all callers, and one for the outputs of each caller."""
        contents = b"".join(tensor.data for tensor in question.inputs)
        inputs = self._registered(len(contents), contents)
        input_sizes = {tensor.name: len(tensor.data) for tensor in question.inputs}
        input_places = _places(inputs, input_sizes)
        questions = []
        for _ in range(count):
            outputs = self._registered(sum(sizes.values()))
            questions.append(
                Question(question.model, question.version, question.inputs, input_places, _places(outputs, sizes))
            )
        return questions

    def _registered(self, size_bytes: int, contents: bytes = b"") -> LoadRegion:
        region = LoadRegion(size_bytes, contents)
        self._cleanup.callback(region.close)
        self._client.register(region.name, region.key, region.size_bytes)
        self._cleanup.callback(self._unregister, region)
        return region

    def _unregister(self, region: LoadRegion) -> None:
        # A server that has ended no longer knows the region.
        with contextlib.suppress(Refused, Unreachable):
            self._client.unregister(region.name)

    def window(self, load: Load, seconds: float) -> Window:
        if self._workers is None:
            raise ValueError("the requests are not prepared")
        if self._meter is not None:
            self._meter.begin()
        before = self._statistics()
        found = self._workers.window(load, seconds, self._most_connections)
        after = self._statistics()
        with understood(f"the statistics of {self.where}"):
            found.split = between(before, after)
        if self._meter is not None:
            found.resources = self._meter.end()
        return found

    def ask(self, kind: int) -> None:
        """Send the request of that number and wait for its answer, on a connection of this thread. From any thread.

        Raises `Unreachable`, and `Refused` with the error of the answer.
        """
        connection: BlockingConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            wire = make_wire(self._endpoint, self._prepared, self._headers)
            connection = BlockingConnection(self._endpoint, wire, self._timeout_s)
            self._own.connection = connection
        outcome = connection.ask(kind)
        if outcome != ANSWERED:
            raise Refused(outcome)

    def measure_resources(self, metrics_url: str | None) -> None:
        """Measure what the server and its processes use in each window.

        A moonpool server on this machine tells its process; of others it must be known. Raises `NoMetrics`, too.
        """
        pid = self._server_pid
        if pid is None:
            pid = local_pid(self._client.overview(), self._endpoint.port)
        if pid is None:
            raise Refused(f"{self.where} is not a moonpool server on this machine: give --server-pid")
        root = pid
        self._meter = ResourceMeter(lambda: [root], metrics_url)

    def instance_pids(self) -> list[int]:
        """Return the processes of the model's instances, of a server on this machine. From any thread.

        These may be killed, so only processes that the server itself has started are believed. A moonpool server tells
        them. Of another one, whose process must be known, they are the stubs of Triton's Python backend.
        """
        if self._is_foreign():
            return triton_stubs(self._server_pid or 0, self._model)
        root = local_pid(self._client.overview(), self._endpoint.port)
        if root is None:
            raise Refused(f"{self.where} is not a moonpool server that this process may see")
        its = set(with_descendants([root]))
        its.discard(root)
        told = self._client.instance_pids(self._model, self._version)
        return [pid for pid in told if pid in its]

    def answered(self) -> int | None:
        """Return how many requests the model has answered so far, by the server's count. From any thread."""
        found = self._statistics()
        with understood(f"the statistics of {self.where}"):
            return None if found is None else success_count(found)

    def _is_foreign(self) -> bool:
        """Return True for a server whose process is known, and which is not moonpool's."""
        if self._server_pid is None:
            return False
        if self._foreign is None:
            try:
                self._foreign = local_pid(self._client.overview(), self._endpoint.port) is None
            except Refused:
                self._foreign = True
        return self._foreign

    def begin_traces(self) -> None:
        """Have the server trace each request from now on, until `traces`. Raises `NoTraces`, too."""
        if not isinstance(self._client, HttpControlClient):
            raise NoTraces(f"{self.where} does not tell its traces: give an http:// address")
        with understood(f"what {self.where} says of its traces"):
            before = self._client.trace_settings()
            # With a frequency, the traces would be in several files.
            wanted = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "0"}
            wanted["trace_count"] = str(MOST_TRACES)
            self._kept_settings = {name: before[name] for name in wanted}
            self._trace_file = Path(str(before["trace_file"]))
            self._client.trace_settings(wanted)
            self._trace_state = _state_of(self._trace_file)
        self._cleanup.callback(self._end_traces)

    def _end_traces(self) -> None:
        """Give the server its settings back, once."""
        if self._kept_settings is not None and isinstance(self._client, HttpControlClient):
            kept, self._kept_settings = self._kept_settings, None
            # A server that has ended has no settings any more.
            with contextlib.suppress(Refused, Unreachable):
                self._client.trace_settings(kept)

    def traces(self) -> list[ServerTrace]:
        """Return the traces of this server's file, which must be on this machine. Raises `NoTraces`."""
        self._end_traces()
        # A tritonserver writes its traces when its settings change, after the last request that had the old ones.
        path, last = self._trace_file, None
        give_up_s = time.monotonic() + _TRACES_S
        while (now := _state_of(path)) in (None, self._trace_state) or now != last:
            if time.monotonic() >= give_up_s:
                break
            last = now
            time.sleep(_LOOK_S)
        try:
            return read_traces(path)
        except OSError as error:
            raise NoTraces(
                f"the traces of {self.where} are in its file {path}, which cannot be read here: {error.strerror}"
            ) from error

    def _statistics(self) -> Mapping[str, Any] | None:
        with understood(f"the statistics of {self.where}"):
            return self._client.statistics(self._model, self._version)

    def close(self) -> None:
        self._cleanup.close()


def _state_of(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _places(region: LoadRegion, sizes: Mapping[str, int]) -> dict[str, Place]:
    """Place tensors back to back."""
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = Place(region.name, offset, size)
        offset += size
    return places
