"""A model behind a server's address, measured by load workers; its tensors may lie in shared memory."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import posix_ipc

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.control_client import (
    Interface,
    Refused,
    control_client,
    interface,
    understood,
)
from moonpool.runtime.bench.data import DataMix
from moonpool.runtime.bench.generator.engine import Unreachable
from moonpool.runtime.bench.generator.workers import LoadWorkers, Prepared, Sending
from moonpool.runtime.bench.loads import Load
from moonpool.runtime.bench.request import Endpoint, Place, Question, around_id
from moonpool.runtime.bench.resources import ResourceMeter, local_pid
from moonpool.runtime.bench.result import digests_of_configuration
from moonpool.runtime.bench.windows import Window, between
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
        memory = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX)
        try:
            # Without pages a server that writes there would die of SIGBUS.
            os.posix_fallocate(memory.fd, 0, self.size_bytes)
            with mmap.mmap(memory.fd, self.size_bytes) as mapped:
                mapped[: len(contents)] = contents
        except OSError as error:
            posix_ipc.unlink_shared_memory(self.key)
            raise NoSharedMemory(f"{size_bytes} bytes of shared memory: {error}") from error
        finally:
            memory.close_fd()

    def close(self) -> None:
        posix_ipc.unlink_shared_memory(self.key)


# Whether a request is the first and the last of its sequence, in the order of the engine's places.
_PLACES = ((True, False), (False, False), (False, True), (True, True))
# With more callers than this, several share a region for their outputs.
_OUTPUT_REGIONS = 16


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
    ) -> None:
        self.where = endpoint.url
        self.scheme = endpoint.scheme
        self._endpoint = endpoint
        self._model, self._version = model, version
        self._headers = headers
        self._timeout_s = timeout_s
        self._most_connections = 1
        self._client = control_client(endpoint, headers, timeout_s)
        self._workers: LoadWorkers | None = None
        self._meter: ResourceMeter | None = None
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._client.close)

    def interface(self) -> Interface:
        with understood(f"what {self.where} says of model '{self._model}'"):
            return interface(self._client, self._model, self._version)

    def configuration_fields(self) -> dict[str, str] | None:
        """Ask for the model's configuration, and return digests of its fields; None if the server has no such extension."""
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
        cancelled: tuple[float, float] | None = None,
        sequences: tuple[int, int] | None = None,
    ) -> None:
        """Make the requests, send the first one and those with an expected answer, and start the load workers.

        `most_connections` is the most that any load will need. Raises `WrongAnswer`, too.
        """
        questions = [
            Question(self._model, self._version, data.inputs, is_json=is_json)
            for data in mix.requests
        ]
        self._most_connections = most_connections
        requests: list[list[Prepared]] = []
        if not is_stream and sequences is None:
            with understood(f"the answer of {self.where} to a request"):
                sizes = self._client.output_sizes(questions[0])
            self._check_answers(mix, questions)
            if shared_memory:
                count = min(most_connections, _OUTPUT_REGIONS)
                placed = self._in_shared_memory(questions[0], sizes, count)
                requests = [[self._serialized(each, is_stream=False)] for each in placed]
        if sequences is not None:
            requests = [
                [
                    self._in_sequence(each, place, is_stream)
                    for place in _PLACES
                    for each in questions
                ]
            ]
        elif not requests:
            requests = [[self._serialized(each, is_stream=is_stream) for each in questions]]
        self._workers = LoadWorkers(
            self._endpoint,
            Sending(
                requests,
                order=mix.order,
                cancelled=cancelled,
                sequences=sequences,
                is_stream=is_stream,
            ),
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
            return question.as_http(self._endpoint, self._headers)
        return question.as_grpc(is_stream=is_stream)

    def _in_sequence(
        self, question: Question, place: tuple[bool, bool], is_stream: bool
    ) -> tuple[bytes, bytes]:
        """Serialize the form of a request for a place in a sequence, without the id."""

        def serialize(sequence_id: int) -> bytes:
            return self._serialized(
                replace(question, sequence=(sequence_id, *place)), is_stream=is_stream
            )

        return around_id(serialize, 11 if self._endpoint.scheme == "http" else 5)

    def _in_shared_memory(
        self, question: Question, sizes: Mapping[str, int], count: int
    ) -> list[Question]:
        """Register one region for the inputs of all callers, and one for the outputs of each caller."""
        contents = b"".join(tensor.data for tensor in question.inputs)
        inputs = self._registered(len(contents), contents)
        input_sizes = {tensor.name: len(tensor.data) for tensor in question.inputs}
        input_places = _places(inputs, input_sizes)
        questions = []
        for _ in range(count):
            outputs = self._registered(sum(sizes.values()))
            questions.append(
                Question(
                    question.model,
                    question.version,
                    question.inputs,
                    input_places,
                    _places(outputs, sizes),
                )
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

    def measure_resources(self, server_pid: int | None, metrics_url: str | None) -> None:
        """Measure what the server and its processes use in each window.

        A moonpool server on this machine tells its process; of others give it. Raises `NoMetrics`, too.
        """
        pid = server_pid
        if pid is None:
            pid = local_pid(self._client.overview(), self._endpoint.port)
        if pid is None:
            raise Refused(f"{self.where} is no moonpool server on this machine: give --server-pid")
        root = pid
        self._meter = ResourceMeter(lambda: [root], metrics_url)

    def instance_pids(self) -> list[int]:
        """Return the processes of the model's instances, of a moonpool server on this machine. From any thread.

        These may be killed, so only processes that the server itself has started are believed.
        """
        root = local_pid(self._client.overview(), self._endpoint.port)
        if root is None:
            raise Refused(f"{self.where} is no moonpool server that this process may see")
        its = set(with_descendants([root]))
        its.discard(root)
        told = self._client.instance_pids(self._model, self._version)
        return [pid for pid in told if pid in its]

    def _statistics(self) -> Mapping[str, Any] | None:
        with understood(f"the statistics of {self.where}"):
            return self._client.statistics(self._model, self._version)

    def close(self) -> None:
        self._cleanup.close()


def _places(region: LoadRegion, sizes: Mapping[str, int]) -> dict[str, Place]:
    """Place tensors back to back."""
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = Place(region.name, offset, size)
        offset += size
    return places
