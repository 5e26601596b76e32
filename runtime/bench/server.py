"""A model behind a server's address, measured by load workers; its tensors may lie in shared memory."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Mapping, Sequence
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
from moonpool.runtime.bench.engine import Unreachable
from moonpool.runtime.bench.request import Endpoint, Place, Question, QuestionTensor
from moonpool.runtime.bench.result import digests_of_configuration
from moonpool.runtime.bench.windows import Load, Window, between
from moonpool.runtime.bench.workers import LoadWorkers

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
        inputs: Sequence[QuestionTensor],
        *,
        processes: int,
        most_connections: int,
        shared_memory: bool = False,
        is_stream: bool = False,
        is_json: bool = False,
    ) -> None:
        """Make the requests, send the first one, and start the load workers.

        `most_connections` is the most that any load will need.
        """
        question = Question(self._model, self._version, inputs, is_json=is_json)
        questions = [question]
        self._most_connections = most_connections
        if not is_stream:
            with understood(f"the answer of {self.where} to a request"):
                sizes = self._client.output_sizes(question)
            if shared_memory:
                questions = self._in_shared_memory(
                    question, sizes, min(most_connections, _OUTPUT_REGIONS)
                )
        if self._endpoint.scheme == "http":
            requests = [each.as_http(self._endpoint, self._headers) for each in questions]
        else:
            requests = [each.as_grpc(is_stream=is_stream) for each in questions]
        self._workers = LoadWorkers(
            self._endpoint,
            requests,
            processes=processes,
            timeout_s=self._timeout_s,
            is_stream=is_stream,
            headers=self._headers,
        )
        self._cleanup.callback(self._workers.close)

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
        before = self._statistics()
        found = self._workers.window(load, seconds, self._most_connections)
        after = self._statistics()
        with understood(f"the statistics of {self.where}"):
            found.split = between(before, after)
        return found

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
